"""The grid shows every picture at its place, readable, and in whole pixels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont

from dsplit.errors import DsplitError
from dsplit.validation.letters import font, font_for
from dsplit.validation.pictures import Pair, grid, save, save_png, shown


def pair(folder: Path, k: int, prompt: str = "a cat", size: tuple[int, int] = (64, 64)) -> Pair:
    base, lora = folder / f"{k}-base.png", folder / f"{k}-lora.png"
    Image.new("RGB", size, (10 + k, 20, 200)).save(base)
    Image.new("RGB", size, (200, 20, 10 + k)).save(lora)
    return Pair(prompt, 3, base, lora)


def count(picture: Image.Image, color: tuple[int, int, int]) -> int:
    return int((np.asarray(picture) == color).all(-1).sum())


@pytest.mark.parametrize("number", [1, 2, 6, 7])
def test_every_picture_is_in_the_grid_whole(tmp_path: Path, number: int) -> None:
    pairs = [pair(tmp_path, k) for k in range(number)]
    page = grid(pairs, "title", "subtitle")
    for k in range(number):
        assert count(page, (10 + k, 20, 200)) == 256 * 256
        assert count(page, (200, 20, 10 + k)) == 256 * 256


def test_without_lora_stands_left_of_with_lora(tmp_path: Path) -> None:
    page = np.asarray(grid([pair(tmp_path, 0)], "title", "subtitle"))
    left = np.argwhere((page == (10, 20, 200)).all(-1))
    right = np.argwhere((page == (200, 20, 10)).all(-1))
    assert left[:, 0].min() == right[:, 0].min()
    assert left[:, 1].max() < right[:, 1].min()


def below_pictures(page: Image.Image) -> bytes:
    """The pixels below the last row of pictures."""
    bottom = np.argwhere((np.asarray(page) == (10, 20, 200)).all(-1))[:, 0].max()
    return page.crop((0, bottom + 3, page.width, page.height)).tobytes()


def test_a_long_prompt_makes_the_cards_at_most_four_lines_high(tmp_path: Path) -> None:
    short = grid([pair(tmp_path, 0)], "t", "s")
    for words, lines in (("a long prompt " * 6, 2), ("a very long prompt " * 12, 4), ("a very long prompt " * 100, 4)):
        long = grid([pair(tmp_path, 0, words)], "t", "s")
        assert (long.width, long.height) == (short.width, short.height + 22 * (lines - 1))


def test_an_empty_prompt_is_told(tmp_path: Path) -> None:
    for prompt in ("", " \n"):
        page = grid([pair(tmp_path, 0, prompt)], "t", "s")
        assert below_pictures(page) == below_pictures(grid([pair(tmp_path, 0, "(empty prompt)")], "t", "s"))


def test_letters_that_no_font_here_has_point_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(font(17), ImageFont.FreeTypeFont)
    monkeypatch.setattr("dsplit.validation.letters.machine_fonts", lambda: ())
    font_for.cache_clear()
    page = grid([pair(tmp_path, 0, "\u732b in ink")], "\u732b", "s")
    same = grid([pair(tmp_path, 0, "(prompt 1: see report.html)")], r"\u732b", "s")
    font_for.cache_clear()
    assert page.tobytes() == same.tobytes()


def test_small_pictures_grow_by_a_whole_factor_and_large_ones_shrink() -> None:
    checks = Image.fromarray(np.indices((64, 64)).sum(0).astype(np.uint8) % 2 * 255).convert("RGB")
    grown = shown(checks)
    assert grown.size == (256, 256)
    assert np.array_equal(np.asarray(grown)[::4, ::4], np.asarray(checks))
    assert {int(v) for v in np.unique(np.asarray(grown))} == {0, 255}
    assert shown(Image.new("RGB", (96, 48))).size == (192, 96)
    assert shown(Image.new("RGB", (300, 300))).size == (300, 300)
    assert shown(Image.new("RGB", (1024, 512))).size == (512, 256)


def test_pictures_are_saved_whole_and_leave_nothing_else(tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    save_png(picture, tmp_path / "a.png")
    save_png(picture, tmp_path / "a.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(picture))
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_a_picture_that_cannot_be_written_is_an_error_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DsplitError, match=r"file/a\.png: cannot write it: .+; give another folder with --out"):
        save(b"x", tmp_path / "file" / "a.png")
