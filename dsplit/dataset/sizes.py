"""The size at which a picture is trained: stated by the user, or made from the picture's own."""

from __future__ import annotations

import re
from math import sqrt

from dsplit.dataset.faults import Refusal
from dsplit.errors import UsageError
from dsplit.recipe import DataOptions

Size = tuple[int, int]  # W, H


def stated_size(options: DataOptions, size_factor: int) -> Size | None:
    """The W, H of --resolution or of --width with --height; None if none is stated.

    Raises UsageError for sizes that contradict each other, that the model cannot have, and for a --max-pixels below
    the smallest possible picture.
    """
    stated: Size | None = None
    if options.resolution is not None:
        match = re.fullmatch(r"\s*(\d{1,6})\s*[xX×*]\s*(\d{1,6})\s*", options.resolution, re.ASCII)
        if not match:
            raise UsageError(f"--resolution '{options.resolution}' is no size; write WxH, for instance 1024x768")
        stated = int(match[1]), int(match[2])
    if options.width is not None or options.height is not None:
        if options.width is None or options.height is None:
            raise UsageError("--width and --height go together; one of them is missing")
        if stated not in (None, (options.width, options.height)):
            raise UsageError(
                f"--resolution {options.resolution} contradicts --width {options.width} --height {options.height}"
            )
        stated = options.width, options.height
    if stated is None and options.max_pixels is not None and options.max_pixels < size_factor**2:
        raise UsageError(f"--max-pixels {options.max_pixels} is less than {size_factor}x{size_factor}")
    if stated is not None:
        option = "--resolution {}x{}" if options.resolution is not None else "--width {} --height {}"
        _check_multiples(stated, size_factor, option.format(*stated))
    return stated


def target_size(image_size: Size, options: DataOptions, size_factor: int) -> Size:
    """The W, H at which a picture of `image_size` is trained: the stated size, else its own, scaled down to the area
    of --max-pixels and rounded down to multiples of `size_factor`. Never larger than the picture unless stated.

    Raises Refusal (a DataError) where a side would be shorter than `size_factor`.
    """
    stated = stated_size(options, size_factor)
    if stated is not None:
        return stated
    width, height = image_size
    if options.max_pixels is not None and width * height > options.max_pixels:
        scale = sqrt(width * height / options.max_pixels)
        width, height = int(width / scale), int(height / scale)
    if min(width, height) < size_factor:
        scaled = "" if (width, height) == image_size else f", which --max-pixels scales to {width}x{height}"
        what = f"{image_size[0]}x{image_size[1]}{scaled}: a side is shorter than {size_factor}, the least that fits"
        raise Refusal("too small", what, "use a larger picture, or state --resolution to scale it up")
    return width // size_factor * size_factor, height // size_factor * size_factor


def scaled_size(image_size: Size, size: Size) -> Size:
    """The W, H to which a picture is scaled before the centre crop to `size`."""
    width, height = image_size
    scale = max(size[0] / width, size[1] / height)
    return round(width * scale), round(height * scale)


def _check_multiples(size: Size, factor: int, option: str) -> None:
    if all(side > 0 and side % factor == 0 for side in size):
        return
    below = tuple(max(side // factor, 1) * factor for side in size)
    above = tuple(max(-(-side // factor), 1) * factor for side in size)
    nearest = " or ".join(dict.fromkeys(f"{w}x{h}" for w, h in (below, above)))
    raise UsageError(f"{option}: the sides must be multiples of {factor}; the nearest: {nearest}")
