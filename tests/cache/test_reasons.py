"""`--why`: each part of a key that can change is named, with counts and rows."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsplit.cache.draft import Draft, write_manifest
from dsplit.cache.earlier import Earlier, Match
from dsplit.cache.manifest import Entry, Manifest, manifest_path
from dsplit.cache.reasons import LOST, NEW_ROW, NEW_VALUE
from dsplit.models import load_image
from tests import tiny
from tests.cache.runs import cache, shards
from tests.cache.test_verify import HEADER


def why(out: Path, metadata: Path, model: Path = tiny.QWEN_IMAGE, **options: Any) -> dict[tuple, tuple]:
    """(unit, changed ...) -> (values, lines of the example rows); the run after it encodes just these."""
    found = cache(out, metadata, model, why=True, **options)["why"]
    encoded = cache(out, metadata, model, **options)["encoded"]
    for unit, count in encoded.items():
        assert sum(reason["values"] for reason in found if reason["unit"] == unit) == count
    return {(r["unit"], *r["changed"]): (r["values"], [place.rpartition(":")[2] for place in r["rows"]]) for r in found}


def test_nothing_changed(copy: tuple[Path, Path]) -> None:
    assert why(copy[1], copy[0]) == {}


def test_a_first_run(made: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    assert why(tmp_path / "cache", made[0]) == {
        ("encode_image", "first run under this name"): (4, ["2", "3", "4"]),
        ("encode_prompt", "first run under this name"): (3, ["2", "3", "5"]),
    }


def test_an_edited_caption(copy: tuple[Path, Path]) -> None:
    copy[0].write_text(copy[0].read_text().replace("a blue square", "a green square"))
    assert why(copy[1], copy[0]) == {("encode_prompt", "prompt"): (1, ["3"])}


def test_a_repainted_picture_with_its_mtime_set_back(copy: tuple[Path, Path]) -> None:
    picture = copy[0].parent / "img00.png"
    times = picture.stat()
    tiny.picture(picture, (64, 64), seed=99)
    os.utime(picture, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert why(copy[1], copy[0]) == {("encode_image", "image (source bytes)"): (1, ["2"])}


def test_another_file_in_its_place(copy: tuple[Path, Path]) -> None:
    tiny.picture(copy[0].parent / "other.png", (96, 64), seed=99)
    copy[0].write_text(copy[0].read_text().replace("img01.png", "other.png"))
    assert why(copy[1], copy[0]) == {("encode_image", "image (source bytes)"): (1, ["3"])}


def test_a_new_row_at_the_top_is_new_and_the_others_are_not(copy: tuple[Path, Path]) -> None:
    tiny.picture(copy[0].parent / "new.png", (64, 64), seed=50)
    head, rest = copy[0].read_text().split("\n", 1)
    copy[0].write_text(f"{head}\nnew.png,a yellow star\n{rest}")
    assert why(copy[1], copy[0]) == {
        ("encode_image", NEW_ROW): (1, ["2"]),
        ("encode_prompt", NEW_ROW): (1, ["2"]),
    }


def test_an_edited_caption_that_a_new_row_has_too(copy: tuple[Path, Path]) -> None:
    tiny.picture(copy[0].parent / "new.png", (64, 64), seed=50)
    head, rest = copy[0].read_text().split("\n", 1)
    copy[0].write_text(f"{head}\nnew.png,a green square\n{rest.replace('a blue square', 'a green square')}")
    assert why(copy[1], copy[0]) == {("encode_image", NEW_ROW): (1, ["2"]), ("encode_prompt", "prompt"): (1, ["2"])}


def test_another_size_and_another_dtype(copy: tuple[Path, Path]) -> None:
    assert why(copy[1], copy[0], resolution="32x32") == {("encode_image", "size"): (4, ["2", "3", "4"])}
    changed = "dtype: float32 -> bfloat16"
    assert why(copy[1], copy[0], resolution="32x32", dtype="bfloat16") == {
        ("encode_image", changed): (4, ["2", "3", "4"]),
        ("encode_prompt", changed): (3, ["2", "3", "5"]),
    }


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("vae/config.json", ("encode_image", 4)),
        ("text_encoder/config.json", ("encode_prompt", 3)),
        ("tokenizer/tokenizer_config.json", ("encode_prompt", 3)),
    ],
)
def test_the_file_of_a_component(copy: tuple[Path, Path], tmp_path: Path, file: str, expected: tuple) -> None:
    model = tiny.qwen_image(tmp_path / "model")
    (model / file).write_text(json.dumps({**json.loads((model / file).read_text()), "dsplit_test": 1}))
    found = why(copy[1], copy[0], model)
    assert {(unit, changed): n for (unit, changed), (n, _) in found.items()} == {(expected[0], file): expected[1]}


def test_a_new_file_and_one_that_is_gone(copy: tuple[Path, Path], tmp_path: Path) -> None:
    model = tiny.qwen_image(tmp_path / "model")
    (model / "tokenizer" / "extra.txt").write_text("x")
    assert ("encode_prompt", "tokenizer/extra.txt (new)") in why(copy[1], copy[0], model)
    (model / "tokenizer" / "extra.txt").unlink()
    cache(copy[1], copy[0], model)  # all values are still there
    (model / "tokenizer" / "extra.txt").write_text("y")
    cache(copy[1], copy[0], model)
    (model / "tokenizer" / "extra.txt").rename(model / "tokenizer" / "more.txt")
    assert list(why(copy[1], copy[0], model)) == [
        ("encode_prompt", "tokenizer/extra.txt (gone)", "tokenizer/more.txt (new)")
    ]


def test_the_version_of_any_unit_on_the_way(copy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsplit.models.registry import registry

    family = registry().family("qwen-image")
    units = tuple(replace(u, version=7) if u.name == load_image.name else u for u in family.units)
    monkeypatch.setitem(registry().families, "qwen-image", replace(family, units=units))  # type: ignore[arg-type]
    changed = ("encode_image", "version of load_image: 2 -> 7")
    assert why(copy[1], copy[0]) == {changed: (4, ["2", "3", "4"])}


def test_a_library_file_that_a_unit_names(copy: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsplit.cache.keys._source_digest", lambda source: f"another-{source[:4]}")
    changed = ("encode_prompt", "diffusers/pipelines/qwenimage/pipeline_qwenimage.py")
    assert why(copy[1], copy[0]) == {changed: (3, ["2", "3", "5"])}


def test_a_value_that_went_away_or_was_never_made(copy: tuple[Path, Path]) -> None:
    next(p for p in shards(copy[1]) if p.parent.name == "encode_prompt").unlink()
    assert why(copy[1], copy[0]) == {("encode_prompt", LOST): (3, ["2", "3", "5"])}


def test_a_value_that_the_earlier_run_did_not_want(tmp_path: Path) -> None:
    columns = {"num_inference_steps": [2, 2], "cfg_scale": [1.0, 4.0], "negative_prompt": ["", "a dog"]}
    metadata = tiny.dataset(tmp_path / "data", 2, prompts=["a cow", "a cat"], **columns)
    cache(tmp_path / "cache", metadata, task="sft")
    assert why(tmp_path / "cache", metadata, task="direct_distill") == {
        ("encode_prompt", "negative_prompt"): (1, ["3"])
    }


def test_a_damaged_manifest_is_no_obstacle(copy: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    manifest_path(copy[1], "default").write_text("{}")
    copy[0].write_text(copy[0].read_text().replace("a blue square", "a green square"))
    assert why(copy[1], copy[0]) == {("encode_prompt", "first run under this name"): (1, ["3"])}
    assert "--why has nothing to compare with" in capsys.readouterr().err


def entry(name: str, place: str, image: str, prompt: str) -> Entry:
    return Entry(name.encode().hex().ljust(32, "0"), place, (64, 64), {}, {}, {"image": image, "prompt": prompt})


def test_rows_are_matched_by_id_then_source_then_place(tmp_path: Path) -> None:
    old = [entry("a", "1", "A", "x"), entry("b", "2", "B", "y"), entry("c", "3", "B", "z"), entry("d", "4", "D", "w")]
    now = [
        entry("new", "1", "N", "n"),  # at a's old place, but a is still there
        entry("a", "2", "A", "x"),
        entry("b2", "3", "B", "y2"),  # one of the two rows with this picture: the first
        entry("d2", "4", "D2", "w"),  # at the same place, same caption
        entry("odd", "9", "O", "w"),
    ]
    write_manifest(tmp_path / "old.jsonl", Manifest(HEADER, old))
    match = Match(Draft(now), Earlier(tmp_path / "old.jsonl"), {"image"})
    assert [match[i] for i in range(5)] == [None, 0, 1, 3, None]


def test_all_reasons_are_words_that_differ() -> None:
    assert len({LOST, NEW_ROW, NEW_VALUE}) == 3
