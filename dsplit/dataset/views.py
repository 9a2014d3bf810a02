"""The windows of a picture that --crops and --flip make of it: each is encoded, one is drawn at each visit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from dsplit.dataset.rows import View
from dsplit.dataset.sizes import Size, scaled_size
from dsplit.errors import UsageError
from dsplit.recipe import DataOptions


@functools.lru_cache(maxsize=4096)
def views_of(image_size: Size, size: Size, crops: int = 1, flip: bool = False) -> tuple[View, ...]:
    """The distinct windows of `size` (W, H) in a picture scaled to cover it; one of them: the centred one.

    Several lie evenly from one end to the other of what the crop leaves over; the mirrored ones come last.
    """
    slack = [has - wants for has, wants in zip(scaled_size(image_size, size), size, strict=True)]
    shares = [k / (crops - 1) for k in range(crops)] if crops > 1 else [0.5]
    corners = list(dict.fromkeys((round(slack[0] * share), round(slack[1] * share)) for share in shares))
    mirrored = (False, True) if flip else (False,)
    return tuple(View(left, top, mirror) for mirror in mirrored for left, top in corners)


def refuse_variants(family: str, allowed: Sequence[str], options: DataOptions) -> None:
    """Raises UsageError if the options ask for variants of pictures that the family cannot have."""
    asked = {"flip": options.flip, "crops": options.crops > 1}
    for name, wanted in asked.items():
        if wanted and name not in allowed:
            raise UsageError(f"--{name}: {family} does not allow it, since a row's pictures must stay as they are")
