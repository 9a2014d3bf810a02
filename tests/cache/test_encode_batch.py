"""`--encode-batch N`: equal shapes share a forward pass of the real tiny models, and cost nothing but the last bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplit.cache import stage1, together
from dsplit.cache.manifest import manifest_path, read_manifest
from dsplit.cache.rows import CachedRows
from dsplit.cache.together import batches, rows_of
from dsplit.errors import CacheError, DataError
from dsplit.models.load import load_component
from dsplit.models.registry import registry
from dsplit.units import unit
from tests import tiny
from tests.cache.runs import cache, counts

ROWS = 8
SIZES = ((64, 64), (64, 64), (96, 64), (64, 64))
PROMPTS = ("a red circle", "a blue circle", "two blue squares on a plain white ground", "a red circle")

Hook = Callable[[torch.Tensor], None]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.dataset(tmp_path_factory.mktemp("data") / "data", ROWS, sizes=SIZES, prompts=PROMPTS)


@pytest.fixture(scope="module")
def single(metadata: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The cache that one row per pass makes, and what the run said."""
    out = tmp_path_factory.mktemp("single") / "cache"
    return out, cache(out, metadata)


def hooked(monkeypatch: pytest.MonkeyPatch, name: str, hook: Hook) -> None:
    """From now on `hook` is called with what the encoder `name` is given (pixels, token numbers), batch axis first."""

    def load(model: Any, component: str, *args: Any) -> Any:
        loaded = load_component(model, component, *args)
        if component == name:
            inner = loaded.encoder if name == "vae" else loaded

            def before(_: Any, args: tuple, kwargs: dict) -> None:
                hook(args[0] if args else kwargs["input_ids"])

            inner.register_forward_pre_hook(before, with_kwargs=True)
        return loaded

    monkeypatch.setattr(stage1, "load_component", load)


@pytest.mark.parametrize("workers", [0, 2])
def test_values_are_those_of_single_rows(
    metadata: Path, single: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    shapes: list[tuple[int, ...]] = []
    hooked(monkeypatch, "vae", lambda clip: shapes.append((len(clip), *clip.shape[3:])))
    result = cache(tmp_path / "cache", metadata, encode_batch=4, workers=workers)
    assert result["encoded"] == {"encode_image": ROWS, "encode_prompt": 4}
    assert sorted(shapes) == [(2, 64, 64), (2, 64, 96), (4, 64, 64)]
    alone, together = CachedRows(single[0]), CachedRows(tmp_path / "cache")
    assert list(alone.ids) == list(together.ids)
    for i in range(ROWS):
        one, other = alone.values(i), together.values(i)
        assert set(one) == set(other)
        for name in one:
            assert one[name].shape == other[name].shape  # no padding
            torch.testing.assert_close(other[name], one[name], atol=1e-5, rtol=0)


def test_captions_of_equal_length_go_together(metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, ...]] = []
    hooked(monkeypatch, "text_encoder", lambda tokens: passes.append(tuple(tokens.shape)))
    cache(tmp_path / "cache", metadata, encode_batch=4)
    assert sorted(rows for rows, _ in passes) == [1, 1, 2]  # "a red circle" and "a blue circle"; the long one; ""
    assert len({length for _, length in passes}) == 3


def test_keys_and_reasons_name_the_batch(metadata: Path, single: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "cache"
    assert counts(cache(out, metadata, encode_batch=1)) == {"encode_image": (ROWS, 0), "encode_prompt": (4, 0)}
    assert cache(out, metadata)["digest"] == single[1]["digest"]
    why = cache(out, metadata, encode_batch=2, why=True)["why"]
    assert [(r["unit"], r["changed"], r["values"]) for r in why] == [
        ("encode_image", ("encode_batch: 1 -> 2",), ROWS),
        ("encode_prompt", ("encode_batch: 1 -> 2",), 4),
    ]
    keys = {key for row in read_manifest(manifest_path(out, "default")).rows for key in row.all_keys}
    assert counts(cache(out, metadata, encode_batch=2)) == {"encode_image": (ROWS, 0), "encode_prompt": (4, 0)}
    manifest = read_manifest(manifest_path(out, "default"))
    assert manifest.header["encode_batch"] == 2
    assert not keys & {key for row in manifest.rows for key in row.all_keys}
    assert counts(cache(out, metadata, encode_batch=2)) == {"encode_image": (0, ROWS), "encode_prompt": (0, 4)}
    assert counts(cache(out, metadata)) == {"encode_image": (0, ROWS), "encode_prompt": (0, 4)}


def cuda_memory(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def host_memory(_: torch.Tensor) -> None:
    torch.empty(1 << 56, dtype=torch.uint8)  # the allocator's own error


@pytest.mark.parametrize("exhausted", [cuda_memory, host_memory])
def test_out_of_memory_halves_the_batch_for_good(
    metadata: Path,
    single: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exhausted: Hook,
) -> None:
    passes: list[int] = []

    def limited(clip: torch.Tensor) -> None:
        passes.append(len(clip))
        if len(clip) > 1:
            exhausted(clip)

    hooked(monkeypatch, "vae", limited)
    result = cache(tmp_path / "cache", metadata, encode_batch=4)
    assert result["encoded"] == {"encode_image": ROWS, "encode_prompt": 4}
    assert passes == [4, 2] + [1] * ROWS
    said = [line for line in capsys.readouterr().err.splitlines() if "out of memory" in line]
    assert said == [
        f"warning: encode_image: out of memory; from here on {rows} per forward pass" for rows in ("2 rows", "1 row")
    ]
    alone, small = CachedRows(single[0]), CachedRows(tmp_path / "cache")
    assert all(torch.equal(alone.values(i)["latents"], small.values(i)["latents"]) for i in range(ROWS))


def test_parts_of_a_batch_are_fixed(metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    def limited(clip: torch.Tensor) -> None:
        passes.append(len(clip))
        if len(clip) > 2:
            cuda_memory(clip)

    hooked(monkeypatch, "vae", limited)
    cache(tmp_path / "cache", metadata, encode_batch=16)  # six of one size, two of another
    assert passes == [6, 4, 2, 2, 2, 2]


@pytest.mark.parametrize("encode_batch", [1, 2])
def test_no_memory_for_a_single_row_is_an_error_that_keeps_the_rest(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encode_batch: int
) -> None:
    with monkeypatch.context() as context:
        hooked(context, "vae", cuda_memory)
        with pytest.raises(CacheError, match=r"metadata\.csv:2 \(64x64\): memory does not suffice") as error:
            cache(tmp_path / "cache", metadata, encode_batch=encode_batch)
    assert "for encode_image, even for this row alone; make the pictures smaller (--max-pixels)" in str(error.value)
    again = cache(tmp_path / "cache", metadata, encode_batch=encode_batch)
    assert counts(again) == {"encode_image": (ROWS, 0), "encode_prompt": (0, 4)}


def test_another_error_of_an_encoder_is_not_taken_for_it(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(clip: torch.Tensor) -> None:
        clip.view(-1, 7, 11, 13)  # shapes that do not fit

    hooked(monkeypatch, "vae", broken)
    with pytest.raises(RuntimeError, match="shape"):
        cache(tmp_path / "cache", metadata, encode_batch=4)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    metadata = tiny.dataset(tmp_path / "data", 6, prompts=["one"])
    data = bytearray((metadata.parent / "img01.png").read_bytes())
    middle = data.index(b"IDAT") + 12
    data[middle : middle + 8] = bytes(8)  # breaks while it is decoded
    (metadata.parent / "img01.png").write_bytes(data)

    def poison(clip: torch.Tensor) -> None:
        assert len(clip) == 5
        clip[2] = float("nan")  # that of img03.png, since img01.png is not there

    with monkeypatch.context() as context:
        hooked(context, "vae", poison)
        with pytest.raises(DataError, match="2 of 6 rows could not be encoded; the others are in the cache") as error:
            cache(tmp_path / "cache", metadata, encode_batch=6, workers=workers)
    assert "metadata.csv:3: " in str(error.value)
    assert "metadata.csv:5: NaN/Inf in latents ('img03.png')" in str(error.value)
    assert len(CachedRows(tmp_path / "cache", skip_bad=True)) == 4
    tiny.picture(metadata.parent / "img01.png", seed=1)
    assert cache(tmp_path / "cache", metadata, encode_batch=6)["encoded"] == {"encode_image": 2, "encode_prompt": 0}


def test_without_a_count_of_tokens_captions_run_alone_under_their_usual_keys(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    families = registry().families
    monkeypatch.setitem(families, "qwen-image", replace(families["qwen-image"], token_count=None))
    cache(tmp_path / "cache", metadata)
    passes: list[int] = []
    hooked(monkeypatch, "text_encoder", lambda tokens: passes.append(len(tokens)))
    capsys.readouterr()
    result = cache(tmp_path / "cache", metadata, encode_batch=4)
    assert counts(result) == {"encode_image": (ROWS, 0), "encode_prompt": (0, 4)}
    result = cache(tmp_path / "new", metadata, encode_batch=4)
    assert passes == [1] * 4
    said = capsys.readouterr().err
    assert said.count("encode_prompt: one row per forward pass, since qwen-image counts no tokens beforehand") == 1


@unit(outputs="pixels", shapes={"pixels": "3, H, W"})
def decode(image: list[Path]) -> torch.Tensor:
    raise NotImplementedError


@unit(outputs="look", components="vae", shapes={"look": "4"})
def look(image: list[Path], vae: Any) -> torch.Tensor:
    raise NotImplementedError


@unit(outputs="who", components="vae")
def unsaid(latents: torch.Tensor, vae: Any) -> torch.Tensor:
    raise NotImplementedError


def test_which_units_run_several_rows() -> None:
    family = registry().families["qwen-image"]
    encode_image, encode_prompt = family.units[1:]
    assert [rows_of(u, family, 8) for u in (encode_image, encode_prompt, decode, look, unsaid)] == [8, 8, 1, 1, 8]
    silent = replace(family, token_count=None)
    assert [rows_of(u, silent, 8) for u in (encode_image, encode_prompt, unsaid)] == [8, 1, 1]


def test_calls_are_taken_once_in_order_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "HELD", 5)
    taken: list[int] = []
    calls: Any = (taken.append(n) or n for n in range(20))
    coming = batches(calls, lambda call: call % 3, 4)  # type: ignore[operator]
    assert next(coming) == [0, 3]  # the sixth that waits
    assert taken == [0, 1, 2, 3, 4, 5]
    rest = list(coming)
    assert sorted(n for batch in ([0, 3], *rest) for n in batch) == list(range(20))
    assert all(len({n % 3 for n in batch}) == 1 and len(batch) <= 4 for batch in rest)
    assert list(batches(iter([7, 8]), lambda call: 1 / 0, 1)) == [[7], [8]]  # type: ignore[list-item]
