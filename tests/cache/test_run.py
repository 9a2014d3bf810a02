"""Stage 1 on the tiny Qwen-Image: only what changed is encoded, and nothing wrong is ever kept."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from dsplit.cache import stage1
from dsplit.cache.encode import encode, inputs
from dsplit.cache.rows import CachedRows
from dsplit.dataset import read_dataset
from dsplit.errors import CacheError, DataError, UsageError
from dsplit.models.load import load_component
from dsplit.models.locate import locate
from dsplit.recipe import DataOptions, ModelOptions
from tests import tiny
from tests.cache.runs import cache

PROMPTS = ("a red circle", "a blue square", "a red circle", "")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A data set of four rows with two distinct captions and the empty one, its cache, and what the run said."""
    folder = tmp_path_factory.mktemp("made")
    metadata = tiny.dataset(folder / "data", 4, sizes=((64, 64), (96, 64)), prompts=PROMPTS)
    return metadata, folder / "cache", cache(folder / "cache", metadata)


@pytest.fixture
def copy(made: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of that data set and cache, to change at will."""
    for path in (made[0].parent, made[1]):
        shutil.copytree(path, tmp_path / path.name)
    return tmp_path / "data" / "metadata.csv", tmp_path / "cache"


def counts(result: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {unit: (n, result["reused"][unit]) for unit, n in result["encoded"].items()}


def shards(out: Path) -> list[Path]:
    return sorted(out.glob("shards/*/*"))


def test_equal_captions_once_and_the_empty_one_always(made: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, result = made
    assert counts(result) == {"encode_image": (4, 0), "encode_prompt": (3, 0)}
    assert result["rows"] == 4
    assert [p.parent.name for p in shards(out)] == ["encode_image", "encode_prompt"]


def test_the_empty_prompt_is_cached_unasked(tmp_path: Path) -> None:
    result = cache(tmp_path / "cache", tiny.dataset(tmp_path / "data", 1))
    assert result["encoded"] == {"encode_image": 1, "encode_prompt": 2}
    header = CachedRows(tmp_path / "cache").header
    assert set(header["empty_prompt"]) == {"prompt_embeds", "prompt_mask"}


def test_cached_values_are_those_of_the_units(made: tuple[Path, Path, dict[str, Any]]) -> None:
    metadata, out, _ = made
    rows = CachedRows(out)
    model = locate(ModelOptions(model=str(tiny.QWEN_IMAGE)))
    components = {n: load_component(model, n, torch.float32, "cpu") for n in ("vae", "text_encoder", "tokenizer")}
    split = model.family.split(sft())
    dataset = read_dataset(DataOptions(metadata=str(metadata)), model.family.columns_for(sft()), 16)
    assert rows.ids == [row.id for row in dataset.rows]
    for i, row in enumerate(dataset.rows):
        plain = encode(split.stage1, inputs(row), components)
        cached = rows.values(i)
        assert set(cached) == {"latents", "prompt_embeds", "prompt_mask"}
        for name, value in cached.items():
            assert torch.equal(value, plain[name][0]), name
        assert rows.group(i) == row.size == ((64, 64), (96, 64))[i % 2]
        assert cached["latents"].shape == (16, 1, row.size[1] // 8, row.size[0] // 8)
        assert rows.place(i).endswith(f"metadata.csv:{i + 2}")


def sft() -> Any:
    from dsplit.models.registry import registry

    return registry().task("sft")


def test_nothing_changed_nothing_encoded_nothing_loaded(
    copy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, out = copy
    monkeypatch.setattr(stage1, "load_component", None)
    before = [p.stat().st_mtime_ns for p in shards(out)]
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (0, 3)}
    assert [p.stat().st_mtime_ns for p in shards(out)] == before


def test_an_edited_caption_costs_one_text(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    metadata.write_text(metadata.read_text().replace("a blue square", "a green square"))
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (1, 2)}


def test_a_repainted_picture_with_its_mtime_set_back_costs_one_latent(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    cache(out, metadata)
    first = CachedRows(out).values(0)["latents"]
    picture = metadata.parent / "img00.png"
    times = picture.stat()
    tiny.picture(picture, (64, 64), seed=99)
    os.utime(picture, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert counts(cache(out, metadata)) == {"encode_image": (1, 3), "encode_prompt": (0, 3)}
    assert not torch.equal(CachedRows(out).values(0)["latents"], first)
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (0, 3)}


def test_another_size_costs_no_text(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    assert counts(cache(out, metadata, resolution="32x32")) == {"encode_image": (4, 0), "encode_prompt": (0, 3)}
    rows = CachedRows(out)
    assert {rows.group(i) for i in range(4)} == {(32, 32)}
    assert rows.header["data"]["resolution"] == "32x32"
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (0, 3)}  # both sizes are kept


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("vae/config.json", {"encode_image": (4, 0), "encode_prompt": (0, 3)}),
        ("tokenizer/tokenizer_config.json", {"encode_image": (0, 4), "encode_prompt": (3, 0)}),
    ],
)
def test_a_changed_component_is_found(copy: tuple[Path, Path], tmp_path: Path, file: str, expected: dict) -> None:
    metadata, out = copy
    model = tiny.qwen_image(tmp_path / "model")
    assert cache(out, metadata, model)["encoded"] == {"encode_image": 0, "encode_prompt": 0}  # where it lies is nothing
    path = model / file
    path.write_text(json.dumps({**json.loads(path.read_text()), "dsplit_test": 1}))
    assert counts(cache(out, metadata, model)) == expected


def test_the_digest_does_not_depend_on_how_it_was_made(
    made: tuple[Path, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, _, result = made
    monkeypatch.setattr("dsplit.cache.store.HAND_OVER", 1)
    lines = metadata.read_text().splitlines(keepends=True)
    turned = metadata.with_name("turned.csv")
    turned.write_text("".join([lines[0], *reversed(lines[1:])]))
    part = metadata.with_name("part.csv")
    part.write_text("".join([lines[0], *lines[2:4]]))
    out = tmp_path / "cache"
    assert cache(out, part)["digest"] != result["digest"]
    assert cache(out, turned, workers=2)["digest"] == result["digest"]


def test_each_call_says_which_rows_it_is_about(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(lines[:2]))
    cache(out, metadata)
    assert len(CachedRows(out)) == 1
    metadata.write_text("".join(lines))
    cache(out, metadata, name="all")
    assert (len(CachedRows(out)), len(CachedRows(out, "all"))) == (1, 4)


def test_only_one_component_group_is_in_memory(
    made: tuple[Path, Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[tuple[str, weakref.ref]] = []
    seen = []

    def load(model: Any, name: str, *rest: Any) -> Any:
        seen.append((name, [n for n, ref in alive if ref() is not None]))
        loaded = load_component(model, name, *rest)
        alive.append((name, weakref.ref(loaded)))
        return loaded

    monkeypatch.setattr(stage1, "load_component", load)
    cache(tmp_path / "cache", made[0])
    assert seen == [("text_encoder", []), ("tokenizer", ["text_encoder"]), ("vae", [])]
    assert [n for n, ref in alive if ref() is not None] == []


def test_negative_prompts_only_where_they_are_needed(tmp_path: Path) -> None:
    columns = {"num_inference_steps": [2, 2, 2], "cfg_scale": [1.0, 4.0, 1.0], "negative_prompt": ["x", "a dog", "y"]}
    metadata = tiny.dataset(tmp_path / "data", 3, prompts=["a dog", "a cat", "a cow"], **columns)
    result = cache(tmp_path / "cache", metadata, task="direct_distill")
    assert result["encoded"] == {"encode_image": 3, "encode_prompt": 4}  # a dog, a cat, a cow and ""; x, y are not
    rows = CachedRows(tmp_path / "cache")
    plain, guided = rows.values(0), rows.values(1)
    assert "negative_prompt_embeds" not in plain
    assert torch.equal(guided["negative_prompt_embeds"], plain["prompt_embeds"])
    assert rows.columns(1)["cfg_scale"] == 4.0
    assert rows.columns(1)["num_inference_steps"] == 2
    assert counts(cache(tmp_path / "cache", metadata, task="direct_distill"))["encode_prompt"] == (0, 4)
    assert counts(cache(tmp_path / "cache", metadata, task="sft"))["encode_prompt"] == (0, 4)  # one cache for all tasks


def test_a_trained_text_encoder_crosses_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(stage1, "load_component", lambda m, n, *r: loaded.append(n) or load_component(m, n, *r))
    metadata = tiny.dataset(tmp_path / "data", 1)
    result = cache(tmp_path / "cache", metadata, trainable="transformer,text_encoder")
    assert result["encoded"] == {"encode_image": 1}
    assert loaded == ["vae"]
    assert CachedRows(tmp_path / "cache").columns(0) == {"prompt": "a large red circle number 0"}


def poisoned(folder: Path) -> Path:
    """The tiny model with a NaN in its VAE's encoder."""
    model = tiny.qwen_image(folder)
    path = next((model / "vae").glob("*.safetensors"))
    weights = load_file(path)
    name = next(n for n in weights if n.startswith("encoder.") and n.endswith(".bias"))
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, path)
    return model


def test_nan_is_never_stored_and_costs_nothing_else(tmp_path: Path) -> None:
    metadata = tiny.dataset(tmp_path / "data", 3)
    with pytest.raises(DataError) as error:
        cache(tmp_path / "cache", metadata, poisoned(tmp_path / "model"))
    for line in (2, 3, 4):
        assert f"metadata.csv:{line}: NaN/Inf in latents ('img0{line - 2}.png')" in str(error.value)
    assert "precision of vae (--dtype float32)" in str(error.value)
    assert [p.parent.name for p in shards(tmp_path / "cache")] == ["encode_prompt"]
    with pytest.raises(CacheError, match="cache incomplete: 0 of 3 rows"):
        CachedRows(tmp_path / "cache")
    assert counts(cache(tmp_path / "cache", metadata)) == {"encode_image": (3, 0), "encode_prompt": (0, 4)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_that_breaks_while_decoding_is_reported_with_all_others(
    copy: tuple[Path, Path], tmp_path: Path, workers: int
) -> None:
    metadata, _ = copy
    for n in (1, 3):
        data = bytearray((metadata.parent / f"img0{n}.png").read_bytes())
        middle = data.index(b"IDAT") + 12
        data[middle : middle + 8] = bytes(8)  # its header and its end are as they should be
        (metadata.parent / f"img0{n}.png").write_bytes(data)
    with pytest.raises(DataError, match="2 of 4 rows could not be encoded; the others are in the cache") as error:
        cache(tmp_path / "new", metadata, workers=workers)
    assert [f"metadata.csv:{line}" in str(error.value) for line in (2, 3, 4, 5)] == [False, True, False, True]
    with pytest.raises(CacheError, match="cache incomplete: 2 of 4 rows"):
        CachedRows(tmp_path / "new")
    assert len(CachedRows(tmp_path / "new", skip_bad=True)) == 2
    result = cache(tmp_path / "new", metadata, workers=workers, skip_bad=True)
    assert (result["rows"], result["encoded"]["encode_image"]) == (2, 0)
    assert len(CachedRows(tmp_path / "new")) == 2


def test_a_picture_that_changes_under_the_run_is_not_stored_under_its_old_key(
    copy: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, _ = copy

    def load(*args: Any) -> Any:
        tiny.picture(metadata.parent / "img02.png", (64, 64), seed=5)
        return load_component(*args)

    monkeypatch.setattr(stage1, "load_component", load)
    with pytest.raises(DataError, match=r"metadata\.csv:4: '.*img02\.png' changed while the cache was made"):
        cache(tmp_path / "new", metadata)


def test_damage_is_named_in_training_and_repaired_by_the_next_run(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    digest = cache(out, metadata)["digest"]
    path = next((out / "shards" / "encode_image").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    rows = CachedRows(out)
    found = []
    for i in range(4):
        try:
            rows.values(i)
        except CacheError as error:
            found.append(str(error))
    assert len(found) == 1
    assert f"{path}: the value" in found[0]
    assert "metadata.csv:" in found[0]
    assert "latents" in found[0]
    assert "run `dsplit cache` again" in found[0]
    result = cache(out, metadata)
    assert counts(result) == {"encode_image": (1, 3), "encode_prompt": (0, 3)}
    assert result["digest"] == digest
    assert all(CachedRows(out).values(i) for i in range(4))


def test_a_missing_shard_is_an_incomplete_cache(copy: tuple[Path, Path]) -> None:
    metadata, out = copy
    shutil.rmtree(out / "shards" / "encode_prompt")
    with pytest.raises(
        CacheError, match=r"cache incomplete: 0 of 4 rows in .*cache; run `dsplit cache` again"
    ) as error:
        CachedRows(out)
    assert "metadata.csv:2: prompt_embeds, prompt_mask missing" in str(error.value)
    assert counts(cache(out, metadata)) == {"encode_image": (0, 4), "encode_prompt": (3, 0)}


def test_the_sources_may_be_gone_and_the_cache_may_move(copy: tuple[Path, Path], tmp_path: Path) -> None:
    metadata, out = copy
    shutil.rmtree(metadata.parent)
    out.rename(tmp_path / "elsewhere")
    rows = CachedRows(tmp_path / "elsewhere")
    assert [rows.values(i)["latents"].isfinite().all().item() for i in range(4)] == [True] * 4


def test_no_file_of_a_cache_is_a_pickle(made: tuple[Path, Path, dict[str, Any]]) -> None:
    files = [p for p in made[1].rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {".safetensors", ".jsonl", ".json"}
    for path in (p for p in files if p.suffix == ".safetensors"):
        assert load_file(path)
    source = Path(stage1.__file__).parent
    for module in source.glob("*.py"):
        assert "import pickle" not in module.read_text()
        assert "torch.load" not in module.read_text()


def test_out_that_cannot_be_a_cache_is_refused_before_all_else(tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "metadata.csv"
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match=r"file: is a file, not a folder; give another folder with --out"):
        cache(tmp_path / "file", nowhere)
    with pytest.raises(CacheError, match=r"file/below: cannot write there: Not a directory"):
        cache(tmp_path / "file" / "below", nowhere)
    (tmp_path / "old" / "0").mkdir(parents=True)
    (tmp_path / "old" / "0" / "0.pth").touch()
    with pytest.raises(CacheError, match=r"run `dsplit cache` on the original data set"):
        cache(tmp_path / "old", nowhere)
    with pytest.raises(UsageError, match="--name"):
        cache(tmp_path / "new", nowhere, name="../x")


def twins(folder: Path, pairs: list[tuple[str, Image.Image, Image.Image, dict[str, Any]]]) -> Path:
    lines = ["image,prompt"]
    folder.mkdir()
    for name, picture, plain, options in pairs:
        picture.save(folder / name, **options)
        plain.save(folder / f"plain_{name}.png")
        lines += [f"{name},a thing", f"plain_{name}.png,a thing"]
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder / "metadata.csv"


def test_orientation_and_transparency_reach_the_latents(tmp_path: Path) -> None:
    upright = Image.open(tiny.picture(tmp_path / "p.png", (64, 96)))
    exif = Image.Exif()
    exif[0x0112] = 6
    alpha = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    alpha.paste((0, 0, 255, 255), (0, 0, 32, 64))
    flat = Image.new("RGB", (64, 64), "white")
    flat.paste((0, 0, 255), (0, 0, 32, 64))
    pairs = [
        ("exif6.png", upright.transpose(Image.Transpose.ROTATE_90), upright, {"exif": exif}),
        ("rgba.png", alpha, flat, {}),
    ]
    cache(tmp_path / "cache", twins(tmp_path / "data", pairs))
    rows = CachedRows(tmp_path / "cache")
    assert [rows.group(i) for i in range(4)] == [(64, 96), (64, 96), (64, 64), (64, 64)]
    for i in (0, 2):
        assert torch.equal(rows.values(i)["latents"], rows.values(i + 1)["latents"])


def test_odd_sizes_become_multiples_of_the_family_s_factor(tmp_path: Path) -> None:
    cache(tmp_path / "cache", tiny.dataset(tmp_path / "data", 2, sizes=((65, 127), (17, 33))))
    rows = CachedRows(tmp_path / "cache")
    assert [rows.group(i) for i in range(2)] == [(64, 112), (16, 32)]
    assert [tuple(rows.values(i)["latents"].shape) for i in range(2)] == [(16, 1, 14, 8), (16, 1, 4, 2)]


def test_long_captions_are_warned_of_by_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = tiny.dataset(tmp_path / "data", 2, prompts=["short", "word " * 600])
    cache(tmp_path / "cache", metadata)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "tokens" in line]
    assert len(warnings) == 1
    assert "only the first 512 tokens count" in warnings[0]
    assert "metadata.csv:3" in warnings[0]
    assert "metadata.csv:2" not in warnings[0]


def test_the_plan_is_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = tiny.dataset(tmp_path / "data", 3, sizes=((64, 64), (64, 64), (96, 64)))
    result = cache(tmp_path / "cache", metadata)
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert first == "plan: 3 rows in 2 bucket(s) (64x64: 2, 96x64: 1), on cpu in float32"
    assert second.startswith("to encode: encode_image 3 of 3 distinct, encode_prompt 4 of 4 distinct; about ")
    estimate = float(second.split("about ")[1].split(" MB")[0]) * 1e6
    assert abs(estimate - result["bytes"]) < 0.4 * result["bytes"]  # the tokens of captions are a guess
    assert last.startswith("encode_image: encoded 3, reused 0; encode_prompt: encoded 4, reused 0; 3 rows in ")
