"""Checks a picture without decoding it where its end-of-file mark vouches for it, by decoding it where not."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import IO

from PIL import Image

from dsplit.dataset.faults import Refusal
from dsplit.dataset.images import decode, open_header, orientation
from dsplit.dataset.packed import Source

ANIMATED = frozenset(("AVIF", "GIF", "PNG", "TIFF", "WEBP"))  # an MPO's further frames are previews
COMMON_MODES = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B", "I;16L"))


@dataclass(frozen=True)
class Picture:
    """size: W, H as shown (EXIF applied). animated: it has more than one frame or page, the first of which is used."""

    size: tuple[int, int]
    animated: bool


def inspect(path: Source, max_image_pixels: int, *, whole: bool = False) -> Picture:
    """The picture at `path`; call it within `images.pillow()`.

    whole: decode it and verify its checksums. Otherwise the header and the mark at the end of the file are read, and
    only a picture without such a mark is decoded. Raises Refusal.
    """
    try:
        with path.open("rb") as file:
            image = open_header(file, max_image_pixels)
            size, animated = image.size, image.format in ANIMATED and _is_animated(image)
            if not whole and image.mode in COMMON_MODES and _vouched(file, image):
                turned = image.format != "PNG" or "exif" in image.info
                return Picture(size[::-1] if turned and orientation(image) >= 5 else size, animated)
            file.seek(0)
            size = decode(file, max_image_pixels).size
            if image.format == "PNG":
                file.seek(0)
                _verify(file)
            return Picture(size, animated)
    except OSError as error:
        raise Refusal(
            "unreadable file", f"cannot be read: {error.strerror}", "copy it again or drop the row"
        ) from error


def _is_animated(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # a damaged second frame does not matter: the first is used
        return True


def _verify(file: IO[bytes]) -> None:
    """Compares the checksums that a PNG carries, which decoding alone does not."""
    try:
        Image.open(file).verify()
    except Exception as error:  # Pillow raises anything on damaged files
        raise Refusal("corrupt", f"damaged ({error})", "replace the file or drop the row") from error


def _vouched(file: IO[bytes], image: Image.Image) -> bool:
    """True if the end of the file shows that the picture is whole, and its header tells all about it."""
    position = file.tell()
    length = file.seek(0, os.SEEK_END)
    try:
        match image.format:
            case "JPEG" | "MPO":
                file.seek(max(length - 2, 0))
                return file.read(2) == b"\xff\xd9"
            case "GIF":
                file.seek(max(length - 1, 0))
                return file.read(1) == b"\x3b"
            case "WEBP":
                file.seek(4)
                return 8 + int.from_bytes(file.read(4), "little") <= length
            case "PNG":
                return _png_vouched(file, length)
        return False
    finally:
        file.seek(position)


def _png_vouched(file: IO[bytes], length: int) -> bool:
    """True if the chunks go on to IEND and no EXIF or XMP block follows the pixels or hides in a text chunk."""
    position, pixels = 8, False
    while position + 12 <= length:
        file.seek(position)
        size, kind = struct.unpack(">I4s", file.read(8))
        if kind == b"IEND":
            return True
        if kind == b"eXIf" and pixels:
            return False
        if kind in (b"tEXt", b"zTXt", b"iTXt") and file.read(min(size, 21)).startswith((b"Raw prof", b"XML:com.adobe")):
            return False
        pixels = pixels or kind == b"IDAT"
        position += 12 + size
    return False
