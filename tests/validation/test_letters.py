"""Captions are drawn in letters that are there, in lines of the given width."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import get_data_path
from PIL import ImageFont

from dsplit.validation import letters
from dsplit.validation.letters import covers, font, font_for, readable, wrap, wrap_short

BUNDLED = Path(get_data_path(), "fonts", "ttf")


@pytest.fixture(autouse=True)
def fonts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The fonts of this machine: a broken one, one without Armenian, and one with it."""
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    paths = (str(tmp_path / "broken.ttf"), str(BUNDLED / "cmr10.ttf"), str(BUNDLED / "DejaVuSans.ttf"))
    monkeypatch.setattr(letters, "machine_fonts", lambda: paths)
    font_for.cache_clear()
    yield
    font_for.cache_clear()


def name(found: letters.Font | None) -> str | None:
    return found.getname()[0] if isinstance(found, ImageFont.FreeTypeFont) else None


def test_pillows_own_font_where_it_has_the_letters() -> None:
    assert name(font_for("a cat: 7 x 9! (seed 3)", 17)) == name(font(17)) == "Aileron"
    assert covers(font(17), "two\nlines")
    assert not covers(font(17), "\u0540\u0561")


def test_else_a_font_of_the_machine_that_has_them_all() -> None:
    assert name(font_for("\u0532\u0561\u0580\u0587, world", 17)) == "DejaVu Sans"
    assert font_for("\u732b", 17) is None
    assert font_for("\u0532\u732b", 17) is None


def test_else_escapes() -> None:
    text, found = readable("ink-\u732b", 26)
    assert (text, name(found)) == (r"ink-\u732b", "Aileron")
    assert readable("\u0532", 26)[0] == "\u0532"


def test_plain_upright_fonts_come_first() -> None:
    names = ["DejaVuSerif-Bold", "DejaVuSansMono", "DejaVuSans-BoldOblique", "DejaVuSerif", "DejaVuSans", "Ming"]
    assert sorted(names, key=letters._rank)[:2] == ["DejaVuSans", "DejaVuSansMono"]
    assert sorted(names, key=letters._rank)[-1] == "DejaVuSerif-Bold"


def test_wrap_keeps_every_letter_within_the_width() -> None:
    text = "short " + "x" * 90 + " end"
    lines = wrap(text, font(17), 120)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(font(17).getlength(line) <= 120 for line in lines)
    assert wrap("", font(17), 120) == [""]


@pytest.mark.parametrize("text", ["some words of a prompt " * 20, "x" * 400])
def test_a_text_that_is_too_long_ends_in_dots_and_its_end(text: str) -> None:
    lines = wrap_short(text, " (seed 3)", font(17), 300, 4)
    assert len(lines) == 4
    assert lines[:3] == wrap(text, font(17), 300)[:3]
    assert lines[3].endswith(" ... (seed 3)")
    assert wrap(text, font(17), 300)[3].startswith(lines[3].removesuffix(" ... (seed 3)"))
    assert all(font(17).getlength(line) <= 300 for line in lines)
    assert wrap_short("short", " (seed 3)", font(17), 300, 4) == ["short (seed 3)"]
