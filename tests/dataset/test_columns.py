"""Names of columns and types of cells (case D07, and the columns of direct_distill)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsplit.errors import DataError, UsageError
from dsplit.models.family import Column
from tests.dataset.make import COLUMNS, DISTILL, faults, metadata, pictures, read

ROW = "image,prompt,seed,rand_device,num_inference_steps,cfg_scale\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pictures(tmp_path, "a.png", "b.png")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "file_name,text\na.png,x\n",
            "1: no column 'image', 'prompt'; columns found: file_name, text; columns needed: image, prompt; "
            "rename with --columns image=file_name,prompt=text",
        ),
        (
            "image,words\na.png,x\n",
            "1: no column 'prompt'; columns found: image, words; columns needed: image, prompt; "
            "rename with --columns prompt=NAME_FOUND",
        ),
        (
            "a.png,a red square\nb.png,a blue square\n",
            "1: no column 'image', 'prompt'; columns found: a.png, a red square; columns needed: image, prompt; "
            "rename with --columns image=NAME_FOUND,prompt=NAME_FOUND; "
            "the first line looks like a row: is the line of column names missing?",
        ),
        (
            "\nimage,prompt , prompt\na.png,one,two\n",
            "2: the column 'prompt' stands 2 times; columns found: image, prompt, prompt; columns needed: image, "
            "prompt; give each column its own name, then rename with --columns prompt=NAME_FOUND",
        ),
        (
            "image;prompt\na.png;x\n",
            "1: no column 'image', 'prompt'; columns found: image;prompt; columns needed: image, prompt; "
            "rename with --columns image=NAME_FOUND,prompt=NAME_FOUND; the columns must be separated by commas",
        ),
        (
            "Image,Prompt\na.png,x\n",
            "1: no column 'image', 'prompt'; columns found: Image, Prompt; columns needed: image, prompt; "
            "rename with --columns image=NAME_FOUND,prompt=NAME_FOUND",
        ),
    ],
)
def test_columns_that_do_not_fit(folder: Path, text: str, message: str) -> None:
    assert faults(metadata(folder, text)) == [message]
    with pytest.raises(DataError, match="the columns do not fit"):
        read(metadata(folder, text), skip_bad=True)


def test_json_without_the_column_in_any_object(folder: Path) -> None:
    path = metadata(folder, '{"image":"a.png","caption":"x"}\n', "m.jsonl")
    (fault,) = faults(path)
    assert "no column 'prompt'; columns found: image, caption; columns needed: image, prompt" in fault
    assert fault.endswith("rename with --columns prompt=caption")


def test_names_are_trimmed_and_other_columns_do_no_harm(folder: Path) -> None:
    data = read(metadata(folder, "note,image , prompt ,,\n1,a.png,a red square,,\n2,b.png, x,y,z\n"))
    assert [r.columns for r in data.rows] == [
        {"image": "a.png", "prompt": "a red square"},
        {"image": "b.png", "prompt": " x"},
    ]


def test_renaming(folder: Path) -> None:
    path = metadata(folder, "file_name,text,prompt\na.png,x,old\n")
    (row,) = read(path, columns=" image = file_name , prompt=text,").rows
    assert row.columns == {"image": "a.png", "prompt": "x"}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("prompt", "--columns 'prompt': write NAME=FOUND"),
        ("prompt=", "--columns 'prompt=': write NAME=FOUND"),
        ("text=prompt", r"'text' is no column of this job \(it has image, prompt\)"),
        ("prompt=a,prompt=b", "states 'prompt' twice"),
    ],
)
def test_renames_that_make_no_sense(folder: Path, option: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(metadata(folder, "image,prompt\na.png,x\n"), columns=option)


def test_renaming_to_a_column_that_is_not_there(folder: Path) -> None:
    path = metadata(folder, "image,prompt\na.png,x\n")
    (fault,) = faults(path, (*COLUMNS, Column("seed", "int", required=False)), columns="seed=sed")
    assert fault.startswith("1: no column 'sed'; columns found: image, prompt")


def test_a_prompt_column_must_exist_even_if_a_family_gives_it_a_default(folder: Path) -> None:
    columns = (Column("image", "file"), Column("prompt", required=False, default=""))
    (fault,) = faults(metadata(folder, "image,text\na.png,x\n"), columns)
    assert fault.startswith("1: no column 'prompt'; columns found: image, text; columns needed: image, prompt")
    data = read(metadata(folder, "image,prompt\na.png,\n"), columns)
    assert data.rows[0].columns["prompt"] == ""
    assert [w.what for w in data.warnings] == ["empty prompt, used as an empty text: line 2"]


def test_typed_columns(folder: Path) -> None:
    path = metadata(folder, ROW + "a.png,x,007,cpu,4,\nb.png,x, -3 , cuda ,8.0,2.50\n")
    assert [r.columns for r in read(path, DISTILL).rows] == [
        {
            "image": "a.png", "prompt": "x", "seed": 7, "rand_device": "cpu", "num_inference_steps": 4,
            "cfg_scale": 1.0,
        },
        {
            "image": "b.png", "prompt": "x", "seed": -3, "rand_device": "cuda", "num_inference_steps": 8,
            "cfg_scale": 2.5,
        },
    ]  # fmt: skip
    as_json = metadata(
        folder,
        '{"image":"a.png","prompt":"x","seed":7,"rand_device":"cpu","num_inference_steps":4.0,"cfg_scale":3}\n',
        "m.jsonl",
    )
    (row,) = read(as_json, DISTILL).rows
    assert {k: row.columns[k] for k in ("seed", "num_inference_steps", "cfg_scale")} == {
        "seed": 7, "num_inference_steps": 4, "cfg_scale": 3.0,
    }  # fmt: skip
    assert isinstance(row.columns["num_inference_steps"], int)
    assert isinstance(row.columns["cfg_scale"], float)


def test_every_wrong_cell_of_every_row_is_named(folder: Path) -> None:
    rows = ["a.png,x,1.5,cpu,4,1", "a.png,x,1,gpu,1,nan", "a.png,x,1_0,cpu,,1_0", "no.png,x,９,cpu,1e1,inf"]
    rows.append(f"a.png,x,{2**63},cpu,4,{'9' * 400}")
    found = faults(metadata(folder, ROW + "\n".join(rows) + "\n"), DISTILL)
    assert [f.split(";")[0] for f in found] == [
        "2: seed '1.5' is no whole number of 64 bits",
        "3: rand_device 'gpu' is not one of cpu, cuda",
        "3: num_inference_steps 1 is below the smallest allowed, 2",
        "3: cfg_scale 'nan' is no finite number",
        "4: seed '1_0' is no whole number of 64 bits",
        "4: num_inference_steps is absent",
        "4: cfg_scale '1_0' is no finite number",
        "5: seed '９' is no whole number of 64 bits",
        "5: num_inference_steps '1e1' is no whole number of 64 bits",
        "5: cfg_scale 'inf' is no finite number",
        "5: image 'no.png' not found under '" + str(folder) + "'",
        "6: seed '9223372036854775808' is no whole number of 64 bits",
        f"6: cfg_scale '{'9' * 57}...' is no finite number",
    ]


def test_rand_device_is_needed_with_a_seed_unless_the_option_gives_it(folder: Path) -> None:
    path = metadata(folder, "image,prompt,seed,num_inference_steps\na.png,x,7,4\nb.png,x,,4\n")
    assert faults(path, DISTILL) == ["2: rand_device is absent, but seed is stated; state it or give --rand-device"]
    data = read(path, DISTILL, rand_device="cpu")
    assert [(r.columns["seed"], r.columns["rand_device"]) for r in data.rows] == [(7, "cpu"), (None, "cpu")]
    stated = metadata(folder, "image,prompt,seed,num_inference_steps,rand_device\na.png,x,7,4,cuda\n", "s.csv")
    assert read(stated, DISTILL, rand_device="cpu").rows[0].columns["rand_device"] == "cuda"


def test_a_short_row_lacks_its_last_cells(folder: Path) -> None:
    path = metadata(folder, "prompt,image\nx,a.png\ny\n")
    assert faults(path) == ["3: image is absent; every row needs one"]


def test_free_text_that_is_optional_keeps_its_default_and_its_white_space(folder: Path) -> None:
    columns = (*COLUMNS, Column("negative_prompt", required=False, default="bad"))
    path = metadata(folder, "image,prompt,negative_prompt\na.png,x,\nb.png,x, \n")
    data = read(path, columns)
    assert [r.columns["negative_prompt"] for r in data.rows] == ["bad", " "]
    assert data.warnings == ()
