"""Letters for the grid: Pillow's own, or those of a font of this machine where Pillow's lack some."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

ABSENT = "\U0010ffff"  # no font has it: it shows how a font draws what it lacks
ODD = ("bold", "black", "light", "thin", "italic", "oblique", "condensed", "narrow", "mono", "serif")


def font(size: int) -> Font:
    """Pillow's own font, so that a grid looks the same on every machine wherever it can."""
    return ImageFont.load_default(size)


@lru_cache(maxsize=1024)
def font_for(text: str, size: int) -> Font | None:
    """A font that has every letter of `text`: Pillow's own, else one of this machine; None where there is none."""
    if covers(font(size), text):
        return font(size)
    for path in machine_fonts():
        try:
            found = ImageFont.truetype(path, size)
        except OSError:  # a broken file, or a format that is not for Pillow
            continue
        if covers(found, text):
            return found
    return None


def covers(letters: Font, text: str) -> bool:
    """True if the font has every letter of `text`."""
    nothing = _drawn(letters, ABSENT)
    return all(_drawn(letters, c) != nothing for c in dict.fromkeys(text) if not c.isspace())


def readable(text: str, size: int) -> tuple[str, Font]:
    r"""`text` and a font for it; where no font has its letters, those beyond ASCII become escapes (`\u732b`)."""
    found = font_for(text, size)
    return (text, found) if found else (text.encode("ascii", "backslashreplace").decode(), font(size))


def wrap(text: str, letters: Font, width: int) -> list[str]:
    """`text` in lines of at most `width` pixels, broken at spaces, within a word only where it is too wide."""
    lines = [""]
    for word in text.split():
        candidate = f"{lines[-1]} {word}".strip()
        if letters.getlength(candidate) <= width:
            lines[-1] = candidate
            continue
        if lines[-1]:
            lines.append("")
        for letter in word:
            if letters.getlength(lines[-1] + letter) > width:
                lines.append("")
            lines[-1] += letter
    return lines


def wrap_short(text: str, end: str, letters: Font, width: int, most: int) -> list[str]:
    """`text` and then `end` in at most `most` lines; what does not fit is left out, with `...` in its place."""
    lines = wrap(f"{text}{end}", letters, width)
    if len(lines) <= most:
        return lines
    kept = lines[:most]
    while letters.getlength(f"{kept[-1]} ...{end}") > width and kept[-1]:
        kept[-1] = kept[-1][:-1].rstrip()
    return [*kept[:-1], f"{kept[-1]} ...{end}".strip()]


@lru_cache(maxsize=1)
def machine_fonts() -> tuple[str, ...]:
    """The font files of this machine, and those that come with matplotlib; plain upright ones first."""
    return tuple(sorted(_found(), key=_rank))


def _found() -> Iterator[str]:
    from matplotlib import get_data_path
    from matplotlib.font_manager import findSystemFonts

    yield from findSystemFonts()  # looks anew: a font that was installed after a first grid counts
    bundled = Path(get_data_path(), "fonts", "ttf").glob("DejaVu*.ttf")  # not LastResort, which draws boxes for all
    yield from map(str, bundled)


def _rank(path: str) -> tuple[int, str, str]:
    name = Path(path).stem.lower()
    return sum(word in name for word in ODD) - ("sans" in name), name, path


def _drawn(letters: Font, letter: str) -> tuple[tuple[int, int], bytes]:
    mask = letters.getmask(letter)
    return mask.size, bytes(mask)
