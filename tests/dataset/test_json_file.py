"""JSON and JSONL metadata: the line of every object, and everything that is no row (cases D02, D03, C07)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsplit.dataset import Dataset
from dsplit.errors import DataError
from tests.dataset.make import faults, metadata, pictures, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pictures(tmp_path, "a.png", "b.png", "c.png")
    return tmp_path


def lines_and_prompts(data: Dataset) -> list[tuple[int, str]]:
    return [(r.line, r.columns["prompt"]) for r in data.rows]


def jsonl(folder: Path, *lines: str) -> Path:
    return metadata(folder, "\n".join(lines) + "\n", "metadata.jsonl")


def test_jsonl_lines_with_blank_ones_between(folder: Path) -> None:
    path = jsonl(folder, '{"image":"a.png","prompt":"x"}', "", '  {"image":"b.png","prompt":"two\\nlines"}  ')
    assert lines_and_prompts(read(path)) == [(1, "x"), (3, "two\nlines")]


def test_null_and_absent_prompts_are_empty_texts_with_one_warning(folder: Path) -> None:
    path = jsonl(folder, '{"image":"a.png","prompt":"x"}', '{"image":"b.png","prompt":null}', '{"image":"c.png"}')
    data = read(path)
    assert [r.columns["prompt"] for r in data.rows] == ["x", "", ""]
    assert [str(w) for w in data.warnings] == [f"{path}:2: empty prompt, used as an empty text: line 2, line 3"]


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.json"])
def test_a_byte_order_mark_changes_nothing(folder: Path, name: str) -> None:
    text = '{"image":"a.png","prompt":"x"}'
    text = f"[{text}]" if name.endswith("json") else text
    plain, marked = read(metadata(folder, text, name)), read(metadata(folder, "\ufeff" + text, name))
    assert [(r.id, r.columns, r.line) for r in plain.rows] == [(r.id, r.columns, r.line) for r in marked.rows]


def test_the_line_of_each_object_of_a_list(folder: Path) -> None:
    text = '\n[\n  {"image": "a.png",\n   "prompt": "x"},\n{"image":"b.png","prompt":"y"},'
    text += '{"image":"c.png","prompt":"z"}\n]\n'
    assert lines_and_prompts(read(metadata(folder, text, "metadata.json"))) == [(3, "x"), (5, "y"), (5, "z")]


def test_the_same_rows_have_the_same_ids_in_every_format(folder: Path) -> None:
    rows = [{"image": "a.png", "prompt": "x"}, {"prompt": 'y, "z"\n', "image": "b.png"}, {"image": "c.png"}]
    as_json = read(metadata(folder, json.dumps(rows, indent=1), "metadata.json"))
    as_jsonl = read(jsonl(folder, *map(json.dumps, rows)))
    as_csv = read(metadata(folder, 'prompt,image\nx,a.png\n"y, ""z""\n",b.png\n,c.png\n'))
    ids = [[r.id for r in data.rows] for data in (as_json, as_jsonl, as_csv)]
    assert ids[0] == ids[1] == ids[2]
    assert len(set(ids[0])) == 3


def test_every_faulty_line_of_jsonl_is_named(folder: Path) -> None:
    found = faults(
        jsonl(
            folder,
            '{"image":"a.png","prompt":"x"}',
            '{"image":"b.png","prompt":"y"',
            '["a.png"]',
            "7",
            '{"image":"a.png","prompt":"one","prompt":"two"}',
            '{"image":"a.png"} {"image":"b.png"}',
            "[" * 100000,
        )
    )
    assert [f.split(";")[0] for f in found] == [
        "2: not JSON (Expecting ',' delimiter, column 30)",
        "3: a list, not an object",
        "4: a number, not an object",
        "5: the object has 'prompt' more than once",
        "6: not JSON (more text after the object, column 18)",
        "7: not JSON (nested too deeply)",
    ]


def test_cells_that_are_no_texts(folder: Path) -> None:
    found = faults(
        jsonl(
            folder,
            '{"image":"a.png","prompt":7}',
            '{"image":"a.png","prompt":NaN}',
            '{"image":"a.png","prompt":["x",7]}',
            '{"image":"a.png","prompt":[]}',
            '{"image":["a.png"],"prompt":"x"}',
            '{"image":"a.png","prompt":true}',
            '{"image":"a.png","prompt":"half \\ud83d pair"}',
            '{"image":"a.png","prompt":"whole \\ud83d\\ude00 pair"}',
        )
    )
    assert [f.split(";")[0] for f in found] == [
        "1: prompt is a number (7), not text (put it between quotes)",
        "2: prompt is a number (nan), not text (put it between quotes)",
        "3: prompt has 7 in its list, not a text",
        "4: prompt is an empty list",
        "5: image is a list (['a.png']), not a path (write one path per row, between quotes)",
        "6: prompt is true or false (True), not text (put it between quotes)",
        "7: prompt 'half \\ud83d pair' is not UTF-8 text",
    ]


def test_bytes_that_are_not_utf8_are_named_by_line(folder: Path) -> None:
    good, bad = b'{"image":"a.png","prompt":"x"}', b'{"image":"b.png",\n"prompt":"it\x92s"}'
    (fault,) = faults(metadata(folder, good + b"\n" + bad.replace(b"\n", b"") + b"\n", "metadata.jsonl"))
    assert fault.startswith("2: byte 0x92 is not UTF-8")
    (fault,) = faults(metadata(folder, b"[" + good + b",\n" + bad + b"]", "metadata.json"))
    assert fault.startswith("3: byte 0x92 is not UTF-8")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"image":"a.png","prompt":"x"}\n', "1: expected a list of objects"),
        ('[\n{"image":"a.png"}\n{"image":"b.png"}]', "3: not JSON (expected , or ] after an item of the list)"),
        ('[\n{"image":"a.png"},\n]', "3: not JSON (Expecting value, column 1)"),
        ('[{"image":"a.png"}\n', "1: not JSON (expected , or ] after an item of the list)"),
        ('[{"image":"a.png",\n"prompt":x}]', "2: not JSON (Expecting value, column 10)"),
        ('[{"image":"a.png"}]\n[]', "2: more text after the list"),
        ("[]\n{}", "2: more text after the list"),
        ("[" * 100000, "1: not JSON (nested too deeply)"),
    ],
)
def test_a_json_file_that_is_no_list(folder: Path, text: str, fault: str) -> None:
    (found,) = faults(metadata(folder, text, "metadata.json"))
    assert found.startswith(fault)


def test_items_of_a_list_that_are_no_objects(folder: Path) -> None:
    text = '[{"image":"a.png","prompt":"x"},\nnull,\n{"image":"b.png","image":"c.png"}]'
    found = faults(metadata(folder, text, "metadata.json"))
    assert [f.split(";")[0] for f in found] == ["2: null, not an object", "3: the object has 'image' more than once"]


def test_items_that_share_a_line_are_told_apart_by_their_number(folder: Path) -> None:
    text = '[{"image":"a.png","prompt":"x"},{"image":"no.png","prompt":"x"},{"image":"b.png"},null,\n{"image":"c"}]'
    path = metadata(folder, text, "metadata.json")
    found = [f.split(";")[0] for f in faults(path)]
    assert found[:2] == [f"1 (item 2): image 'no.png' not found under '{folder}'", "1 (item 4): null, not an object"]
    assert found[2].startswith("2: image 'c' not found")
    data = read(path, skip_bad=True)
    assert [r.place for r in data.rows] == [f"{path}:1 (item 1)", f"{path}:1 (item 3)"]
    assert [str(w) for w in data.warnings] == [
        f"{path}:1 (item 3): empty prompt, used as an empty text: {path}:1 (item 3)"
    ]


@pytest.mark.parametrize(("name", "content"), [("e.jsonl", ""), ("e.json", "[]"), ("e.json", " \n"), ("e.jsonl", "\n")])
def test_nothing_usable_is_an_error(folder: Path, name: str, content: str) -> None:
    with pytest.raises(DataError, match=r"^0 usable rows in '.*' \(the file holds nothing\)$"):
        read(metadata(folder, content, name))
