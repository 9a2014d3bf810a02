"""A plain folder: pictures with captions beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsplit.dataset import read_dataset
from dsplit.errors import DataError, UsageError
from dsplit.recipe import DataOptions
from tests.dataset.make import COLUMNS, DISTILL, metadata, pictures


def read(folder: Path, **options: object):
    return read_dataset(DataOptions(data=str(folder), **options), COLUMNS, 16)


def test_pictures_and_captions_in_order(tmp_path: Path) -> None:
    pictures(tmp_path, "b.png", "a.PNG", "sub/c.v2.jpg", ".hidden/d.png", "e.jpeg")
    for name, text in {"b": "a dog\r\n", "a": "two\nlines\n\n", "sub/c.v2": "\ufeff NA ", "e": ""}.items():
        metadata(tmp_path, text, f"{name}.txt")
    data = read(tmp_path)
    assert [(r.columns["image"], r.columns["prompt"], r.line) for r in data.rows] == [
        ("a.PNG", "two\nlines\n", 0),
        ("b.png", "a dog", 0),
        ("e.jpeg", "", 0),
        ("sub/c.v2.jpg", " NA ", 0),
    ]
    assert [r.place for r in data.rows[::3]] == [str(tmp_path / "a.PNG"), str(tmp_path / "sub/c.v2.jpg")]
    assert data.rows[3].files == {"image": tmp_path / "sub/c.v2.jpg"}
    assert [str(w) for w in data.warnings] == [
        f"{tmp_path}/e.jpeg: empty prompt, used as an empty text: {tmp_path}/e.jpeg"
    ]


def test_every_fault_is_named_with_its_file(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png", "sub/c.png", "d.png")
    metadata(tmp_path, "fine", "a.txt")
    metadata(tmp_path, b"one\ntw\xf6", "b.txt")
    metadata(tmp_path, "x", "d.txt")
    metadata(tmp_path, b"not a picture", "d.png")
    metadata(tmp_path, b"ftypheic", "phone.HEIC")
    metadata(tmp_path, "x", "phone.txt")
    with pytest.raises(DataError) as raised:
        read(tmp_path)
    problems = raised.value.problems
    assert [(p.where, p.what) for p in problems[:2]] == [
        (f"{tmp_path}/b.txt:2", "byte 0xf6 is not UTF-8"),
        (f"{tmp_path}/d.png", problems[1].what),
    ]
    assert problems[1].what.startswith("image 'd.png': not a picture")
    assert problems[2].where == f"{tmp_path}/phone.HEIC"
    assert (problems[3].where, problems[3].what) == (f"{tmp_path}/sub/c.png", "no caption c.txt")
    assert len(problems) == 4
    data = read(tmp_path, skip_bad=True)
    assert [r.columns["image"] for r in data.rows] == ["a.png"]
    assert data.skipped == problems


def test_captions_without_a_picture_and_linked_folders_are_mentioned(tmp_path: Path) -> None:
    pictures(tmp_path / "set", "a.png")
    pictures(tmp_path / "other", "b.png")
    for name in ("a", "z", "notes"):
        metadata(tmp_path / "set", "x", f"{name}.txt")
    (tmp_path / "set" / "link").symlink_to(tmp_path / "other")
    assert [w.what for w in read(tmp_path / "set").warnings] == [
        "captions without a picture: notes.txt, z.txt",
        "linked folders, which are not followed: link",
    ]


def test_a_folder_without_pictures(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"0 usable rows in .* \(no metadata file and no picture in it\)"):
        read(tmp_path)


def test_a_task_with_more_columns_needs_metadata(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    metadata(tmp_path, "x", "a.txt")
    with pytest.raises(DataError, match="no column 'num_inference_steps'; columns found: image, prompt"):
        read_dataset(DataOptions(data=str(tmp_path)), DISTILL, 16)


def test_a_metadata_file_in_the_folder_is_found(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png")
    metadata(tmp_path, '{"image":"a.png","prompt":"from jsonl"}\n', "metadata.jsonl")
    (row,) = read(tmp_path).rows
    assert (row.columns["prompt"], row.source, row.place) == (
        "from jsonl",
        str(tmp_path / "metadata.jsonl"),
        f"{tmp_path}/metadata.jsonl:1",
    )
    metadata(tmp_path, "image,prompt\na.png,x\n")
    with pytest.raises(UsageError, match=r"holds metadata\.csv, metadata\.jsonl: choose one with --metadata"):
        read(tmp_path)


def test_a_metadata_file_of_another_type_is_not_passed_over(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    metadata(tmp_path, "x", "metadata.xlsx")
    with pytest.raises(DataError, match=r"unknown metadata type \.xlsx \(csv, json, jsonl, parquet, tar\)"):
        read(tmp_path)


def test_what_cannot_be_read_at_all(tmp_path: Path) -> None:
    path = metadata(tmp_path, "image,prompt\n", "rows.csv")
    other = metadata(tmp_path, "{}", "metadata.json1")
    for options, error, words in (
        (DataOptions(), UsageError, "give --data FOLDER or --metadata FILE"),
        (DataOptions(data=str(path)), UsageError, "is a file; give it as --metadata"),
        (DataOptions(metadata=str(tmp_path)), UsageError, "is a folder; give it as --data"),
        (DataOptions(data=f"{tmp_path}/no"), DataError, "does not exist"),
        (DataOptions(data=str(tmp_path), metadata="rows.csv"), DataError, f"did you mean {path}"),
        (
            DataOptions(metadata=str(other)),
            DataError,
            r"unknown metadata type \.json1 \(csv, json, jsonl",
        ),
    ):
        with pytest.raises(error, match=words):
            read_dataset(options, COLUMNS, 16)
