"""Stage 1 from CSV, Parquet and tar shards: the same pictures and captions are the same values."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from dsplit.cache import keys
from dsplit.cache.keys import Digests, file_digest, stamp_of
from dsplit.cache.rows import CachedRows
from dsplit.dataset.packed import Packed
from dsplit.errors import DataError
from tests import tiny
from tests.cache.runs import cache, counts
from tests.dataset.packs import parquet, picture, shard

PROMPTS = ("a red circle", "a blue square", "a red circle")
SIZES = ((64, 64), (96, 64))


@pytest.fixture
def forms(tmp_path: Path) -> dict[str, Path]:
    """The same three rows as CSV with files, as Parquet with files and with embedded pictures, and in two shards."""
    table = tiny.dataset(tmp_path / "csv", 3, sizes=SIZES, prompts=PROMPTS)
    names = [row["image"] for row in csv.DictReader(table.open(encoding="utf-8"))]
    data = [(table.parent / name).read_bytes() for name in names]
    images = [{"bytes": b, "path": name} for b, name in zip(data, names, strict=True)]
    embedded = pa.array(images, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    for i, group in enumerate(([0, 1], [2])):
        members = [m for k in group for m in ((f"{k}.png", data[k]), (f"{k}.txt", PROMPTS[k]))]
        shard(tmp_path / f"tar/{i}.tar", members)
    return {
        "csv": table,
        "parquet": parquet(table.parent / "rows.parquet", {"image": names, "prompt": PROMPTS}),
        "embedded": parquet(tmp_path / "hf/rows.parquet", {"image": embedded, "prompt": PROMPTS}, row_group_size=2),
        "tar": tmp_path / "tar",
    }


def stage1(form: Path, out: Path, **options: Any) -> dict[str, Any]:
    return cache(out, form, **options) if form.is_file() else cache(out, None, data=str(form), **options)


def test_equal_rows_in_every_form_have_equal_keys_and_values(forms: dict[str, Path], tmp_path: Path) -> None:
    results, rows = {}, {}
    for form, path in forms.items():
        results[form] = stage1(path, tmp_path / f"cache-{form}")
        rows[form] = CachedRows(tmp_path / f"cache-{form}")
        assert counts(results[form]) == {"encode_image": (3, 0), "encode_prompt": (3, 0)}
    plain = rows.pop("csv")
    for form, found in rows.items():
        assert len(found.ids) == 3
        for i in range(3):
            ours, theirs = found.values(i), plain.values(i)
            assert set(ours) == set(theirs) == {"latents", "prompt_embeds", "prompt_mask"}, form
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), form
    assert results["csv"]["digest"] == results["parquet"]["digest"] == results["embedded"]["digest"]


def test_one_cache_serves_every_form(forms: dict[str, Path], tmp_path: Path) -> None:
    stage1(forms.pop("csv"), tmp_path / "cache")
    for form, path in forms.items():
        result = stage1(path, tmp_path / "cache", name=form)
        assert counts(result) == {"encode_image": (0, 3), "encode_prompt": (0, 3)}


@pytest.mark.parametrize("form", ["parquet", "embedded", "tar"])
def test_a_second_run_encodes_nothing(forms: dict[str, Path], tmp_path: Path, form: str) -> None:
    first = stage1(forms[form], tmp_path / "cache")
    again = stage1(forms[form], tmp_path / "cache")
    assert counts(again) == {"encode_image": (0, 3), "encode_prompt": (0, 3)}
    assert again["digest"] == first["digest"]


def test_a_shard_with_another_picture_encodes_just_that(forms: dict[str, Path], tmp_path: Path) -> None:
    stage1(forms["tar"], tmp_path / "cache")
    data = [(forms["csv"].parent / f"img0{k}.png").read_bytes() for k in range(2)]
    members = [("0.png", data[0]), ("0.txt", PROMPTS[0]), ("1.png", picture(tmp_path, 9)), ("1.txt", PROMPTS[1])]
    shard(forms["tar"] / "0.tar", members)
    result = stage1(forms["tar"], tmp_path / "cache")
    assert counts(result) == {"encode_image": (1, 2), "encode_prompt": (0, 3)}


def test_a_shard_replaced_in_the_meantime_is_a_fault_of_its_rows(
    forms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsplit.cache import ahead

    real = ahead.encode

    def encode(*args: Any) -> Any:
        (forms["tar"] / "1.tar").touch()
        return real(*args)

    monkeypatch.setattr(ahead, "encode", encode)
    with pytest.raises(DataError, match=r"1 of 3 rows could .*(?s:.*)1\.tar/2\.png' changed while the cache was made"):
        stage1(forms["tar"], tmp_path / "cache")


def test_no_bytes_of_a_shard_are_written_anywhere(forms: dict[str, Path], tmp_path: Path) -> None:
    before = {p for p in tmp_path.rglob("*") if tmp_path / "cache" not in p.parents}
    stage1(forms["tar"], tmp_path / "cache")
    assert {p for p in tmp_path.rglob("*") if tmp_path / "cache" not in p.parents} - before == {tmp_path / "cache"}
    pictures = [(forms["csv"].parent / f"img0{k}.png").read_bytes()[20:80] for k in range(3)]
    for path in (tmp_path / "cache").rglob("*"):
        assert not path.is_file() or not any(part in path.read_bytes() for part in pictures), path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has passed since the files of the test were made."""
    now = keys.time.time_ns
    monkeypatch.setattr(keys.time, "time_ns", lambda: now() + 10_000_000_000)


@pytest.mark.usefixtures("settled")
def test_digests_of_packed_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = tmp_path / "a.tar", tmp_path / "plain"
    path.write_bytes(b"onetwothree")
    plain.write_bytes(b"two")
    one, two, three = Packed(path, 0, 3, "1"), Packed(path, 3, 3, "2"), Packed(path, 6, 5, "3")
    digests = Digests(tmp_path)
    first = digests.of([three, one, plain]) | digests.of([two])
    assert first[two] == first[plain] == file_digest(plain)
    assert len({first[one], first[two], first[three]}) == 3
    assert digests.stamps[one] == digests.stamps[three] == stamp_of(path) == stamp_of(one)
    digests.save()

    read: list[Any] = []
    monkeypatch.setattr(keys, "file_digest", lambda source: read.append(source) or "hashed again")
    remembered = Digests(tmp_path)
    assert remembered.of([one, two, three, plain]) == first
    assert remembered.unsaved_bytes == len(read) == 0
    other = Packed(path, 3, 8, "2 and 3")
    assert remembered.of([other, one]) == {other: "hashed again", one: first[one]}
    assert read == [other]

    path.write_bytes(b"onetwoTHREE")
    os.utime(path, ns=(1, 1))
    assert set(Digests(tmp_path).of([three, one, two]).values()) == {"hashed again"}
    assert read[1:] == [one, two, three], "in the order in which they lie in the tar"
