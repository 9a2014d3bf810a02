"""CSV metadata: cells byte-exact, physical lines, and every malformed record named (cases D02, D03, D06)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsplit.dataset import Dataset
from dsplit.errors import DataError
from tests.dataset.make import faults, metadata, pictures, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pictures(tmp_path, "a.png", "b.png", "c.png", "d.png")
    return tmp_path


def lines_and_prompts(data: Dataset) -> list[tuple[int, str]]:
    return [(r.line, r.columns["prompt"]) for r in data.rows]


def test_prompts_are_byte_exact_and_lines_are_physical(folder: Path) -> None:
    text = (
        'image,prompt\r\na.png,"red, green, blue"\r\n\r\nb.png,"a sign saying ""OPEN"""\r\n'
        'c.png,"line one\nline two\r\n"\r\nd.png, plain \r\n'
    )
    assert lines_and_prompts(read(metadata(folder, text))) == [
        (2, "red, green, blue"),
        (4, 'a sign saying "OPEN"'),
        (5, "line one\nline two\r\n"),
        (8, " plain "),
    ]


@pytest.mark.parametrize("text", ["NA", "None", "nan", "null", "007", "1e5", "TRUE", "\u2028", "\x0b", "5' 3\" tall"])
def test_texts_that_look_like_something_else_stay_text(folder: Path, text: str) -> None:
    assert read(metadata(folder, f"image,prompt\na.png,{text}\n")).rows[0].columns["prompt"] == text


def test_unicode_line_separators_do_not_count_as_lines(folder: Path) -> None:
    text = "image,prompt\na.png,one\u2028two\x0b\x0c\x85three\nb.png,x\n"
    assert lines_and_prompts(read(metadata(folder, text))) == [(2, "one\u2028two\x0b\x0c\x85three"), (3, "x")]


def test_a_cell_longer_than_the_csv_modules_limit(folder: Path) -> None:
    prompt = "word " * 60000
    assert read(metadata(folder, f"image,prompt\na.png,{prompt}\n")).rows[0].columns["prompt"] == prompt


def test_a_byte_order_mark_changes_nothing(folder: Path) -> None:
    text = "image,prompt\na.png,a red square\nb.png,ein schönes Bild\n"
    plain, marked = read(metadata(folder, text)), read(metadata(folder, b"\xef\xbb\xbf" + text.encode(), "bom.csv"))
    assert [(r.id, r.columns) for r in plain.rows] == [(r.id, r.columns) for r in marked.rows]
    assert len(marked.rows) == 2


def test_old_mac_line_ends(folder: Path) -> None:
    assert lines_and_prompts(read(metadata(folder, "image,prompt\ra.png,x\rb.png,y\r"))) == [(2, "x"), (3, "y")]


def test_every_line_that_is_not_utf8_is_named(folder: Path) -> None:
    path = metadata(folder, b'image,prompt\na.png,fine\nb.png,the artist\x92s\nc.png,"one\ntwo\xff\nthree"\n')
    assert [f.split(";")[0] for f in faults(path)] == ["3: byte 0x92 is not UTF-8", "5: byte 0xff is not UTF-8"]


def test_rows_that_are_not_utf8_can_be_skipped(folder: Path) -> None:
    data = read(metadata(folder, b"image,prompt\na.png,fine\nb.png,the artist\x92s\n"), skip_bad=True)
    assert lines_and_prompts(data) == [(2, "fine")]
    assert [p.what for p in data.skipped] == ["byte 0x92 is not UTF-8"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf16_is_refused_in_words(folder: Path, encoding: str) -> None:
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    (fault,) = faults(metadata(folder, mark + "image,prompt\na.png,x\n".encode(encoding)))
    assert fault.startswith("1: UTF-16, not UTF-8")


def test_a_header_that_is_not_utf8(folder: Path) -> None:
    (fault,) = faults(metadata(folder, b"image,prompt\xe9\na.png,x\n"))
    assert fault.startswith("1: byte 0xe9 is not UTF-8")


def test_too_many_fields(folder: Path) -> None:
    found = faults(metadata(folder, "image,prompt\na.png,fine\nb.png,red, green\nc.png,x,\nd.png,1,2,3\n"))
    assert [f.split(";")[0] for f in found] == [
        "3: 3 fields, expected 2 (image, prompt)",
        "4: 3 fields, expected 2 (image, prompt)",
        "5: 4 fields, expected 2 (image, prompt)",
    ]


def test_absent_and_empty_prompts_are_empty_texts_with_one_warning(folder: Path) -> None:
    data = read(metadata(folder, 'image,prompt\na.png,x\nb.png,\nc.png\nd.png,""\na.png,y\nb.png," "\n'))
    assert [r.columns["prompt"] for r in data.rows] == ["x", "", "", "", "y", " "]
    (warning,) = data.warnings
    assert str(warning).endswith("metadata.csv:3: empty prompt, used as an empty text: line 3 to line 5, line 7")


def test_two_empty_prompts_are_both_named(folder: Path) -> None:
    (warning,) = read(metadata(folder, "image,prompt\na.png,x\nb.png,\nc.png\n")).warnings
    assert warning.what == "empty prompt, used as an empty text: line 3, line 4"


def test_a_quote_that_is_never_closed_does_not_swallow_the_rest(folder: Path) -> None:
    (fault,) = faults(metadata(folder, 'image,prompt\na.png,x\nb.png,"open\nc.png,y\nd.png,z\n'))
    assert fault.startswith("3: a quote opened here is never closed")


def test_text_after_a_closing_quote_is_a_fault_and_later_rows_are_still_checked(folder: Path) -> None:
    found = faults(metadata(folder, 'image,prompt\na.png,"he said "hi""\nb.png,ok\nno.png,x\n'))
    assert [f[:2] for f in found] == ["2:", "4:"]
    assert found[0].startswith("2: wrong quoting")
    assert "'no.png' not found" in found[1]


def test_lines_without_text_do_not_count(folder: Path) -> None:
    data = read(metadata(folder, "\n\nimage,prompt\n\na.png,x\n   \n\nb.png,y\n\n"))
    assert lines_and_prompts(data) == [(5, "x"), (8, "y")]


def test_a_line_of_empty_cells_is_a_fault(folder: Path) -> None:
    assert faults(metadata(folder, "image,prompt\na.png,x\n,\n")) == ["3: image is absent; every row needs one"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the file holds nothing"),
        (b"\xef\xbb\xbf", "the file holds nothing"),
        (b"\n \n", "the file holds nothing"),
        (b"image,prompt\n", "0 rows below the column names"),
    ],
)
def test_nothing_usable_is_an_error(folder: Path, content: bytes, why: str) -> None:
    path = metadata(folder, content)
    for skip_bad in (False, True):
        with pytest.raises(DataError) as raised:
            read(path, skip_bad=skip_bad)
        assert str(raised.value) == f"0 usable rows in '{path}' ({why})"
