"""The field cases of data sets (D01 to D10) from end to end: command line in; exit code, messages and values out.

The other tests read the parts of each case; these join them, as the person who reported it met them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageFile

from dsplit.cache.encode import encode
from dsplit.cache.rows import CachedRows
from dsplit.models.load import load_component
from dsplit.models.locate import locate
from dsplit.recipe import ModelOptions
from tests import tiny
from tests.commandline import MODEL, Dsplit, cache_words, names_below
from tests.dataset.make import metadata, pictures, png


def never(*_: Any) -> None:
    raise AssertionError("a model was loaded")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a component fails."""
    monkeypatch.setattr("dsplit.cache.stage1.load_component", never)


def csv(folder: Path, *names: str, name: str = "metadata.csv") -> Path:
    return metadata(folder, "image,prompt\n" + "".join(f"{n},a thing\n" for n in names), name)


def twin_pairs(folder: Path) -> list[str]:
    """Pictures whose looks depend on EXIF or transparency, each followed by the same picture stored plainly."""
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = Image.open(tiny.picture(folder / "upright.png", (64, 96)))
    upright.transpose(Image.Transpose.ROTATE_90).save(folder / "exif.jpg", exif=exif)
    stored = Image.open(folder / "exif.jpg").convert("RGB")
    stored.transpose(Image.Transpose.ROTATE_270).save(folder / "exif_twin.png")
    white, blue, hidden_red = Image.new("RGB", (64, 64), "white"), Image.new("RGB", (32, 64), "blue"), (255, 0, 0, 0)
    white.paste(blue)
    white.save(folder / "rgba_twin.png")
    rgba = Image.new("RGBA", (64, 64), hidden_red)
    rgba.paste((0, 0, 255, 255), (0, 0, 32, 64))
    rgba.save(folder / "rgba.png")
    grey = Image.new("LA", (64, 64), (10, 0))
    grey.paste((90, 255), (0, 0, 32, 64))
    grey.save(folder / "la.png")
    grey_twin = Image.new("L", (64, 64), 255)
    grey_twin.paste(90, (0, 0, 32, 64))
    grey_twin.save(folder / "la_twin.png")
    palette = Image.new("P", (64, 64), 1)
    palette.putpalette([0, 0, 255, 255, 0, 0])
    palette.paste(0, (0, 0, 32, 64))
    palette.save(folder / "trns.png", transparency=1)
    white.save(folder / "trns_twin.png")
    return [f"{n}{end}" for n, ext in (("exif", ".jpg"), ("rgba", ".png"), ("la", ".png"), ("trns", ".png"))
            for end in (ext, "_twin.png")]  # fmt: skip


def test_d01_d09_what_a_picture_shows_is_what_is_encoded(dsplit: Dsplit, tmp_path: Path) -> None:
    pairs = twin_pairs(tmp_path / "data")
    path = csv(tmp_path / "data", *pairs)
    done = dsplit("prepare", "--check", "--model", MODEL, "--metadata", path, "--json")
    assert json.loads(done.out)["buckets"] == {"64x64": 6, "64x96": 2}
    done = dsplit(*cache_words(path, tmp_path / "cache"))
    assert (done.code, done.result["rows"]) == (0, 8)
    rows = CachedRows(tmp_path / "cache")
    assert [rows.group(i) for i in range(8)] == [(64, 96)] * 2 + [(64, 64)] * 6
    for i in range(0, 8, 2):
        assert torch.equal(rows.values(i)["latents"], rows.values(i + 1)["latents"]), pairs[i]
    different = {rows.values(i)["latents"].numpy().tobytes() for i in range(0, 8, 2)}
    assert len(different) == 3  # rgba and trns show the same


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("metadata.csv", "image,prompt\na.png,a dog\nb.png,\nc.png\n", "line 3, line 4"),
        (
            "metadata.jsonl",
            '{"image":"a.png","prompt":"a dog"}\n{"image":"b.png","prompt":null}\n{"image":"c.png"}\n',
            "line 2, line 3",
        ),
    ],
)
def test_d02_no_prompt_is_the_empty_prompt(dsplit: Dsplit, tmp_path: Path, name: str, text: str, lines: str) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png")
    done = dsplit(*cache_words(metadata(tmp_path, text, name), tmp_path / "cache"))
    assert done.code == 0
    assert [line.partition("text: ")[2] for line in done.err.splitlines() if "empty prompt" in line] == [lines]
    model = locate(ModelOptions(model=MODEL))
    parts = {n: load_component(model, n, torch.float32, "cpu") for n in ("text_encoder", "tokenizer")}
    unit = next(u for u in model.family.units if u.name == "encode_prompt")
    rows = CachedRows(tmp_path / "cache")
    empty = {k: v[0] for k, v in encode((unit,), {"prompt": [""]}, parts).items() if k in rows.values(0)}
    assert empty.keys() == {"prompt_embeds", "prompt_mask"}
    for i in (1, 2):
        assert all(torch.equal(rows.values(i)[k], v) for k, v in empty.items())
    for word in ("nan", "None", "null"):
        assert not torch.equal(encode((unit,), {"prompt": [word]}, parts)["prompt_embeds"][0], empty["prompt_embeds"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.csv", "image,prompt\na.png,a red square\nb.png,ein schönes Bild\n"),
        ("metadata.jsonl", '{"image":"a.png","prompt":"a dog"}\n{"image":"b.png","prompt":"ein schönes Bild"}\n'),
    ],
)
def test_d03_a_byte_order_mark_changes_no_value(dsplit: Dsplit, tmp_path: Path, name: str, text: str) -> None:
    pictures(tmp_path, "a.png", "b.png")
    plain = dsplit(*cache_words(metadata(tmp_path, text, name), tmp_path / "cache")).result
    marked = dsplit(*cache_words(metadata(tmp_path, "\ufeff" + text, name), tmp_path / "cache")).result
    assert (marked["rows"], marked["digest"]) == (2, plain["digest"])
    assert set(marked["encoded"].values()) == {0}


@pytest.mark.usefixtures("no_model")
def test_d03_windows_1252_is_refused_with_file_line_and_the_encoding_to_use(dsplit: Dsplit, tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png")
    path = metadata(tmp_path, b"image,prompt\na.png,fine\nb.png,the artist\x92s\n", "cp1252.csv")
    check = ("prepare", "--check", "--model", MODEL, "--metadata", path)
    for done in (dsplit(*check), dsplit(*cache_words(path, tmp_path / "cache"))):
        assert done.code == 1
        assert f"{path}:3: byte 0x92 is not UTF-8; save the file as UTF-8" in done.err


def test_d04_all_bad_pictures_in_one_run_and_the_rest_with_skip_bad(
    dsplit: Dsplit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    pictures(tmp_path, "ok.png", "truncated.jpg", "wrongext.png")
    (tmp_path / "wrongext.png").rename(tmp_path / "wrongext.jpg")
    whole = (tmp_path / "truncated.jpg").read_bytes()
    (tmp_path / "truncated.jpg").write_bytes(whole[: len(whole) * 6 // 10])
    (tmp_path / "empty.png").touch()
    (tmp_path / "page.jpg").write_text("<html><body>404</body></html>")
    path = csv(tmp_path, "ok.png", "truncated.jpg", "empty.png", "page.jpg", "wrongext.jpg")
    bad = [f"{path}:{n}: image '{f}'" for n, f in ((3, "truncated.jpg"), (4, "empty.png"), (5, "page.jpg"))]
    done = dsplit(*cache_words(path, tmp_path / "cache"))
    assert done.code == 1
    assert [line.strip()[: len(b)] for line, b in zip(done.err.splitlines()[1:], bad, strict=True)] == bad
    done = dsplit(*cache_words(path, tmp_path / "cache"), "--skip-bad")
    assert (done.code, done.result["rows"], done.result["encoded"]["encode_image"]) == (0, 2, 2)
    left_out = [line for line in done.err.splitlines() if "left out: " in line]
    assert [b in line for b, line in zip(bad, left_out, strict=True)] == [True] * 3
    assert [CachedRows(tmp_path / "cache").place(i) for i in range(2)] == [f"{path}:2", f"{path}:6"]


def test_d05_every_spelling_is_found_and_files_land_below_out_only(dsplit: Dsplit, tmp_path: Path) -> None:
    data = tmp_path / "data"
    pictures(data, "images/a.png", "images/b.png", "images/c.png", "images/d.png")
    pictures(tmp_path, "outside.png")
    absolute = data / "images" / "d.png"
    path = csv(data, "images\\a.png", "./images/b.png", "images//c.png", str(absolute), "../outside.png")
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    done = dsplit(*cache_words(path, tmp_path / "out" / "cache"))
    assert (done.code, done.result["rows"]) == (0, 5)
    new = {n for n in names_below(tmp_path) if tmp_path / n not in before}
    assert all(n == "out" or n.startswith("out/") for n in new)
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_d06_prompts_reach_training_byte_exact(dsplit: Dsplit, tmp_path: Path) -> None:
    pictures(tmp_path, "a.png", "b.png", "c.png", "d.png")
    text = (
        'image,prompt\r\na.png,"red, green, blue"\r\nb.png,"a sign saying ""OPEN"""\r\n'
        'c.png,"line one\nline two"\r\nd.png,plain\r\n'
    )
    path = metadata(tmp_path, text)
    trained = ("--trainable", "text_encoder")  # the prompt itself crosses to stage 2
    assert dsplit(*cache_words(path, tmp_path / "cache"), *trained).result["rows"] == 4
    rows = CachedRows(tmp_path / "cache")
    assert [rows.columns(i)["prompt"] for i in range(4)] == [
        "red, green, blue", 'a sign saying "OPEN"', "line one\nline two", "plain",
    ]  # fmt: skip


def test_d06_a_very_long_cell_is_cut_with_one_notice(dsplit: Dsplit, tmp_path: Path) -> None:
    pictures(tmp_path, "a.png")
    path = metadata(tmp_path, f"image,prompt\na.png,{'word ' * 28000}\n")
    assert dsplit("prepare", "--check", "--model", MODEL, "--metadata", path).code == 0
    done = dsplit(*cache_words(path, tmp_path / "cache"))
    assert done.code == 0
    (notice,) = (line for line in done.err.splitlines() if "tokens" in line)
    assert "only the first 512 tokens count" in notice
    assert f"{path}:2 (" in notice


@pytest.mark.usefixtures("no_model")
def test_d08_huge_pictures_are_refused_by_their_header(dsplit: Dsplit, tmp_path: Path) -> None:
    pictures(tmp_path, "ok.png")
    for name, (width, height) in {"bomb.png": (14000, 13000), "warn.png": (10000, 9000)}.items():
        (tmp_path / name).write_bytes(png((width, height), 1, 0, [bytes((width + 7) // 8)] * height))
    check = ("prepare", "--check", "--model", MODEL, "--metadata")
    path = csv(tmp_path, "ok.png", "bomb.png", "warn.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for done in (dsplit(*check, path), dsplit(*cache_words(path, tmp_path / "cache"))):
            assert done.code == 1
            assert f"{path}:3: image 'bomb.png': 14000x13000 is 182000000 pixels" in done.err
            assert "raise --max-image-pixels" in done.err
        done = dsplit(*check, csv(tmp_path, "warn.png"))
    assert done.code == 0
    assert len(done.err.splitlines()) == 1


RAISED = """
import resource, sys
from dsplit.cli import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
sys.exit(code)
"""


@pytest.mark.slow
def test_d08_with_the_limit_raised_a_huge_picture_fits_in_memory(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png((14000, 13000), 1, 0, [bytes(1750)] * 13000))
    words = [*cache_words(csv(tmp_path, "bomb.png"), tmp_path / "cache"), "--max-image-pixels", "200000000"]
    done = subprocess.run([sys.executable, "-c", RAISED, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("peak ")[1]) < 1.5e9


def test_d10_sizes_that_cannot_be_are_named_and_odd_ones_fit(dsplit: Dsplit, tmp_path: Path) -> None:
    sizes = {
        "odd.png": (65, 127),
        "small.png": (17, 33),
        "one.png": (1, 1),
        "thin.png": (15, 200),
        "wide.png": (2048, 8),
    }
    for name, size in sizes.items():
        pictures(tmp_path, name, size=size)
    path = csv(tmp_path, *sizes)
    done = dsplit(*cache_words(path, tmp_path / "cache"))
    assert done.code == 1
    for line, name in ((4, "one.png"), (5, "thin.png"), (6, "wide.png")):
        assert f"{path}:{line}: image '{name}' is {'x'.join(map(str, sizes[name]))}: a side is shorter" in done.err
    assert dsplit(*cache_words(path, tmp_path / "cache"), "--skip-bad").result["rows"] == 2
    rows = CachedRows(tmp_path / "cache")
    assert [rows.group(i) for i in range(2)] == [(64, 112), (16, 32)]
    assert [tuple(rows.values(i)["latents"].shape[-2:]) for i in range(2)] == [(14, 8), (4, 2)]
