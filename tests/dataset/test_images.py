"""What a picture looks like to the model: orientation, transparency, depth, colour, scaling (cases D01, D09)."""

from __future__ import annotations

import struct
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from dsplit.dataset.images import open_image, pillow, pixels, resize_and_crop
from dsplit.errors import DataError
from tests import tiny
from tests.dataset.make import chunk, png

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
UPRIGHT = np.array([[[10, 20, 30], [40, 50, 60], [70, 80, 90]], [[15, 25, 35], [45, 55, 65], [75, 85, 95]]], np.uint8)
STORED = {  # how a camera stores UPRIGHT under each EXIF orientation (TIFF 6.0, tag 274)
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: UPRIGHT.transpose(1, 0, 2)[::-1],
    7: UPRIGHT.transpose(1, 0, 2)[::-1, ::-1],
    8: UPRIGHT.transpose(1, 0, 2)[:, ::-1],
}


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


def array(path: Path) -> np.ndarray:
    image = open_image(path)
    assert image.mode == "RGB"
    return np.asarray(image)


def save(folder: Path, content: bytes | Image.Image, name: str = "p.png", **options: object) -> Path:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content.save(path, **options)
    return path


@pytest.mark.parametrize("orientation", sorted(STORED))
@pytest.mark.parametrize("name", ["p.png", "p.tif", "p.webp"])
def test_exif_orientation(tmp_path: Path, orientation: int, name: str) -> None:
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    options = {"lossless": True} if name == "p.webp" else {}
    path = save(tmp_path, image, name, exif=exif(orientation), **options)
    assert np.array_equal(array(path), UPRIGHT)


def test_exif_orientation_of_a_jpeg_equals_its_upright_twin(tmp_path: Path) -> None:
    picture = Image.open(tiny.picture(tmp_path / "plain.png", (96, 64)))
    turned = save(tmp_path, picture, "exif6.jpg", exif=exif(6))
    twin = np.rot90(np.asarray(Image.open(turned)), -1)  # orientation 6: turn clockwise to see it
    assert np.array_equal(array(turned), twin)
    assert twin.shape == (96, 64, 3)


def test_exif_that_follows_the_pixels_of_a_png(tmp_path: Path) -> None:
    rows = [row.tobytes() for row in STORED[6]]
    late = png((2, 3), 8, 2, rows, after=chunk(b"eXIf", exif(6).tobytes()[6:]))
    assert np.array_equal(array(save(tmp_path, late)), UPRIGHT)


@pytest.mark.parametrize(
    "block", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\3\0\0\0\x01\0\x09\0\0"]
)
def test_damaged_exif_does_not_cost_the_picture(tmp_path: Path, block: bytes) -> None:
    path = save(tmp_path, Image.new("RGB", (3, 2), RED), "p.jpg", exif=block)
    assert array(path).shape == (2, 3, 3)


def test_transparency_shows_white_and_never_hidden_colours(tmp_path: Path) -> None:
    pixels_ = np.array([[[0, 0, 255, 255], [255, 0, 0, 0], [255, 0, 0, 128]]], np.uint8)
    rgba = array(save(tmp_path, Image.fromarray(pixels_)))
    assert rgba.tolist() == [[list(BLUE), list(WHITE), [255, 127, 127]]]
    la = Image.fromarray(np.array([[[80, 255], [80, 0]]], np.uint8), "LA")
    assert array(save(tmp_path, la)).tolist() == [[[80] * 3, list(WHITE)]]


def test_transparency_of_palettes(tmp_path: Path) -> None:
    palette = chunk(b"PLTE", bytes((*BLUE, *RED, 0, 128, 0)))
    for alpha, shown in ((b"\xff\0", [BLUE, WHITE, (0, 128, 0)]), (b"\xff\x80", [BLUE, (255, 127, 127), (0, 128, 0)])):
        path = save(tmp_path, png((3, 1), 8, 3, [b"\0\1\2"], palette, chunk(b"tRNS", alpha)))
        assert array(path).tolist() == [[list(colour) for colour in shown]]
    gif = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    gif.putpalette((*BLUE, *RED))
    assert array(save(tmp_path, gif, "p.gif", transparency=1)).tolist() == [[list(BLUE), list(WHITE)]]


@pytest.mark.parametrize(
    ("depth", "kind", "row", "clear", "shown"),
    [
        (1, 0, b"\x80", (1,), [255, 0]),
        (1, 0, b"\x80", (0,), [255, 255]),
        (2, 0, bytes([0b01100000]), (1,), [255, 170]),
        (4, 0, b"\x5a", (5,), [255, 170]),
        (8, 0, b"\x05\x5a", (5,), [255, 90]),
        (16, 0, struct.pack(">2H", 500, 40000), (500,), [255, 156]),
        (8, 2, bytes([1, 1, 1, 4, 4, 4]), (1, 1, 1), [255, 4]),
        (16, 2, struct.pack(">6H", 800, 800, 800, 40000, 40000, 40000), (800, 800, 800), [255, 156]),
    ],
)
def test_the_transparent_colour_of_pictures_without_alpha(
    tmp_path: Path, depth: int, kind: int, row: bytes, clear: tuple[int, ...], shown: list[int]
) -> None:
    data = png((2, 1), depth, kind, [row], chunk(b"tRNS", struct.pack(f">{len(clear)}H", *clear)))
    assert array(save(tmp_path, data)).tolist() == [[[value] * 3 for value in shown]]


def test_16_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    eight = np.arange(256, dtype=np.uint16).reshape(16, 16)
    grey = array(save(tmp_path, Image.fromarray(eight * 257)))
    assert np.array_equal(grey, np.repeat(eight[..., None], 3, 2))
    assert np.array_equal(array(save(tmp_path, Image.fromarray(eight * 257), "p.tif")), grey)
    swapped = save(tmp_path, tiff_16_bit_big_endian(eight * 257), "be.tif")
    assert np.array_equal(array(swapped), grey)
    colour = png((2, 1), 16, 2, [struct.pack(">6H", 0, 257 * 9, 65535, 257, 257 * 128, 257 * 254)])
    assert array(save(tmp_path, colour)).tolist() == [[[0, 9, 255], [1, 128, 254]]]
    alpha = png((2, 1), 16, 4, [struct.pack(">4H", 257 * 9, 65535, 257 * 9, 0)])
    assert array(save(tmp_path, alpha)).tolist() == [[[9] * 3, list(WHITE)]]


def tiff_16_bit_big_endian(values: np.ndarray) -> bytes:
    height, width = values.shape
    tags = [(256, width), (257, height), (258, 16), (259, 1), (262, 1), (273, 8), (278, height), (279, values.size * 2)]
    data = values.astype(">u2").tobytes()
    entries = b"".join(struct.pack(">HHII", tag, 4, 1, value) for tag, value in tags)
    return b"MM\0*" + struct.pack(">I", 8 + len(data)) + data + struct.pack(">H", len(tags)) + entries + b"\0" * 4


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (np.array([[0.0, 0.2, 1.0]], np.float32), [0, 51, 255]),
        (np.array([[0.0, 51.0, 255.0]], np.float32), [0, 51, 255]),
        (np.array([[0.0, 257.0 * 51, 65535.0]], np.float32), [0, 51, 255]),
        (np.array([[0, 51, 255]], np.int32), [0, 51, 255]),
        (np.array([[0, 257 * 51, 65535]], np.int32), [0, 51, 255]),
    ],
)
def test_wide_values_are_scaled_by_the_smallest_range_that_holds_them(
    tmp_path: Path, values: np.ndarray, shown: list[int]
) -> None:
    assert array(save(tmp_path, Image.fromarray(values), "p.tif")).tolist() == [[[value] * 3 for value in shown]]


@pytest.mark.parametrize(
    "values",
    [np.array([[0.0, -1.0]], np.float32), np.array([[0, 70000]], np.int32), np.array([[np.nan, 1]], np.float32)],
)
def test_values_without_a_known_range_are_refused(tmp_path: Path, values: np.ndarray) -> None:
    path = save(tmp_path, Image.fromarray(values), "p.tif")
    with pytest.raises(DataError, match=r"p\.tif: its values go from .* a range without a meaning; save it with 8"):
        open_image(path)


def test_cmyk_grey_and_one_bit(tmp_path: Path) -> None:
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red = array(save(tmp_path, cmyk, "p.jpg", quality=100))
    assert np.abs(red.astype(int) - RED).max() <= 3
    assert array(save(tmp_path, Image.new("L", (2, 1), 77))).tolist() == [[[77] * 3] * 2]
    assert array(save(tmp_path, Image.new("1", (2, 1), 1))).tolist() == [[[255] * 3] * 2]


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (BLUE, RED)]
    for name in ("p.gif", "p.png", "p.webp", "p.tif"):
        options = {"lossless": True} if name == "p.webp" else {}
        path = save(tmp_path, frames[0], name, save_all=True, append_images=frames[1:], **options)
        assert array(path).tolist() == [[list(BLUE)] * 4] * 4


def test_extensions_do_not_matter(tmp_path: Path) -> None:
    path = save(tmp_path, save(tmp_path, Image.new("RGB", (2, 2), RED)).read_bytes(), "p.jpg")
    assert array(path).tolist() == [[list(RED)] * 2] * 2


def test_errors_name_the_file(tmp_path: Path) -> None:
    tiny.picture(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    half = save(tmp_path, whole[: len(whole) * 6 // 10], "half.png")
    with pytest.raises(DataError, match=r"half\.png: truncated: the data end before the picture does"):
        open_image(half)
    with pytest.raises(DataError, match=r"a\.png: 64x64 is 4096 pixels, above the limit of 4095; .*--max-image-pixels"):
        open_image(tmp_path / "a.png", 4095)
    with pytest.raises(DataError, match=r"no\.png: cannot be read: No such file"):
        open_image(tmp_path / "no.png")


def test_pillows_switches_do_not_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.open(tiny.picture(tmp_path / "a.png"))
    whole = [save(tmp_path, image, name) for name in ("a.jpg", "b.png")]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in whole:
            assert array(path).shape == (64, 64, 3)
            data = path.read_bytes()
            half = save(tmp_path, data[: len(data) * 6 // 10], f"half-{path.name}")
            with pytest.raises(DataError, match="truncated"):
                open_image(half)
    assert (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS) == (True, 10)


def test_pillows_settings_come_back_when_the_last_thread_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 123)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with pillow():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(10)
    with pillow():
        pass
    assert Image.MAX_IMAGE_PIXELS is None
    leave.set()
    thread.join()
    assert Image.MAX_IMAGE_PIXELS == 123


def test_pixels(tmp_path: Path) -> None:
    path = save(tmp_path, Image.fromarray(UPRIGHT))
    values = pixels(path, (3, 2))
    assert (values.dtype, values.shape, values.flags["C_CONTIGUOUS"]) == (np.float32, (3, 2, 3), True)
    assert np.array_equal(values, UPRIGHT.transpose(2, 0, 1).astype(np.float32) / 127.5 - 1)
    black_white = pixels(save(tmp_path, Image.fromarray(np.array([[0, 255]], np.uint8))), (2, 1))
    assert black_white.tolist() == [[[-1.0, 1.0]]] * 3


@pytest.mark.parametrize(
    ("has", "wants"),
    [((65, 127), (64, 112)), ((17, 33), (16, 32)), ((100, 40), (32, 32)), ((40, 100), (64, 64)), ((64, 64), (64, 64)),
     ((99, 66), (48, 32)), ((31, 57), (80, 48))],
)  # fmt: skip
def test_scaling_is_the_references(tmp_path: Path, has: tuple[int, int], wants: tuple[int, int]) -> None:
    """The rule by hand: cover, bilinear with Pillow's antialiasing, centre crop rounded as torchvision does."""
    image = Image.open(tiny.picture(tmp_path / "a.png", has))
    scale = max(wants[0] / has[0], wants[1] / has[1])
    scaled = round(has[0] * scale), round(has[1] * scale)
    whole = np.asarray(image.resize(scaled, Image.Resampling.BILINEAR))
    left, top = round((scaled[0] - wants[0]) / 2.0), round((scaled[1] - wants[1]) / 2.0)
    got = resize_and_crop(image, wants)
    assert got.size == wants
    assert np.array_equal(np.asarray(got), whole[top : top + wants[1], left : left + wants[0]])
