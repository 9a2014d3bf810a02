"""Opens pictures as they are meant to look: upright, on white, in 8-bit RGB; scales and crops them.

Pillow's own switches never decide: a half file is an error whatever LOAD_TRUNCATED_IMAGES says, and the limit of
pixels is --max-image-pixels.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from dsplit.dataset.faults import Refusal
from dsplit.dataset.packed import Source
from dsplit.dataset.rows import View
from dsplit.dataset.sizes import scaled_size, target_size
from dsplit.dataset.views import views_of

__all__ = ["decode", "open_header", "open_image", "orientation", "pillow", "pixels", "resize_and_crop", "target_size"]

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")  # none that runs another program
ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_lock = threading.Lock()
_users = 0
_restore = ExitStack()


def open_image(path: Source, max_image_pixels: int | None = None) -> Image.Image:
    """The picture in 8-bit RGB: EXIF orientation applied, transparency on white, 16-bit and float values scaled.

    The first frame of an animation. max_image_pixels: None for no limit (rows were checked when they were read).
    Raises Refusal (a DataError) naming the file.
    """
    try:
        with pillow(), path.open("rb") as file:
            return decode(file, max_image_pixels)
    except Refusal as refusal:
        raise Refusal(refusal.reason, f"{path}: {refusal.what}", refusal.remedy) from refusal
    except OSError as error:
        raise Refusal("unreadable file", f"{path}: cannot be read: {error.strerror}") from error


def resize_and_crop(image: Image.Image, size: tuple[int, int], view: View | None = None) -> Image.Image:
    """The picture scaled (bilinear) until it covers `size` (W, H), and the window of `view` cut out; None: its centre.

    The centre equals torchvision's `resize` to `scaled_size` followed by `center_crop`, as the reference does.
    """
    original, scaled = image.size, scaled_size(image.size, size)
    if scaled != image.size:
        image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top, flip = view or views_of(original, size)[0]
    if scaled != size:
        image = image.crop((left, top, left + size[0], top + size[1]))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else image


def pixels(path: Source, size: tuple[int, int], view: View | None = None) -> np.ndarray:
    """The window `view` (None: the centred one) of the picture at `path`, scaled to cover `size` (W, H).

    float32 (3, H, W) in [-1, 1]: `uint8 / 127.5 - 1`. Raises Refusal.
    """
    image = resize_and_crop(open_image(path), size, view)
    channels_first = np.asarray(image, dtype=np.float32).transpose(2, 0, 1)
    return np.ascontiguousarray(channels_first / np.float32(127.5) - np.float32(1))


@contextmanager
def pillow() -> Iterator[None]:
    """Within it, Pillow refuses half files, has no pixel limit of its own (ours is stated in words) and is silent.

    These settings are global in Pillow: they are put back when the last of several threads leaves.
    """
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _restore.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            _restore.callback(setattr, ImageFile, "LOAD_TRUNCATED_IMAGES", ImageFile.LOAD_TRUNCATED_IMAGES)
            _restore.enter_context(warnings.catch_warnings())
            Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False
            warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _restore.close()


def open_header(file: IO[bytes], max_image_pixels: int | None) -> Image.Image:
    """The picture in `file` with only its header read, so that its pixels can still be refused. Raises Refusal."""
    try:
        image = Image.open(file, formats=_formats())
    except UnidentifiedImageError as error:
        raise Refusal("not a picture", _what_it_is(file), "replace the file or drop the row") from error
    except Exception as error:  # Pillow's parsers raise anything on damaged files
        raise _undecodable(error) from error
    width, height = image.size
    if max_image_pixels is not None and width * height > max_image_pixels:
        what = f"{width}x{height} is {width * height} pixels, above the limit of {max_image_pixels}"
        raise Refusal("too many pixels", what, "make it smaller, or raise --max-image-pixels")
    return image


def decode(file: IO[bytes], max_image_pixels: int | None) -> Image.Image:
    """The picture in `file`, wholly decoded, as open_image gives it. Raises Refusal."""
    image = open_header(file, max_image_pixels)
    tile = getattr(image, "tile", None)
    raw_mode = str(tile[0][3]) if image.format == "PNG" and tile else ""
    try:
        image.load()
        turn = UPRIGHT.get(orientation(image))  # only now: a PNG may state it after its pixels
        image = _rgb(image, raw_mode)
    except Refusal:
        raise
    except Exception as error:  # Pillow's decoders raise anything on damaged files
        raise _undecodable(error) from error
    return image if turn is None else image.transpose(turn)


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none or the EXIF block is damaged."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # a damaged EXIF block must not cost the picture
        return 1
    return value if value in UPRIGHT else 1


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _rgb(image: Image.Image, raw_mode: str) -> Image.Image:
    """The decoded `image` in RGB. raw_mode: how a PNG stores its pixels, which its tRNS colour refers to."""
    clear = image.info.get("transparency")
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        grey = Image.fromarray(_eight_bits(values, image.mode, image.format))
        if clear is None:
            return grey.convert("RGB")
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
        return _on_white(grey)
    if clear is not None or image.has_transparency_data:
        if clear is not None and raw_mode in (
            "L;2",
            "L;4",
        ):  # Pillow widens the pixels to 8 bits, but not the transparent value
            image.info["transparency"] = clear * (85 if raw_mode == "L;2" else 17)
        elif clear is not None and raw_mode == "RGB;16B":  # here it keeps the high byte of the pixels only
            image.info["transparency"] = tuple(value >> 8 for value in clear)
        return _on_white(image)
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _eight_bits(values: np.ndarray, mode: str, format: str | None) -> np.ndarray:
    """Grey values as uint8: 16-bit ones divided by 257, float ones times 255.

    A 32-bit or float picture does not state its range: it is the smallest of 0..1 (float only), 0..255 and 0..65535
    that holds all values. Raises Refusal for other values.
    """
    if mode.startswith("I;16") or format == "PNG":  # older Pillow opens a 16-bit PNG as I
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 65535):  # also for NaN
        remedy = "save it with 8 or 16 bits per channel"
        raise Refusal("unknown range", f"its values go from {low:g} to {high:g}, a range without a meaning", remedy)
    scale = 255.0 if mode == "F" and high <= 1 else 1.0 if high <= 255 else 1 / 257
    return np.rint(values * scale).astype(np.uint8)


def _what_it_is(file: IO[bytes]) -> str:
    file.seek(0)
    start = file.read(512).lstrip()
    if start.startswith(b"version https://git-lfs"):
        return "a Git-LFS pointer, not the picture itself"
    if start[:1] == b"<" and b"html" in start.lower():
        return "a web page (HTML), not a picture"
    return f"not a picture that can be read ({', '.join(FORMATS)})"


def _undecodable(error: Exception) -> Refusal:
    words = str(error) or type(error).__name__
    if "truncated" in words.lower():
        return Refusal("truncated", "truncated: the data end before the picture does", "copy it again or drop the row")
    return Refusal("corrupt", f"cannot be decoded ({words})", "replace the file or drop the row")
