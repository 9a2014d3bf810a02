"""docs/cache-format.md is exact: a cache is read here by hashlib and json alone, as another program would."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from dsplit.cache.rows import CachedRows
from tests.cache.runs import cache
from tests.cache.test_variants import CAPTIONS, WINDOWS, written


def blake(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def h(*texts: str) -> str:
    return blake(b"".join(len(t.encode()).to_bytes(8, "little") + t.encode() for t in texts))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    folder = tmp_path_factory.mktemp("documented")
    metadata = written(folder / "data")
    return metadata, folder / "cache", cache(folder / "cache", metadata, **WINDOWS)["digest"]


@pytest.fixture(scope="module")
def manifest(made: tuple[Path, Path, str]) -> tuple[dict[str, Any], list[dict[str, Any]], bytes]:
    data = (made[1] / "manifests" / "default.jsonl").read_bytes()
    first, _, rest = data.partition(b"\n")
    return json.loads(first), [json.loads(line) for line in rest.splitlines()], rest


def test_the_check(manifest: Any) -> None:
    header, rows, rest = manifest
    empty = json.dumps({**header, "check": ""}, ensure_ascii=False) + "\n"
    assert header["check"] == h(empty, blake(rest))
    assert (header["dsplit_manifest"], header["rows"], header["posterior"]) == (3, 3, "mean")
    assert rows[0]["variants"] == {"prompt": 3, "view": 4}


def call(header: dict[str, Any], unit: str, components: str, **inputs: str) -> str:
    used = [part for name in components.split() for part in (name, header["model"]["components"][name])]
    read = [part for name, key in inputs.items() for part in (name, key)]
    return h("unit", unit, header["units"][unit], "components", *used, "dtype", "float32", "inputs", *read)


def test_the_keys(made: Any, manifest: Any) -> None:
    header, rows, _ = manifest
    captions = [h("str", json.dumps(caption)) for caption in CAPTIONS[0]]
    assert rows[0]["inputs"]["prompt"] == h("list", json.dumps(CAPTIONS[0]))
    assert rows[1]["inputs"]["prompt"] == h("str", json.dumps(CAPTIONS[1]))
    for name in ("prompt_embeds", "prompt_mask"):
        encoded = [h(call(header, "encode_prompt", "text_encoder tokenizer", prompt=key), name) for key in captions]
        assert rows[0]["keys"][name] == encoded
    views = [[left, 0, flip] for flip in (False, True) for left in (0, 32)]
    assert rows[0]["inputs"]["view"] == h("list", json.dumps(views))
    image, size = blake((made[0].parent / "0.png").read_bytes()), h("tuple", "[32, 32]")
    loaded = [call(header, "load_image", "", image=image, size=size, view=h("list", json.dumps(v))) for v in views]
    latents = [call(header, "encode_image", "vae", pixels=h(key, "pixels")) for key in loaded]
    assert rows[0]["keys"]["latents"] == [h(key, "latents") for key in latents]


def test_the_values_and_the_digest(made: Any, manifest: Any) -> None:
    header, rows, _ = manifest
    crc: dict[str, int] = {}
    found: dict[str, torch.Tensor] = {}
    for path in made[1].glob("shards/*/*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            crc |= json.loads(file.metadata()["dsplit"])["crc32"]
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    cached = CachedRows(made[1])
    for i, row in enumerate(rows):
        for name, keys in row["keys"].items():
            (axis,) = header["axes"][name]
            assert len(keys) == row.get("variants", {}).get(axis, 1)
            for k, key in enumerate(keys):
                assert torch.equal(found[key], cached.values(i, {axis: k})[name])
    entries = sorted((r["id"], name, key, crc[key]) for r in rows for name, keys in r["keys"].items() for key in keys)
    assert made[2] == h(*(str(part) for entry in entries for part in entry))
