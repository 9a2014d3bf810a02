"""The data set as a whole: rows and their ids, faults in one report, rows left out, nothing usable (case C07)."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dsplit.dataset.faults import Refusal, count_reasons, list_lines
from dsplit.errors import DataError
from dsplit.models.family import Column
from tests import tiny
from tests.dataset.make import COLUMNS, DISTILL, faults, metadata, pictures, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pictures(tmp_path, "a.png", "b.png", "c.png")
    return tmp_path


def ids(folder: Path, text: str, kinds: tuple[Column, ...] = COLUMNS, **options: object) -> list[str]:
    return [r.id for r in read(metadata(folder, text), kinds, **options).rows]


def test_a_row(folder: Path) -> None:
    (row,) = read(metadata(folder, "image,prompt\na.png,x\n"), max_pixels=1024).rows
    assert (row.source, row.line, row.place) == (f"{folder}/metadata.csv", 2, f"{folder}/metadata.csv:2")
    assert (row.columns, row.files) == ({"image": "a.png", "prompt": "x"}, {"image": folder / "a.png"})
    assert (row.image_size, row.size) == ((64, 64), (32, 32))
    assert re.fullmatch("[0-9a-f]{32}", row.id)


def test_the_id_is_that_of_the_columns_as_written(folder: Path) -> None:
    (a, b, c) = ids(folder, "image,prompt\na.png,x\na.png,y\nb.png,x\n")
    assert len({a, b, c}) == 3
    assert ids(folder, "note,prompt,image\n1,x,b.png\n2,x,a.png\n") == [c, a], "order and other columns do not matter"
    assert ids(folder, "file_name,text\na.png,x\n", columns="image=file_name,prompt=text") == [a], "canonical names"
    assert ids(folder, "image,prompt\na.png,x \n") != [a]
    assert ids(folder, "image,prompt\na.png,x\n", max_pixels=1024, rand_device="cpu") == [a], "options do not matter"


def test_the_id_is_stable_across_versions(folder: Path) -> None:
    """Caches join rows by it: a change here needs a new cache format."""
    assert ids(folder, "image,prompt\na.png,x\na.png,x\nb.png,\n") == [
        "718ab785f9a36bc6a04d2f55b3b802a9",
        "b80baf79e0f50758a4d650481b0d92b9",
        "9f72bb5d84dab2a4e49bfc12c0ab91da",
    ]


def test_absent_columns_and_empty_cells_are_one_row(folder: Path) -> None:
    plain = ids(folder, "image,prompt,num_inference_steps\na.png,x,4\n", DISTILL)
    assert ids(folder, "image,prompt,num_inference_steps,cfg_scale,seed\na.png,x,4,,\n", DISTILL) == plain
    assert ids(folder, "image,prompt,num_inference_steps,cfg_scale\na.png,x,4,1.0\n", DISTILL) != plain


def test_identical_rows_are_told_apart_by_their_occurrence(folder: Path) -> None:
    twice = ids(folder, "image,prompt\na.png,x\nb.png,x\na.png,x\na.png,x\n")
    assert len(set(twice)) == 4
    assert ids(folder, "image,prompt\na.png,x\na.png,x\na.png,x\nb.png,x\n") == [twice[0], *twice[2:], twice[1]]


def test_all_faults_of_all_rows_come_in_one_report(folder: Path) -> None:
    (folder / "small.png").write_bytes(tiny.picture(folder / "s.png", (8, 8)).read_bytes())
    rows = ["no.png,x,1", "a.png,x,4", "small.png,x,", "a.png,x,4,5", "b.png,y,4"]
    path = metadata(folder, "image,prompt,num_inference_steps\n" + "\n".join(rows) + "\n")
    found = faults(path, DISTILL)
    assert [f.split(";")[0] for f in found] == [
        "2: num_inference_steps 1 is below the smallest allowed, 2",
        f"2: image 'no.png' not found under '{folder}'",
        "4: num_inference_steps is absent",
        "4: image 'small.png' is 8x8: a side is shorter than 16, the least that fits",
        "5: 4 fields, expected 3 (image, prompt, num_inference_steps)",
    ]
    with pytest.raises(DataError) as raised:
        read(path, DISTILL)
    assert str(raised.value).splitlines()[0] == (
        f"3 of 5 rows in '{path}' have faults (1 not allowed, 1 empty cell, 1 wrong number of fields); "
        "mend them, or leave them out with --skip-bad"
    )
    data = read(path, DISTILL, skip_bad=True)
    assert [r.line for r in data.rows] == [3, 6]
    assert [str(p).removeprefix(f"{path}:") for p in data.skipped] == found


def test_only_missing_files(folder: Path) -> None:
    path = metadata(folder, "image,prompt\nno1.png,x\nno2.png,y\n")
    for skip_bad in (False, True):
        with pytest.raises(DataError) as raised:
            read(path, skip_bad=skip_bad)
        assert str(raised.value).splitlines() == [
            f"0 usable rows in '{path}' (2 of 2 rows have faults: 2 file not found)",
            f"  {path}:2: image 'no1.png' not found under '{folder}'; fix the path or drop the row",
            f"  {path}:3: image 'no2.png' not found under '{folder}'; fix the path or drop the row",
        ]


def test_warnings_of_rows_left_out_are_left_out(folder: Path) -> None:
    data = read(metadata(folder, "image,prompt\na.png,\nno.png,\nb.png,x\n"), skip_bad=True)
    assert [w.what for w in data.warnings] == ["empty prompt, used as an empty text: line 2"]


def test_many_pictures_keep_their_order(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {16 * (i % 7 + 1) for i in range(1200)}
    for side in sizes:
        tiny.picture(folder / f"{side}.png", (side, 32))
    for i in range(1200):
        (folder / f"link{i}.png").hardlink_to(folder / f"{16 * (i % 7 + 1)}.png")
    path = metadata(folder, "image,prompt\n" + "".join(f"link{i}.png,{i}\n" for i in range(1200)))
    monkeypatch.setattr("dsplit.console.PLAIN_SECONDS", 0)
    data = read(path)
    assert [(r.line, r.columns["prompt"], r.size) for r in data.rows] == [
        (i + 2, str(i), (16 * (i % 7 + 1), 32)) for i in range(1200)
    ]
    output = capsys.readouterr()
    assert output.out == ""
    assert "read: 1000 rows" in output.err


def test_lists_of_lines_and_counts_of_reasons() -> None:
    assert list_lines([2]) == "line 2"
    assert list_lines([3, 4, 7, 8, 9, 10, 12]) == "line 3, line 4, line 7 to line 10, line 12"
    assert count_reasons(["small", "gone", "gone"]) == "2 gone, 1 small"


def test_a_refusal_comes_whole_out_of_a_worker_process() -> None:
    refusal = pickle.loads(pickle.dumps(Refusal("too small", "1x1", "use another")))
    assert (str(refusal), refusal.reason, refusal.what, refusal.remedy) == (
        "1x1; use another", "too small", "1x1", "use another",
    )  # fmt: skip


def test_importing_the_package_is_light() -> None:
    code = "import sys, dsplit.dataset; print([m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
