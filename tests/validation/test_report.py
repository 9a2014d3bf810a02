"""The report needs nothing but itself, and shows what users typed as text."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from PIL import Image

from dsplit.validation.pictures import Pair
from dsplit.validation.report import page

PARITY = {"rows": 4, "max_value": 0.0, "max_loss": 0.0, "max_gradient": 0.0, "tolerance": 0.0, "ok": True}
NASTY = '<script>alert("x")</script> & "quotes"'


class Reader(HTMLParser):
    """Collects the tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def images(self) -> list[str]:
        return [a["src"] or "" for t, a in self.tags if t == "img"]


def pairs(folder: Path, size: tuple[int, int] = (64, 64)) -> list[Pair]:
    Image.new("RGB", size, "blue").save(folder / "base.png")
    Image.new("RGB", size, "white").save(folder / "lora.png")
    return [Pair(NASTY, 7, folder / "base.png", folder / "lora.png")]


def test_pictures_are_embedded_byte_for_byte_base_first(tmp_path: Path) -> None:
    images = Reader(page("t", "s", pairs(tmp_path), {})).images()
    decoded = [base64.b64decode(i.removeprefix("data:image/png;base64,")) for i in images]
    assert decoded == [(tmp_path / "base.png").read_bytes(), (tmp_path / "lora.png").read_bytes()]


def test_nothing_is_fetched_from_anywhere(tmp_path: Path) -> None:
    Image.new("RGB", (9, 9)).save(tmp_path / "loss.png")
    text = page("t", "s", pairs(tmp_path), {"a": 1}, tmp_path / "loss.png", PARITY)
    read = Reader(text)
    assert {t for t, _ in read.tags} & {"script", "link", "iframe", "object", "form", "base"} == set()
    assert len(read.images()) == 3
    assert all(src.startswith("data:image/png;base64,") for src in read.images())
    assert not re.search(r"https?://|url\(|@import", text)


def test_what_the_user_typed_is_text_never_markup(tmp_path: Path) -> None:
    read = Reader(page(NASTY, NASTY, pairs(tmp_path), {NASTY: NASTY}))
    assert "script" not in {t for t, _ in read.tags}
    assert read.text.count(NASTY) == 6  # title, heading, subtitle, prompt, name and value of the setting
    assert [a["alt"] for t, a in read.tags if t == "img"] == [f"{NASTY}, without LoRA", f"{NASTY}, with LoRA"]


def test_an_empty_prompt_is_told(tmp_path: Path) -> None:
    for prompt in ("", " "):
        (one,) = pairs(tmp_path)
        assert Reader(page("t", "s", [replace(one, prompt=prompt)], {})).text.count("(empty prompt)") == 1


def test_small_pictures_keep_hard_edges_and_large_ones_do_not(tmp_path: Path) -> None:
    small = Reader(page("t", "s", pairs(tmp_path), {}))
    assert [a.get("class") for t, a in small.tags if t == "img"] == ["small", "small"]
    large = Reader(page("t", "s", pairs(tmp_path, (512, 512)), {}))
    assert [a.get("class") for t, a in large.tags if t == "img"] == [None, None]


def test_sections_appear_only_where_there_is_something_to_show(tmp_path: Path) -> None:
    def headings(text: str) -> list[str]:
        return re.findall("<h2>(.*?)</h2>", text)

    assert headings(page("t", "s", [], {})) == ["Settings"]
    assert headings(page("t", "s", pairs(tmp_path), {}, None, PARITY)) == [
        "Without and with the LoRA",
        "Split against unsplit",
        "Settings",
    ]


def test_parity_is_told_with_its_figures_and_verdict() -> None:
    good = "".join(Reader(page("t", "s", [], {}, None, PARITY)).text)
    assert "equal within the tolerance" in good
    bad = "".join(Reader(page("t", "s", [], {}, None, {**PARITY, "max_loss": 0.125, "ok": False})).text)
    assert "0.125" in bad
    assert "different" in bad
    assert "equal within" not in bad
