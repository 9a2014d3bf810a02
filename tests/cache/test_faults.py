"""Pictures, weights and shards that are not as they should be: named, never kept, repaired by the next run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from dsplit.cache import stage1
from dsplit.cache.rows import CachedRows
from dsplit.errors import CacheError, DataError
from dsplit.models.load import load_component
from tests import tiny
from tests.cache.runs import cache, counts, shards


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
