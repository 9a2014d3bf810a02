"""The before/after grid: each prompt once without and once with the LoRA, with captions that can be read."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from dsplit.cache.files import write_file
from dsplit.errors import CacheError, DsplitError
from dsplit.validation.letters import Font, font, font_for, readable, wrap, wrap_short

SMALL, LARGE = 256, 512  # a picture is shown with its longer side between these, in pixels
WIDTH = 1680  # of a grid of several columns, at most
MARGIN, GAP, LINE = 28, 8, 22
SIZE, LINES = 17, 4  # of the letters of a caption, and its lines at most; the report shows all of it
Caption = tuple[list[str], Font]
PAGE, CARD, TEXT, FAINT = "#eceef1", "#ffffff", "#16181d", "#5f6673"


@dataclass(frozen=True)
class Pair:
    """A prompt and seed, and the files of its two pictures."""

    prompt: str
    seed: int
    base: Path
    lora: Path


def save_png(picture: Image.Image, path: Path) -> None:
    """Writes `picture` as PNG, whole or not at all; an older file of that name is replaced."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    save(buffer.getvalue(), path)


def save(content: bytes, path: Path) -> None:
    """Writes `content`, whole or not at all. Raises DsplitError with the system's reason."""
    try:
        write_file(path, [content])
    except CacheError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise DsplitError(f"{path}: cannot write it: {reason}; give another folder with --out") from error


def shown(picture: Image.Image) -> Image.Image:
    """`picture` at a size that people can look at.

    A small one grows by a whole factor with hard pixel edges, so that it shows what is there; a large one shrinks.
    """
    longest = max(picture.size)
    if longest < SMALL:
        factor = SMALL // longest
        return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    if longest > LARGE:
        picture = picture.copy()
        picture.thumbnail((LARGE, LARGE), Image.Resampling.LANCZOS)
    return picture


def grid(pairs: Sequence[Pair], title: str, subtitle: str) -> Image.Image:
    """An RGB picture of all `pairs` as cards: without the LoRA on the left, with it on the right, the prompt below.

    All pictures must have one size, which is that of the first.
    """
    tile = shown(Image.open(pairs[0].base)).size
    inner = 2 * tile[0] + GAP
    across = max(1, min(len(pairs), (WIDTH - MARGIN) // (inner + 3 * MARGIN)))
    captions = [_caption(pair, k, inner) for k, pair in enumerate(pairs, 1)]
    lines = max(len(lines) for lines, _ in captions)
    card = (inner + 2 * MARGIN, LINE + 6 + tile[1] + 12 + LINE * lines + 2 * 20)
    down = -(-len(pairs) // across)
    width = MARGIN + across * (card[0] + MARGIN)
    title, large = readable(title, 26)
    subtitle, small = readable(subtitle, SIZE)
    heading, details = wrap(title, large, width - 2 * MARGIN), wrap(subtitle, small, width - 2 * MARGIN)
    below_heading = MARGIN + 32 * len(heading) + 4
    header = below_heading + LINE * len(details) + 14
    page = Image.new("RGB", (width, header + down * (card[1] + MARGIN)), PAGE)
    pen = ImageDraw.Draw(page)
    _write(pen, (MARGIN, MARGIN - 6), heading, large, 32, TEXT)
    _write(pen, (MARGIN, below_heading), details, small, LINE, FAINT)
    for k, (pair, caption) in enumerate(zip(pairs, captions, strict=True)):
        row, column = divmod(k, across)
        corner = (MARGIN + column * (card[0] + MARGIN), header + row * (card[1] + MARGIN))
        _draw_card(page, pair, caption, corner, card, tile)
    return page


def _draw_card(
    page: Image.Image,
    pair: Pair,
    caption: Caption,
    corner: tuple[int, int],
    card: tuple[int, int],
    tile: tuple[int, int],
) -> None:
    pen = ImageDraw.Draw(page)
    x, y = corner
    pen.rounded_rectangle((x, y, x + card[0], y + card[1]), radius=10, fill=CARD)
    top = y + 20 + LINE + 6
    for side, (label, path) in enumerate((("without LoRA", pair.base), ("with LoRA", pair.lora))):
        left = x + MARGIN + side * (tile[0] + GAP)
        pen.text((left, y + 18), label, fill=FAINT, font=font(16))
        page.paste(shown(Image.open(path).convert("RGB")), (left, top))
        # a white picture on a white card needs an edge to be seen
        pen.rectangle((left - 1, top - 1, left + tile[0], top + tile[1]), outline="#d4d8de")
    _write(pen, (x + MARGIN, top + tile[1] + 12), *caption, LINE, TEXT)


def _caption(pair: Pair, number: int, width: int) -> Caption:
    """The lines below a pair, cut to LINES: one prompt of a page must not make every card as high."""
    prompt = pair.prompt if pair.prompt.strip() else "(empty prompt)"
    end = f" (seed {pair.seed})"
    letters = font_for(prompt + end, SIZE)
    if letters is None:
        prompt, letters = f"(prompt {number}: see report.html)", font(SIZE)
    return wrap_short(prompt, end, letters, width, LINES), letters


def _write(
    pen: ImageDraw.ImageDraw, corner: tuple[int, int], lines: Sequence[str], letters: Font, pitch: int, colour: str
) -> None:
    """Lines on baselines `pitch` pixels apart, whatever the height of the font."""
    for k, line in enumerate(lines):
        pen.text((corner[0], corner[1] + pitch * k + round(pitch * 0.75)), line, fill=colour, font=letters, anchor="ls")
