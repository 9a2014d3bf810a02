"""Units that several families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplit.units import unit

if TYPE_CHECKING:
    from pathlib import Path

    import torch


@unit(outputs="pixels", version=1, shapes={"pixels": "3, H, W"}, dtypes={"pixels": "float32"})
def load_image(image: list[Path], size: list[tuple[int, int]]) -> torch.Tensor:
    """image: B files, size: B times (W, H) -> pixels: (B, 3, H, W) in [-1, 1], upright, on white, cropped."""
    import torch

    from dsplit.dataset.images import pixels

    return torch.stack([torch.from_numpy(pixels(path, wh)) for path, wh in zip(image, size, strict=True)])
