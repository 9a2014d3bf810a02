"""Several captions, windows and mirrored pictures of one row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsplit.dataset.images import pixels, resize_and_crop
from dsplit.dataset.rows import View
from dsplit.dataset.views import refuse_variants, views_of
from dsplit.errors import UsageError
from dsplit.recipe import DataOptions
from tests.dataset.make import faults, metadata, pictures, read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pictures(tmp_path, "a.png", size=(96, 48))
    return tmp_path


def test_captions_of_a_json_list(folder: Path) -> None:
    lines = [{"image": "a.png", "prompt": prompt} for prompt in (["x", "y", "x"], ["z"], "z", '["p", "q"]')]
    rows = read(metadata(folder, "\n".join(map(json.dumps, lines)), "metadata.jsonl")).rows
    assert [row.columns["prompt"] for row in rows] == ["x", "z", "z", "p"]
    assert [row.variants for row in rows] == [{"prompt": ("x", "y", "x")}, {}, {}, {"prompt": ("p", "q")}]
    assert len({row.id for row in rows}) == 4  # the id is that of the cell as written


def test_captions_in_a_csv_cell(folder: Path) -> None:
    text = 'image,prompt\na.png,"[""x, y"", ""z""]"\na.png,[red] a cat\na.png,[1]\na.png,"[""x"", 7]"\na.png,[]\n'
    rows = read(metadata(folder, text)).rows
    assert [row.columns["prompt"] for row in rows] == ["x, y", "[red] a cat", "[1]", '["x", 7]', "[]"]
    assert [row.variants for row in rows] == [{"prompt": ("x, y", "z")}, {}, {}, {}, {}]


def test_an_empty_caption_among_several_is_told(folder: Path) -> None:
    data = read(metadata(folder, '{"image": "a.png", "prompt": ["x", " "]}', "metadata.jsonl"))
    assert [w.what for w in data.warnings] == ["empty prompt, used as an empty text: line 1"]
    assert data.rows[0].variants["prompt"] == ("x", " ")


def test_other_columns_take_no_list(folder: Path) -> None:
    (fault,) = faults(metadata(folder, '{"image": ["a.png"], "prompt": "x"}', "metadata.jsonl"))
    assert fault.startswith("1: image is a list (['a.png']), not a path")


def test_a_picked_row(folder: Path) -> None:
    path = metadata(folder, '{"image": "a.png", "prompt": ["x", "y"]}', "metadata.jsonl")
    (row,) = read(path, resolution="32x32", crops=3).rows
    assert row.pick({"prompt": 1, "view": 2}).columns["prompt"] == "y"
    assert row.pick({"prompt": 1, "view": 2}).view == View(32, 0)
    assert row.pick({"prompt": None}).columns["prompt"] == ""
    assert row.pick({}) == row


def test_windows_lie_evenly_from_end_to_end() -> None:
    assert views_of((96, 48), (32, 32)) == (View(16, 0),)
    assert views_of((96, 48), (32, 32), 2) == (View(0, 0), View(32, 0))
    assert views_of((96, 48), (32, 32), 3) == (View(0, 0), View(16, 0), View(32, 0))
    assert views_of((48, 96), (32, 32), 2, True) == (
        View(0, 0),
        View(0, 32),
        View(0, 0, True),
        View(0, 32, True),
    )


def test_a_picture_without_slack_has_one_window() -> None:
    assert views_of((64, 64), (32, 32), 5) == (View(0, 0),)
    assert views_of((33, 32), (32, 32), 5) == (View(0, 0), View(1, 0))


def test_crops_that_change_nothing_are_told(tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", size=(64, 64))
    data = read(metadata(tmp_path, "image,prompt\na.png,x\n"), crops=4)
    assert [str(w).split(";")[0] for w in data.warnings] == [
        "--crops 4: every picture has the shape of its target size, so each has one window"
    ]
    assert data.rows[0].variants == {}


def test_the_row_has_its_views(folder: Path) -> None:
    (row,) = read(metadata(folder, "image,prompt\na.png,x\n"), resolution="32x32", crops=2, flip=True).rows
    assert (row.view, len(row.variants["view"])) == (View(0, 0), 4)
    (row,) = read(metadata(folder, "image,prompt\na.png,x\n"), resolution="32x32").rows
    assert (row.view, row.variants) == (View(16, 0), {})


def test_the_pixels_of_a_window(folder: Path) -> None:
    whole = pixels(folder / "a.png", (96, 48))
    assert np.array_equal(pixels(folder / "a.png", (48, 48), View(48, 0)), whole[:, :, 48:])
    assert np.array_equal(pixels(folder / "a.png", (48, 48), View(48, 0, True)), whole[:, :, :47:-1])
    assert np.array_equal(pixels(folder / "a.png", (48, 48)), whole[:, :, 24:72])


@pytest.mark.parametrize("image", [(97, 48), (48, 97), (100, 33), (51, 77), (64, 64)])
def test_the_default_window_is_the_centre(image: tuple[int, int]) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*image[::-1], 3), np.uint8))
    scale = max(32 / image[0], 32 / image[1])
    scaled = picture.resize((round(image[0] * scale), round(image[1] * scale)), Image.Resampling.BILINEAR)
    left, top = round((scaled.width - 32) / 2), round((scaled.height - 32) / 2)
    expected = np.asarray(scaled.crop((left, top, left + 32, top + 32)))
    assert np.array_equal(np.asarray(resize_and_crop(picture, (32, 32))), expected)


def test_a_family_may_forbid_them() -> None:
    refuse_variants("some-edit", (), DataOptions())
    refuse_variants("some", ("flip", "crops"), DataOptions(flip=True, crops=2))
    with pytest.raises(UsageError, match="--crops: some-edit does not allow it"):
        refuse_variants("some-edit", ("flip",), DataOptions(flip=True, crops=2))


def test_long_pictures_are_told(tmp_path: Path) -> None:
    pictures(tmp_path, "long.png", size=(160, 32))
    pictures(tmp_path, "four.png", size=(128, 32))
    data = read(metadata(tmp_path, "image,prompt\nlong.png,x\nfour.png,x\nlong.png,y\n"))
    assert [w.what for w in data.warnings] == ["longer than 4:1, which models have seldom seen: line 2, line 4"]
