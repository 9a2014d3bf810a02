"""Parquet metadata: cells as a CSV file would give them, pictures beside the file or within it."""

from __future__ import annotations

import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dsplit.dataset import Dataset, parquet_file, read_dataset
from dsplit.dataset.parquet_cell import ParquetCell
from dsplit.dataset.parquet_file import read_parquet
from dsplit.errors import DataError, UsageError
from dsplit.models.family import Column
from dsplit.recipe import DataOptions
from tests.dataset.make import COLUMNS, DISTILL, faults, pictures, read
from tests.dataset.make import metadata as written
from tests.dataset.packs import parquet, picture

HF_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def read_folder(folder: Path, kinds: tuple[Column, ...] = COLUMNS, **options: Any) -> Dataset:
    return read_dataset(DataOptions(data=str(folder), **options), kinds, 16)


def cells(path: Path) -> list[dict[str, Any]]:
    return [dict(record.cells) for record in read_parquet(path, "a.parquet").records]


def test_the_rows_are_those_of_a_csv_file(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png")
    csv = written(
        tmp_path,
        'image,prompt,seed,rand_device,num_inference_steps,cfg_scale\na.png,"x, ""y""",7,cpu,4,1.5\nb.png,007,,,2,\n',
    )
    path = parquet(
        tmp_path / "rows.parquet",
        {
            "image": ["a.png", "b.png"],
            "prompt": ['x, "y"', "007"],
            "seed": [7, None],
            "rand_device": pa.array(["cpu", None]).dictionary_encode(),
            "num_inference_steps": pa.array([4, 2], pa.uint8()),
            "cfg_scale": [1.5, None],
        },
    )
    ours, theirs = read(path, DISTILL).rows, read(csv, DISTILL).rows
    assert [row.columns for row in ours] == [row.columns for row in theirs]
    assert [row.files for row in ours] == [row.files for row in theirs]
    assert [row.id for row in ours] == [row.id for row in theirs]
    assert [row.place for row in ours] == [f"{path}:1", f"{path}:2"]


def test_cells_of_every_type(tmp_path: Path) -> None:
    nan = float("nan")
    columns = {
        "text": pa.array(["a", None, "", "ü"], pa.large_string()),
        "category": pa.array(["x", "y", None, "x"]).dictionary_encode(),
        "texts": pa.array([["a", "b"], None, [], ["c"]]),
        "whole": pa.array([1, None, -3, 2**40], pa.int64()),
        "single": pa.array([0.5, nan, None, 1e20], pa.float32()),
        "decimal": pa.array([Decimal("4.0"), None, Decimal("1.5"), Decimal("7.0")]),
        "truth": [True, None, False, True],
        "nothing": pa.nulls(4),
    }
    path = parquet(tmp_path / "a.parquet", columns, row_group_size=3)
    found = cells(path)
    assert {name: [row[name] for row in found] for name in columns} == {
        "text": ["a", None, "", "ü"],
        "category": ["x", "y", None, "x"],
        "texts": [["a", "b"], None, [], ["c"]],
        "whole": [1, None, -3, 2**40],
        "single": [0.5, None, None, 100000002004087734272.0],
        "decimal": [4.0, None, 1.5, 7.0],
        "truth": [True, None, False, True],
        "nothing": [None] * 4,
    }
    assert read_parquet(path, "a.parquet").columns == tuple(columns)


def test_lines_run_through_row_groups_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "BATCH", 3)
    path = parquet(tmp_path / "a.parquet", {"prompt": [f"p{i}" for i in range(1, 12)]}, row_group_size=5)
    table = read_parquet(path, "a.parquet")
    assert [(r.line, r.cells["prompt"]) for r in table.records] == [(i, f"p{i}") for i in range(1, 12)]


def test_faults_name_the_row(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    columns = {
        "image": ["a.png", "no.png", "a.png", None, "a.png"],
        "prompt": ["x", "x", "x", "x", "x"],
        "num_inference_steps": [4.0, 4.0, 4.5, 4.0, float("nan")],
    }
    path = parquet(tmp_path / "a.parquet", columns)
    assert faults(path, DISTILL) == [
        f"2: image 'no.png' not found under '{tmp_path}'; fix the path or drop the row",
        "3: num_inference_steps '4.5' is no whole number of 64 bits",
        "4: image is absent; every row needs one",
        "5: num_inference_steps is absent; every row needs one",
    ]


def test_a_column_of_another_type_matters_only_where_it_is_needed(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    odd = pa.array([[0.25, 0.5]], pa.list_(pa.float32()))
    path = parquet(tmp_path / "a.parquet", {"image": ["a.png"], "prompt": ["x"], "embedding": odd, "raw": [b"\xff"]})
    assert read(path).rows[0].columns == {"image": "a.png", "prompt": "x"}
    for name, words in (("embedding", "is an object (Parquet's list<element: float>)"), ("raw", "is a picture")):
        (found,) = faults(path, columns=f"prompt={name}")
        assert found.startswith(f"1: prompt {words}")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    bad = pa.array([b"good", b"b\x92d"]).view(pa.string())
    path = parquet(tmp_path / "a.parquet", {"image": ["a.png", "a.png"], "prompt": bad})
    (found,) = faults(path)
    assert found.startswith(r"2: prompt 'b\udc92d' is not UTF-8 text")


@pytest.mark.parametrize("kind", ["struct", "binary"])
def test_pictures_within_the_file(tmp_path: Path, kind: str) -> None:
    data = [picture(tmp_path, seed, (64, 16 * (seed + 1))) for seed in range(3)]
    images: Any = pa.array([*data, None])
    if kind == "struct":
        paths = ["one.png", None, "three.png"]
        cells = [{"bytes": b, "path": p} for b, p in zip(data, paths, strict=True)]
        images = pa.array([*cells, None], HF_IMAGE)
    path = parquet(tmp_path / "a.parquet", {"image": images, "prompt": list("abcd")}, row_group_size=2)
    found = read(path, skip_bad=True)
    names = ["one.png", "image#2", "three.png"] if kind == "struct" else ["image#1", "image#2", "image#3"]
    assert [row.columns["image"] for row in found.rows] == names
    assert [row.size for row in found.rows] == [(64, 16), (64, 32), (64, 48)]
    assert [row.place for row in found.rows] == [f"{path}:{n}" for n in (1, 2, 3)]
    for row, image in zip(found.rows, data, strict=True):
        with row.files["image"].open("rb") as file:
            assert file.read() == image
    (skipped,) = found.skipped
    assert skipped.where == f"{path}:4"
    assert ("image is absent" in skipped.what) if kind == "struct" else ("the cell holds no bytes" in skipped.what)


def test_a_struct_without_bytes_names_pictures_beside_the_file(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    images = pa.array([{"bytes": None, "path": "a.png"}], HF_IMAGE)
    (row,) = read(parquet(tmp_path / "a.parquet", {"image": images, "prompt": ["x"]})).rows
    assert (row.columns["image"], row.files["image"]) == ("a.png", tmp_path / "a.png")


def test_a_damaged_picture_within_the_file(tmp_path: Path) -> None:
    data = picture(tmp_path)
    path = parquet(tmp_path / "a.parquet", {"image": [data, data[:100]], "prompt": ["x", "y"]})
    (found,) = faults(path)
    assert found.startswith("2: image 'image#2': ")


def test_row_groups_of_pictures_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "LARGEST_GROUP", 100)
    path = parquet(tmp_path / "a.parquet", {"image": [b"x" * 200], "prompt": ["x"]}, use_dictionary=False)
    with pytest.raises(DataError, match=r"row group 0 holds \d+ bytes of pictures in 1 rows, more than 100; write"):
        read(path)


def test_the_metadata_of_a_folder_and_its_shards(tmp_path: Path) -> None:
    data = [picture(tmp_path, seed) for seed in range(3)]
    parquet(tmp_path / "b.parquet", {"prompt": ["3"], "image": [data[2]]})
    parquet(tmp_path / "a.parquet", {"image": data[:2], "prompt": ["1", "2"]})
    rows = read_folder(tmp_path).rows
    assert [row.columns["prompt"] for row in rows] == ["1", "2", "3"]
    assert [row.place for row in rows] == [
        f"{tmp_path}/{name}" for name in ("a.parquet:1", "a.parquet:2", "b.parquet:1")
    ]
    assert isinstance(rows[2].files["image"], ParquetCell)
    parquet(tmp_path / "c.parquet", {"image": data[:1], "text": ["4"]})
    with pytest.raises(
        DataError, match=r"c\.parquet: has the columns image, text; .*a\.parquet has image, prompt; give"
    ):
        read_folder(tmp_path)
    parquet(tmp_path / "metadata.parquet", {"image": data[:1], "prompt": ["5"]})
    assert [row.columns["prompt"] for row in read_folder(tmp_path).rows] == ["5"]


def test_parquet_files_beside_pictures(tmp_path: Path) -> None:
    pictures(tmp_path, "sub/a.png")
    parquet(tmp_path / "a.parquet", {"image": ["sub/a.png"], "prompt": ["x"]})
    with pytest.raises(UsageError, match=r"holds Parquet files \(a\.parquet\) and pictures \(a\.png\): keep them"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"image,prompt\n", "not a Parquet file"),
        (b"", "not a Parquet file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a Git-LFS pointer"),
        (b"PAR1" + b"x" * 40, "truncated or damaged"),
    ],
)
def test_what_is_no_parquet_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = written(tmp_path, content, "metadata.parquet")
    with pytest.raises(DataError, match=rf"metadata\.parquet: {words}.* \(.*; copy the file again"):
        read_folder(tmp_path)
    assert path.read_bytes() == content


def test_a_damaged_row_group_is_a_fault_of_its_rows(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    columns = {"image": ["a.png"] * 6, "prompt": [f"{i:060}" for i in range(6)]}
    path = parquet(tmp_path / "a.parquet", columns, row_group_size=2, compression="none", use_dictionary=False)
    data = path.read_bytes()
    at = data.index(b"0" * 59 + b"2")
    path.write_bytes(data[: at - 4] + b"\xff\xff\xff\x7f" + data[at:])  # a text far longer than its page
    (found,) = faults(path)
    assert found.startswith("3: the rows 3 to 4 cannot be read (")
    assert [row.line for row in read(path, skip_bad=True).rows] == [1, 2, 5, 6]


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, b"PAR1", "metadata.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pyarrow, which is not installed; pip install 'dsplit\[parquet\]'"):
        read(path)


def test_an_empty_table(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"image": pa.array([], pa.string()), "prompt": pa.array([], pa.string())})
    with pytest.raises(DataError, match="0 usable rows"):
        read(path)


def test_several_captions(tmp_path: Path) -> None:
    data = picture(tmp_path)
    captions = pa.array([["one", "two"], ["three"], None])
    rows = read(parquet(tmp_path / "a.parquet", {"image": [data] * 3, "prompt": captions})).rows
    assert [row.columns["prompt"] for row in rows] == ["one", "three", ""]
    assert [row.variants.get("prompt") for row in rows] == [("one", "two"), None, None]
