"""Tiny checkpoints of the real classes and small data sets, for tests."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

import dsplit

QWEN_IMAGE = Path(dsplit.__file__).parent / "demo" / "model"  # read-only; copy it before changing it


def qwen_image(folder: Path) -> Path:
    """A copy of the tiny Qwen-Image at `folder`, to change at will."""
    shutil.copytree(QWEN_IMAGE, folder)
    return folder


def picture(path: Path, size: tuple[int, int] = (64, 64), seed: int = 0) -> Path:
    """A picture of 8x8 coloured blocks drawn from `seed`, scaled to `size` (W, H)."""
    blocks = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).save(path)
    return path


def dataset(
    folder: Path,
    count: int = 3,
    *,
    sizes: Sequence[tuple[int, int]] = ((64, 64),),
    prompts: Sequence[str] | None = None,
    **columns: Sequence[object],
) -> Path:
    """`folder/metadata.csv` with `count` rows and their pictures; sizes are taken in turn, extra columns as given."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = prompts or [f"a large red circle number {i}" for i in range(count)]
    metadata = folder / "metadata.csv"
    with metadata.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "prompt", *columns])
        for i in range(count):
            picture(folder / f"img{i:02}.png", sizes[i % len(sizes)], seed=i)
            writer.writerow([f"img{i:02}.png", prompts[i % len(prompts)], *(values[i] for values in columns.values())])
    return metadata
