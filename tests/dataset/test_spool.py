"""Rows kept on disk: they come back as they were, in any order, at any number."""

from __future__ import annotations

import tracemalloc
from itertools import islice
from pathlib import Path

from dsplit.dataset.images import pillow
from dsplit.dataset.packed import Packed
from dsplit.dataset.parquet_cell import ParquetCell
from dsplit.dataset.rows import Row, View
from dsplit.dataset.spool import Rows
from tests.dataset.make import metadata, pictures, read

TAR = Packed(Path("/data/shard.tar"), 512, 99, "é/1.jpg")
CELL = ParquetCell(Path("/data/a.parquet"), 1, 2, "image.bytes", 12, "x.png")


def row(i: int, **more: object) -> Row:
    columns = {"image": f"{i}.png", "prompt": 'Bär "\n', "seed": None if i % 2 else 2**63 - 1, "cfg_scale": 1.5}
    files = {"image": Path(f"/data/{i}.png")}
    fields = {"files": files, "image_size": (90, 60), "size": (64, 48), "view": View(4, 0)}
    return Row(f"{i:032x}", "data/metadata.csv", i + 2, columns, **{**fields, **more})  # type: ignore[arg-type]


def test_rows_come_back_as_they_were() -> None:
    rows = [row(0), row(1, files={"image": TAR, "edit": CELL}), row(2, item=3, variants={"prompt": ("a", "b")})]
    rows += [row(i) for i in range(3, 600)]
    spooled = Rows()
    for each in rows:
        spooled.add(each)
    assert list(spooled) == rows
    assert (spooled[2], spooled[-1], spooled[5:9]) == (rows[2], rows[-1], rows[5:9])
    assert list(spooled.first(3)) == rows[:3]
    assert len(spooled.first(None)) == 600


def test_a_part_outlives_the_whole() -> None:
    spooled = Rows()
    for i in range(3):
        spooled.add(row(i))
    part = spooled.first(2)
    del spooled
    assert list(part) == [row(0), row(1)]


def test_views_are_made_anew() -> None:
    spooled = Rows(crops=2, flip=True)
    spooled.add(row(0, view=View(0, 0)))
    views = (View(0, 0), View(8, 0), View(0, 0, True), View(8, 0, True))
    assert spooled[0] == row(0, view=View(0, 0), variants={"view": views})


def test_memory_does_not_grow_with_what_rows_hold(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    with pillow():  # imports
        pass
    sizes = []
    for count in (4000, 12_000):
        path = metadata(tmp_path, "image,prompt\n" + "".join(f"a.png,{i} {'x' * 500}\n" for i in range(count)))
        tracemalloc.start()
        data = read(path)
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert [r.columns["prompt"] for r in islice(data.rows, 2)] == [f"{i} {'x' * 500}" for i in range(2)]
    assert sizes[1] - sizes[0] < 8000 * 32
