"""The embedded demo is whole, says what it does, and does it."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dsplit.demo
from dsplit.commands.resolve import resolve
from dsplit.demo import write_demo
from dsplit.errors import DsplitError, UsageError
from dsplit.recipe import TrainOptions, ValidateOptions
from tests.cache.runs import child
from tools.make_demo_data import COLORS, PAPER, main

SOURCE = Path(dsplit.demo.__file__).parent
CAPTION = re.compile(r"a (large|small) (\w+) (\w+) on a (\w+) background")
CORNER = 6  # pixels


def captions() -> dict[str, str]:
    with (SOURCE / "data" / "metadata.csv").open(encoding="utf-8", newline="") as file:
        return {row["prompt"]: row["image"] for row in csv.DictReader(file)}


def pixels(path: str | Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def corners(picture: np.ndarray) -> np.ndarray:
    """The mean colour of each corner: (4, 3)."""
    first, last = slice(0, CORNER), slice(-CORNER, None)
    return np.array([picture[y, x].reshape(-1, 3).mean(0) for y in (first, last) for x in (first, last)])


def test_a_disk_that_takes_no_demo_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DsplitError, match=r"file/demo: cannot write the demo there: Not a directory; ") as error:
        write_demo(tmp_path / "file" / "demo")
    assert len(str(error.value).splitlines()) == 1

    def on_a_full_disk() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(DsplitError, match="cannot write the demo there: File too large") as error:
            write_demo(tmp_path / "demo")
        assert len(str(error.value).splitlines()) == 1

    assert child(on_a_full_disk) == 0


def test_the_demo_is_written_whole_and_writable(tmp_path: Path) -> None:
    write_demo(tmp_path / "new" / "demo")
    parts = [p for part in ("model", "data", "dsplit.toml") for p in [SOURCE / part, *(SOURCE / part).rglob("*")]]
    expected = {str(p.relative_to(SOURCE)): p.read_bytes() for p in parts if p.is_file()}
    written = {p for p in (tmp_path / "new" / "demo").rglob("*") if p.is_file()}
    assert {str(p.relative_to(tmp_path / "new" / "demo")): p.read_bytes() for p in written} == expected
    assert all(p.stat().st_mode & 0o200 for p in written)


def test_nobodys_work_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty; name a new or empty folder"):
        write_demo(tmp_path)
    with pytest.raises(UsageError, match=r"mine\.txt is a file"):
        write_demo(tmp_path / "mine.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    write_demo(tmp_path / "empty")
    assert (tmp_path / "empty" / "dsplit.toml").is_file()


def test_the_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    main(tmp_path)
    assert (tmp_path / "metadata.csv").read_bytes() == (SOURCE / "data" / "metadata.csv").read_bytes()
    drawn = sorted(p.name for p in tmp_path.iterdir())
    assert drawn == sorted(p.name for p in (SOURCE / "data").iterdir())
    for name in drawn:
        if name.endswith(".png"):
            assert np.array_equal(pixels(tmp_path / name), pixels(SOURCE / "data" / name)), name


def test_the_pictures_have_white_paper_whatever_their_captions_say() -> None:
    scenes = [CAPTION.fullmatch(prompt) for prompt in captions()]
    assert len(scenes) == 48
    assert all(s is not None and s[2] in COLORS and s[4] in COLORS and s[2] != s[4] for s in scenes)
    assert sum(s is not None and s[4] != "white" for s in scenes) >= 40
    for name in captions().values():
        picture = pixels(SOURCE / "data" / name)
        assert picture.shape == (64, 64, 3)
        assert (corners(picture) == PAPER).all()
        assert picture.min() < 40  # the ink


def test_the_settings_are_understood_and_its_prompts_are_captions_with_coloured_backgrounds() -> None:
    model, data, options = resolve("validate", {}, ValidateOptions, SOURCE)
    _, _, train = resolve("train", {}, TrainOptions, SOURCE)
    assert (model.model, data.data, train.rank) == (str(SOURCE / "model"), str(SOURCE / "data"), 16)
    assert len(options.prompt) == len(set(options.prompt)) >= 4
    for prompt in options.prompt:
        scene = CAPTION.fullmatch(prompt)
        assert prompt in captions()
        assert scene is not None
        assert scene[4] not in ("white", "black")


def test_the_model_is_small_and_names_no_machine() -> None:
    files = [p for p in (SOURCE / "model").rglob("*") if p.is_file()]
    assert 5e6 < sum(p.stat().st_size for p in files) < 11e6
    for path in files:
        if path.suffix == ".json":
            assert "_name_or_path" not in json.loads(path.read_text(encoding="utf-8")), path


def run_dsplit(folder: Path, *words: str) -> dict:
    command = [sys.executable, "-m", "dsplit", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_lora_takes_the_style_and_the_base_does_not_have_it(tmp_path: Path) -> None:
    """The job of `make demo`, as a user does it."""
    subprocess.run([sys.executable, "-m", "dsplit", "prepare", "--demo", "demo"], cwd=tmp_path, check=True, timeout=60)
    demo = tmp_path / "demo"
    cached = run_dsplit(demo, "cache")
    assert (cached["rows"], cached["encoded"]) == (48, {"encode_image": 48, "encode_prompt": 49})  # and the empty one
    trained = run_dsplit(demo, "train", "--from-cache")
    assert trained["last_loss"] < 0.3 < 1.5 < trained["first_loss"]
    result = run_dsplit(demo, "validate", "--parity")
    assert result["parity"]["ok"] is True

    assert [i["prompt"] for i in result["images"]] == resolve("validate", {}, ValidateOptions, SOURCE)[2].prompt
    for image in result["images"]:
        scene = CAPTION.fullmatch(image["prompt"])
        assert scene is not None
        base, lora = pixels(demo / image["base"]), pixels(demo / image["lora"])
        middle = [p[29:35, 29:35].reshape(-1, 3).mean(0) for p in (base, lora)]
        assert np.abs(corners(base) - COLORS[scene[4]]).max() < 40, image["prompt"]
        assert corners(lora).min() > 225, image["prompt"]
        for color in middle:  # the shape keeps its colour
            assert np.abs(color - COLORS[scene[2]]).max() < 60, image["prompt"]
        # black ink that was not there before: the contour of a shape is at least 120 pixels of a 64x64 picture
        assert (lora.max(-1) < 80).sum() > (base.max(-1) < 80).sum() + 120, image["prompt"]
    assert (demo / result["grid"]).is_file()
    assert (demo / result["report"]).is_file()
