"""Paths in metadata (case D05)."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest

from dsplit.dataset import read_dataset
from dsplit.recipe import DataOptions
from tests.dataset.make import COLUMNS, faults, metadata, pictures, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    pictures(data, "images/a.png", "images/b.png", "images/c.png", "images/d.png")
    pictures(tmp_path, "outside.png")
    return data


def csv(folder: Path, *paths: str) -> Path:
    return metadata(folder, "image,prompt\n" + "".join(f'"{path}",x\n' for path in paths))


def test_accepted_spellings(folder: Path) -> None:
    absolute = str(folder / "images" / "d.png")
    paths = ["images\\a.png", "./images/b.png", "images//c.png", absolute, "../outside.png", "images/../images/a.png"]
    data = read(csv(folder, *paths))
    assert [r.columns["image"] for r in data.rows] == [p.replace("\\", "/") for p in paths]
    names = ["a.png", "b.png", "c.png", "d.png", "outside.png", "a.png"]
    assert [r.files["image"].name for r in data.rows] == names
    assert all(r.files["image"].is_absolute() and r.files["image"].is_file() for r in data.rows)


def test_backslashes_and_slashes_are_one_spelling_to_the_id(folder: Path) -> None:
    ids = [read(csv(folder, path)).rows[0].id for path in ("images\\a.png", "images/a.png", "images/b.png")]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.skipif(os.name == "nt", reason="there a backslash is a separator")
def test_a_file_with_a_backslash_in_its_name_is_found_as_written(folder: Path) -> None:
    (folder / "images" / "b.png").rename(folder / "images\\b.png")
    data = read(csv(folder, "images\\a.png", "images\\b.png"))
    assert [r.files["image"] for r in data.rows] == [folder / "images" / "a.png", folder / "images\\b.png"]
    assert [r.columns["image"] for r in data.rows] == ["images/a.png", "images\\b.png"]
    (folder / "metadata.csv").unlink()
    (folder / "images\\b.txt").write_text("a caption")
    (plain,) = read_dataset(DataOptions(data=str(folder), skip_bad=True), COLUMNS, 16).rows
    assert (plain.files["image"], plain.columns["prompt"]) == (folder / "images\\b.png", "a caption")


def test_all_missing_files_are_named_at_once(folder: Path) -> None:
    assert faults(csv(folder, "images/b.png", "images/missing1.png", "images/missing2.png", "nowhere/a.png")) == [
        f"{line}: image '{path}' not found under '{folder}'; fix the path or drop the row"
        for line, path in ((3, "images/missing1.png"), (4, "images/missing2.png"), (5, "nowhere/a.png"))
    ]


def test_wrong_case_is_told_apart(folder: Path) -> None:
    absolute = str(folder / "images" / "A.png")
    assert faults(csv(folder, "IMAGES/A.PNG", "images/B.png", absolute, "../OUTSIDE.png", "Images/missing.png")) == [
        "2: image 'IMAGES/A.PNG' not found: it differs only in case from images/a.png; write images/a.png",
        "3: image 'images/B.png' not found: it differs only in case from images/b.png; write images/b.png",
        f"4: image '{absolute}' not found: it differs only in case from {folder}/images/a.png; "
        f"write {folder}/images/a.png",
        "5: image '../OUTSIDE.png' not found: it differs only in case from ../outside.png; write ../outside.png",
        f"6: image 'Images/missing.png' not found under '{folder}'; fix the path or drop the row",
    ]


def test_another_unicode_form_is_told_apart(folder: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "café.png") for form in ("NFC", "NFD"))
    pictures(folder, composed)
    (fault,) = faults(csv(folder, decomposed))
    assert f"it differs only in its Unicode form (composed or decomposed accents) from {composed}" in fault


def test_what_is_no_readable_file(folder: Path) -> None:
    (folder / "empty.png").touch()
    os.mkfifo(folder / "pipe.png")
    found = faults(csv(folder, "images", "empty.png", "pipe.png", "x" * 300, "images/a.png/b.png", "", "  "))
    assert found == [
        "2: image 'images' is a folder; fix the path or drop the row",
        "3: image 'empty.png' is an empty file (0 bytes); copy it again or drop the row",
        "4: image 'pipe.png' is no regular file; fix the path or drop the row",
        f"5: image '{'x' * 300}' cannot be read: File name too long; fix the path",
        f"6: image 'images/a.png/b.png' not found under '{folder}'; fix the path or drop the row",
        "7: image is absent; every row needs one",
        "8: image is absent; every row needs one",
    ]


def test_a_path_with_a_nul_character(folder: Path) -> None:
    path = metadata(folder, '{"image":"a\\u0000b.png","prompt":"x"}\n', "m.jsonl")
    assert faults(path) == ["1: image 'a\0b.png' cannot be read: embedded null byte; fix the path"]


def test_paths_of_other_places(folder: Path) -> None:
    assert faults(csv(folder, "https://host/a.png", "C:\\set\\a.png")) == [
        "2: image 'https://host/a.png' is a web address, not a file; download it first",
        "3: image 'C:/set/a.png' is a path of a Windows machine; make it relative to --data",
    ]


def test_paths_start_at_data_or_else_beside_the_metadata(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    elsewhere = csv(folder.parent, "images/a.png")
    assert read(elsewhere, data="data").rows[0].files["image"] == folder / "images/a.png"
    assert "not found under" in faults(elsewhere)[0]
    (row,) = read(Path("data") / csv(folder, "images/a.png").name).rows
    assert (row.place, row.files["image"]) == ("data/metadata.csv:2", folder / "images/a.png")


def test_several_file_columns(folder: Path) -> None:
    from dsplit.models.family import Column

    columns = (*COLUMNS, Column("edit_image", "file"), Column("mask", "file", required=False))
    pictures(folder, "small.png", size=(32, 32))
    path = metadata(folder, "edit_image,image,prompt,mask\nsmall.png,images/a.png,x,\nno.png,no.png,x,no2.png\n")
    (row,) = read(path, columns, skip_bad=True).rows
    assert row.files == {"image": folder / "images/a.png", "edit_image": folder / "small.png"}
    assert (row.image_size, row.columns["mask"]) == ((64, 64), None)
    assert [f.split(" not")[0] for f in faults(path, columns)] == [
        "3: image 'no.png'", "3: edit_image 'no.png'", "3: mask 'no2.png'",
    ]  # fmt: skip
