"""Target sizes: the area rule, stated sizes and their contradictions (case D10)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsplit.dataset.sizes import scaled_size, stated_size, target_size
from dsplit.errors import DataError, UsageError
from dsplit.recipe import DataOptions
from tests.dataset.make import faults, metadata, pictures, read

SIZES = {"odd.png": (65, 127), "small.png": (17, 33), "one.png": (1, 1), "thin.png": (15, 200), "wide.png": (2048, 8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        pictures(tmp_path, name, size=size)
    return tmp_path


def csv(folder: Path, *names: str) -> Path:
    return metadata(folder, "image,prompt\n" + "".join(f"{name},x\n" for name in names))


@pytest.mark.parametrize(
    ("size", "max_pixels", "target"),
    [
        ((65, 127), 16384, (64, 112)),
        ((17, 33), 16384, (16, 32)),
        ((1024, 1024), 1048576, (1024, 1024)),
        ((4000, 3000), 1048576, (1168, 880)),  # int(4000 / 3.383) = 1182, int(3000 / 3.383) = 886
        ((4000, 3000), None, (4000, 2992)),
        ((16, 16), 256, (16, 16)),
        ((128, 129), 16384, (112, 128)),
    ],
)
def test_area_rule(size: tuple[int, int], max_pixels: int | None, target: tuple[int, int]) -> None:
    assert target_size(size, DataOptions(max_pixels=max_pixels), 16) == target


@given(st.integers(1, 9000), st.integers(1, 9000), st.integers(1024, 2**21), st.sampled_from([8, 16, 32]))
def test_area_rule_never_exceeds_the_area_or_the_picture(width: int, height: int, area: int, factor: int) -> None:
    options = DataOptions(max_pixels=area)
    shrink = max(1.0, (width * height / area) ** 0.5)
    if min(int(width / shrink), int(height / shrink)) < factor:
        with pytest.raises(DataError, match=f"{width}x{height}"):
            target_size((width, height), options, factor)
        return
    w, h = target_size((width, height), options, factor)
    assert w * h <= area
    assert factor <= w <= width
    assert factor <= h <= height
    assert w % factor == h % factor == 0
    assert scaled_size((width, height), (w, h))[0] >= w
    assert scaled_size((width, height), (w, h))[1] >= h


def test_sides_below_the_factor_are_named_with_their_size(folder: Path) -> None:
    pictures(folder, "flat.png", size=(2000, 20))
    path = csv(folder, *SIZES, "flat.png")
    assert [f.split(":", 2)[:2] for f in faults(path, max_pixels=16384)] == [
        ["4", " image 'one.png' is 1x1"],
        ["5", " image 'thin.png' is 15x200"],
        ["6", " image 'wide.png' is 2048x8"],
        ["7", " image 'flat.png' is 2000x20, which --max-pixels scales to 1280x12"],
    ]
    data = read(path, max_pixels=16384, skip_bad=True)
    assert [(r.columns["image"], r.image_size, r.size) for r in data.rows] == [
        ("odd.png", (65, 127), (64, 112)),
        ("small.png", (17, 33), (16, 32)),
    ]
    assert len(data.skipped) == 4


def test_a_stated_size_scales_up_with_one_warning(folder: Path) -> None:
    data = read(csv(folder, *SIZES), resolution="32x64")
    assert [r.size for r in data.rows] == [(32, 64)] * 5
    assert [w.what for w in data.warnings] == ["smaller than the stated size, scaled up: line 3 to line 6"]


def test_a_picture_too_long_and_thin_for_a_stated_size(tmp_path: Path) -> None:
    pictures(tmp_path, "line.png", size=(20000, 1))
    pictures(tmp_path, "a.png")
    (fault,) = faults(csv(tmp_path, "a.png", "line.png"), resolution="512x512")
    assert fault == (
        "3: image 'line.png' is 20000x1, which would be scaled to 10240000x512 and cropped to 512x512; "
        "cut the picture, or raise --max-image-pixels"
    )


@pytest.mark.parametrize("text", ["1024x768", " 1024 X 768 ", "1024*768", "1024×768"])
def test_resolution(text: str) -> None:
    assert stated_size(DataOptions(resolution=text), 16) == (1024, 768)


def test_width_and_height_are_the_same_option() -> None:
    assert stated_size(DataOptions(width=64, height=96), 16) == (64, 96)
    assert stated_size(DataOptions(width=64, height=96, resolution="64x96"), 16) == (64, 96)
    assert stated_size(DataOptions(), 16) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": "512"}, "--resolution '512' is no size; write WxH, for instance 1024x768"),
        ({"resolution": "64x64x3"}, "--resolution '64x64x3' is no size; write WxH, for instance 1024x768"),
        ({"resolution": "-64x64"}, "--resolution '-64x64' is no size; write WxH, for instance 1024x768"),
        ({"width": 64}, "--width and --height go together; one of them is missing"),
        ({"height": 64, "resolution": "64x64"}, "--width and --height go together; one of them is missing"),
        (
            {"resolution": "64x96", "width": 96, "height": 64},
            "--resolution 64x96 contradicts --width 96 --height 64",
        ),
        (
            {"resolution": "100x64"},
            "--resolution 100x64: the sides must be multiples of 16; the nearest: 96x64 or 112x64",
        ),
        (
            {"resolution": "0x8"},
            "--resolution 0x8: the sides must be multiples of 16; the nearest: 16x16",
        ),
        (
            {"width": 100, "height": 50},
            "--width 100 --height 50: the sides must be multiples of 16; the nearest: 96x48 or 112x64",
        ),
        ({"max_pixels": 255}, "--max-pixels 255 is less than 16x16"),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        stated_size(DataOptions(**options), 16)
    assert str(raised.value) == message


def test_options_are_judged_before_the_data_is_read() -> None:
    with pytest.raises(UsageError, match="multiples of 16"):
        read(Path("no/such/metadata.csv"), resolution="100x100")
