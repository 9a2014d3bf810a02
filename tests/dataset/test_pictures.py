"""Pictures that cannot be used, found without decoding where that is enough (cases D04, D08)."""

from __future__ import annotations

import warnings
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, features

from dsplit.dataset.faults import Refusal
from dsplit.dataset.images import open_image, pillow
from dsplit.dataset.pictures import inspect
from dsplit.errors import DataError
from tests import tiny
from tests.dataset.make import chunk, faults, metadata, pictures, png, read

FORMATS = [
    ("PNG", {}), ("JPEG", {"quality": 90}), ("JPEG", {"progressive": True}), ("GIF", {}), ("WEBP", {}), ("BMP", {}),
    ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("PPM", {}),
    *([("AVIF", {})] if features.check("avif") else []), *([("JPEG2000", {})] if features.check("jpg_2000") else []),
]  # fmt: skip


def look(path: Path, *, whole: bool) -> str:
    """The reason for refusal, or the size."""
    with pillow():
        try:
            return str(inspect(path, 10**6, whole=whole).size)
        except Refusal as refusal:
            return refusal.reason


def encoded(folder: Path, format: str, options: dict) -> bytes:
    buffer = BytesIO()
    Image.open(tiny.picture(folder / "source.png", (96, 64))).save(buffer, format, **options)
    return buffer.getvalue()


def folder_of_case_d04(folder: Path) -> Path:
    pictures(folder, "ok.png", "whole.jpg")
    whole = (folder / "whole.jpg").read_bytes()
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) * 6 // 10])
    (folder / "empty.png").touch()
    (folder / "page.jpg").write_text("<!DOCTYPE html>\n<html><body>404</body></html>")
    (folder / "wrongext.jpg").write_bytes((folder / "ok.png").read_bytes())
    names = ("ok.png", "truncated.jpg", "empty.png", "page.jpg", "wrongext.jpg")
    return metadata(folder, "image,prompt\n" + "".join(f"{name},x\n" for name in names))


@pytest.mark.parametrize("decode", [False, True])
def test_all_bad_files_are_named_in_one_run(tmp_path: Path, decode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder_of_case_d04(tmp_path)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    expected = [
        "3: image 'truncated.jpg': truncated: the data end before the picture does; copy it again or drop the row",
        "4: image 'empty.png' is an empty file (0 bytes); copy it again or drop the row",
        "5: image 'page.jpg': a web page (HTML), not a picture; replace the file or drop the row",
    ]
    found = faults(path, decode=decode)
    assert found == expected
    data = read(path, decode=decode, skip_bad=True)
    assert [(r.columns["image"], r.line) for r in data.rows] == [("ok.png", 2), ("wrongext.jpg", 6)]
    assert [str(p) for p in data.skipped] == [f"{path}:{fault}" for fault in expected]


@pytest.mark.parametrize(("format", "options"), FORMATS)
def test_a_file_cut_anywhere_is_found_without_and_with_decoding(tmp_path: Path, format: str, options: dict) -> None:
    data = encoded(tmp_path, format, options)
    path = tmp_path / "cut"
    path.write_bytes(data)
    assert [look(path, whole=whole) for whole in (False, True)] == ["(96, 64)"] * 2
    for length in {*range(1, len(data) - 20, len(data) // 12), len(data) - 20}:
        path.write_bytes(data[:length])
        reasons = [look(path, whole=whole) for whole in (False, True)]
        assert reasons[0] in ("truncated", "corrupt", "not a picture"), length
        assert reasons[0] == reasons[1], length


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP"])
def test_bytes_after_the_picture_do_no_harm(tmp_path: Path, format: str) -> None:
    path = tmp_path / "long"
    path.write_bytes(encoded(tmp_path, format, {}) + b"\0" * 3000)
    assert [look(path, whole=whole) for whole in (False, True)] == ["(96, 64)"] * 2


def test_the_header_check_does_not_decode(tmp_path: Path) -> None:
    """Damaged pixels between a sound header and a sound end: only decoding can know."""
    path = tmp_path / "damaged.png"
    pixels = zlib.compress(bytes(193) * 64)
    path.write_bytes(png((64, 64), 8, 2, [bytes(192)] * 64).replace(pixels, pixels[:4] + bytes(len(pixels) - 4)))
    assert look(path, whole=False) == "(64, 64)"
    assert look(path, whole=True) == "truncated"
    csv = metadata(tmp_path, "image,prompt\ndamaged.png,x\n")
    assert read(csv).rows[0].image_size == (64, 64)
    (fault,) = faults(csv, decode=True)
    assert fault.startswith("2: image 'damaged.png': ")


def test_decoding_compares_the_checksums_of_a_png(tmp_path: Path) -> None:
    path = tmp_path / "flipped.png"
    stored = zlib.compress(b"".join(b"\0" + bytes(range(16)) for _ in range(16)), 0)
    good = chunk(b"IDAT", stored)
    flipped = stored[:50] + bytes([stored[50] ^ 1]) + stored[51:]
    data = png((16, 16), 8, 0, [bytes(range(16))] * 16)
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    path.write_bytes(data[:start] + good + data[end:])
    assert look(path, whole=True) == "(16, 16)"
    path.write_bytes(data[:start] + good.replace(stored, flipped) + data[end:])
    assert look(path, whole=True) == "corrupt"


@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 7, 8])
@pytest.mark.parametrize(("format", "options"), [("JPEG", {}), ("PNG", {}), ("WEBP", {}), ("TIFF", {})])
def test_the_size_is_that_of_the_upright_picture(tmp_path: Path, format: str, options: dict, orientation: int) -> None:
    block = Image.Exif()
    block[0x0112] = orientation
    (path := tmp_path / "p").write_bytes(encoded(tmp_path, format, {**options, "exif": block}))
    shown = open_image(path).size
    assert shown == ((64, 96) if orientation >= 5 else (96, 64))
    assert [look(path, whole=whole) for whole in (False, True)] == [str(shown)] * 2


@pytest.mark.parametrize("late", ["eXIf", "zTXt", "iTXt"])
def test_the_size_of_a_png_that_states_its_orientation_elsewhere(tmp_path: Path, late: str) -> None:
    block = Image.Exif()
    block[0x0112] = 6
    exif, xmp = block.tobytes(), b'<x tiff:Orientation="6"/>'
    after = {
        "eXIf": chunk(b"eXIf", exif[6:]),
        "zTXt": chunk(
            b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(f"\nexif\n{len(exif)}\n{exif.hex()}\n".encode())
        ),
        "iTXt": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
    }[late]
    (path := tmp_path / "p.png").write_bytes(png((3, 2), 8, 0, [b"abc", b"def"], after=after))
    assert open_image(path).size == (2, 3)
    assert [look(path, whole=whole) for whole in (False, True)] == ["(2, 3)"] * 2


def test_things_that_are_no_pictures(tmp_path: Path) -> None:
    pictures(tmp_path, "ok.png")
    (tmp_path / "lfs.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    (tmp_path / "text.png").write_text("a dog")
    (tmp_path / "vector.svg").write_text("<svg></svg>")
    (tmp_path / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n")
    names = ("ok.png", "lfs.png", "text.png", "vector.svg", "page.eps")
    found = faults(metadata(tmp_path, "image,prompt\n" + "".join(f"{n},x\n" for n in names)))
    known = "AVIF, BMP, GIF, JPEG, JPEG2000, PNG, PPM, TIFF, WEBP"
    assert [f.split(";")[0] for f in found] == [
        "3: image 'lfs.png': a Git-LFS pointer, not the picture itself",
        f"4: image 'text.png': not a picture that can be read ({known})",
        f"5: image 'vector.svg': not a picture that can be read ({known})",
        f"6: image 'page.eps': not a picture that can be read ({known})",
    ]


def one_bit(path: Path, width: int, height: int) -> None:
    """A huge 1-bit PNG, small on disk."""
    path.write_bytes(png((width, height), 1, 0, [bytes((width + 7) // 8)] * height))


def test_too_many_pixels(tmp_path: Path) -> None:
    pictures(tmp_path, "ok.png")
    one_bit(tmp_path / "bomb.png", 14000, 13000)
    one_bit(tmp_path / "warn.png", 10000, 9000)
    path = metadata(tmp_path, "image,prompt\nok.png,x\nbomb.png,x\nwarn.png,x\nwarn.png,y\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert faults(path) == [
            "3: image 'bomb.png': 14000x13000 is 182000000 pixels, above the limit of 178956970; "
            "make it smaller, or raise --max-image-pixels"
        ]
        data = read(path, skip_bad=True)
        raised = read(path, max_image_pixels=182000000)
    assert [w.what for w in data.warnings] == ["more than 89478485 pixels, decoding needs much memory: line 4, line 5"]
    assert [r.image_size for r in raised.rows] == [(64, 64), (14000, 13000), (10000, 9000), (10000, 9000)]
    assert faults(path, max_image_pixels=4095)[0].startswith("2: image 'ok.png': 64x64 is 4096 pixels, above the limit")


def test_a_decoded_huge_picture_gives_one_notice(tmp_path: Path) -> None:
    one_bit(tmp_path / "warn.png", 10000, 9000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = read(metadata(tmp_path, "image,prompt\nwarn.png,x\n"), decode=True)
    assert [w.what for w in data.warnings] == ["more than 89478485 pixels, decoding needs much memory: line 2"]


def test_animations_are_warned_of_once(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    for name in ("a.gif", "b.png", "c.webp", "d.tif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "e.jpg", "MPO", save_all=True, append_images=frames[1:])  # a preview, as phones add
    frames[0].save(tmp_path / "f.gif")
    names = ("f.gif", "a.gif", "b.png", "c.webp", "d.tif", "e.jpg")
    for decode in (False, True):
        data = read(metadata(tmp_path, "image,prompt\n" + "".join(f"{n},x\n" for n in names)), decode=decode)
        assert [w.what for w in data.warnings] == ["more than one frame, the first is used: line 3 to line 6"]
        assert len(data.rows) == 6


def test_rare_modes_are_judged_at_once_and_not_in_stage_1(tmp_path: Path) -> None:
    Image.fromarray(np.full((64, 64), -1.0, np.float32)).save(tmp_path / "negative.tif")
    Image.fromarray(np.full((64, 64), 0.5, np.float32)).save(tmp_path / "half.tif")
    path = metadata(tmp_path, "image,prompt\nhalf.tif,x\nnegative.tif,x\n")
    (fault,) = faults(path)
    assert fault.startswith("3: image 'negative.tif': its values go from -1 to -1, a range without a meaning")


def test_a_file_in_many_rows_is_a_fault_of_each(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("no")
    with pytest.raises(DataError) as raised:
        read(metadata(tmp_path, "image,prompt\nbad.png,x\nbad.png,y\nno.png,z\n"), skip_bad=True)
    assert str(raised.value).startswith(f"0 usable rows in '{tmp_path}/metadata.csv' ")
    assert "(3 of 3 rows have faults: 2 not a picture, 1 file not found)" in str(raised.value)
    assert len(raised.value.problems) == 3
