"""Draws the style set of the demo: `python tools/make_demo_data.py dsplit/demo/data`.

48 pictures in the style "ink": coloured shapes with a thick black contour on white paper. The captions name a coloured
background, as the demo's model knows it; that the paper stays white all the same is what a LoRA has to learn.
"""

from __future__ import annotations

import csv
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

Point = tuple[float, float]
Color = tuple[int, int, int]

COLORS: dict[str, Color] = {  # the colours that the demo's model was taught
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (45, 80, 220),
    "yellow": (245, 215, 50),
    "orange": (245, 140, 30),
    "purple": (140, 60, 180),
    "pink": (250, 150, 190),
    "cyan": (60, 205, 215),
    "white": (245, 245, 245),
    "black": (25, 25, 25),
}
PAPER, INK = COLORS["white"], COLORS["black"]
RADIUS = {"large": 0.34, "small": 0.2}  # of the picture's side
SIZE, OVERSAMPLING = 64, 8
CONTOUR = 0.06  # of the picture's side
PICTURES, SEED = 48, 1


def polar(corners: int, radius: Callable[[int], float], turn: float = 0.0) -> list[Point]:
    """`corners` points around the origin, clockwise from the top, corner k at distance `radius(k)`."""
    angles = [turn + 2 * math.pi * k / corners for k in range(corners)]
    return [(radius(k) * math.sin(a), -radius(k) * math.cos(a)) for k, a in enumerate(angles)]


def cross(arm: float = 1.0, half_width: float = 0.36) -> list[Point]:
    """A plus sign with arms of length `arm`."""
    quarter = [(half_width, -arm), (half_width, -half_width), (arm, -half_width)]
    points: list[Point] = []
    for _ in range(4):
        points += quarter
        quarter = [(-y, x) for x, y in quarter]
    return points


def heart(corners: int = 60) -> list[Point]:
    """The well-known heart curve, moved so that it is centred, scaled to half-width 1."""
    points = []
    for k in range(corners):
        t = 2 * math.pi * k / corners
        height = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((math.sin(t) ** 3, -(height + 2) / 16))
    return points


SHAPES: dict[str, list[Point]] = {  # outlines around the origin, clockwise, y downwards, radius about 1
    "circle": polar(60, lambda k: 1.0),
    "square": polar(4, lambda k: 1.22, math.pi / 4),
    "triangle": [(0.0, -1.0), (0.95, 0.75), (-0.95, 0.75)],
    "star": polar(10, lambda k: 0.45 if k % 2 else 1.08),
    "cross": cross(),
    "heart": heart(),
}


def draw(shape: str, color: str, size: str, centre: Point = (0.5, 0.5)) -> Image.Image:
    """A 64x64 RGB picture of one shape in the style "ink"; `centre` in fractions of the side."""
    side = SIZE * OVERSAMPLING
    picture = Image.new("RGB", (side, side), PAPER)
    pen = ImageDraw.Draw(picture)
    x, y, radius = side * centre[0], side * centre[1], side * RADIUS[size]
    outline = [(x + radius * dx, y + radius * dy) for dx, dy in SHAPES[shape]]
    pen.polygon(outline, fill=COLORS[color])
    pen.line([*outline, *outline[:2]], fill=INK, width=round(side * CONTOUR), joint="curve")
    return picture.resize((SIZE, SIZE), Image.Resampling.BOX)


def scenes(count: int) -> list[tuple[str, str, str, str]]:
    """`count` distinct (size, colour, shape, background): all shapes, colours and backgrounds about equally often."""
    shapes, colors = list(SHAPES), list(COLORS)
    found = []
    for k in range(count):
        turn, shape = divmod(k, len(shapes))
        color = (k + turn) % len(colors)
        background = (color + 1 + turn % (len(colors) - 1)) % len(colors)  # never the shape's own colour
        found.append(("small" if turn % 4 == 0 else "large", colors[color], shapes[shape], colors[background]))
    return found


def main(folder: Path) -> None:
    """Writes the pictures and `metadata.csv` (image, prompt) below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = random.Random(SEED)
    with (folder / "metadata.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["image", "prompt"])
        for k, (size, color, shape, background) in enumerate(scenes(PICTURES)):
            centre = (0.5 + draws.uniform(-0.03, 0.03), 0.5 + draws.uniform(-0.03, 0.03))
            name = f"ink-{k:02}.png"
            draw(shape, color, size, centre).save(folder / name, optimize=True)
            table.writerow([name, f"a {size} {color} {shape} on a {background} background"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
