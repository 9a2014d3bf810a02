"""Headers of manifests: what training relies on is there, and the model is the one that made the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsplit.cache.draft import write_manifest
from dsplit.cache.header import model_differences
from dsplit.cache.manifest import Manifest, manifest_path, read_manifest
from dsplit.cache.rows import CachedRows
from dsplit.errors import CacheError
from dsplit.models.locate import locate
from dsplit.recipe import ModelOptions
from tests import tiny
from tests.cache.runs import cache


def stated(path: Path) -> dict[str, Any]:
    """The header without what is added when it is written."""
    added = ("dsplit_manifest", "check", "rows")
    return {name: value for name, value in read_manifest(path).header.items() if name not in added}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trainable", 5),
        ("trainable", [5]),
        ("columns", None),
        ("family", None),
        ("dtype", ["float32"]),
        ("posterior", None),
        ("axes", None),
        ("data", []),
        ("units", {"encode_image": 1}),
        ("units", []),
        ("empty_prompt", None),
        ("model", "here"),
        ("model", {"name": 3, "files": {}, "sizes": {}}),
        ("model", {"name": "x", "files": {"vae": {"config.json": 7}}, "sizes": {}}),
        ("model", {"name": "x", "files": {}, "sizes": {"vae": 3}}),
    ],
)
def test_a_header_that_is_whole_but_wrong_is_refused_in_words(copy: tuple[Path, Path], field: str, value: Any) -> None:
    metadata, out = copy
    path = manifest_path(out, "default")
    header = {k: v for k, v in stated(path).items() if k != field} | ({} if value is None else {field: value})
    write_manifest(path, Manifest(header, read_manifest(path).rows))
    with pytest.raises(
        CacheError, match=r"default\.jsonl: its first line is not what dsplit writes; run `dsplit cache`"
    ):
        CachedRows(out)
    assert cache(out, metadata, dry_run=True, why=True)["why"] == []
    cache(out, metadata)
    assert len(CachedRows(out)) == 4


def test_a_cache_without_rows_is_refused_in_words(copy: tuple[Path, Path]) -> None:
    path = manifest_path(copy[1], "default")
    write_manifest(path, Manifest(stated(path), ()))
    with pytest.raises(CacheError, match=r"default\.jsonl: has no rows; run `dsplit cache` again"):
        CachedRows(copy[1])


def differences(out: Path, folder: Path) -> list[str]:
    return model_differences(CachedRows(out).header, locate(ModelOptions(model=str(folder))))


def test_another_model_is_told_by_its_configs_and_the_sizes_of_its_weights(
    made: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    folder, out = tiny.qwen_image(tmp_path / "model"), made[1]
    header = CachedRows(out).header
    assert differences(out, folder) == []
    config = folder / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"note": 1}))
    weights = folder / "text_encoder" / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes() + b" ")
    found = differences(out, folder)
    assert len(found) == 2
    digest = header["model"]["files"]["vae"]["config.json"]
    assert f"text_encoder/model.safetensors: cached {size} bytes, requested {size + 1} bytes" in found
    assert any(line.startswith(f"vae/config.json: cached {digest}, requested ") for line in found)


def test_what_is_absent_does_not_count(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    folder = tiny.qwen_image(tmp_path / "model")
    for path in (folder / "vae").iterdir():
        path.unlink()
    (folder / "text_encoder" / "model.safetensors").unlink()
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    assert differences(made[1], folder) == []
