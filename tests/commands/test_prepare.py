"""`dsplit prepare`: the run folder, the data check, verification, the demo, and what is fetched."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from dsplit.cli import main
from dsplit.commands.prepare import write_toml
from dsplit.commands.template import LEFT_OUT, SECTIONS, template
from dsplit.errors import CacheError
from dsplit.recipe import DataOptions, ModelOptions
from tests import tiny
from tests.commands.parsing import resolved
from tests.hub_stub import Hub

MODEL = str(tiny.QWEN_IMAGE)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_folder_needs_no_more_options(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.dataset(here / "pictures", 3, sizes=[(64, 64), (64, 32)])
    tiny.qwen_image(here / "weights")
    assert main(shlex.split("prepare --model weights --data pictures --max_pixels 4096 --out runs/a --json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["buckets"]) == (3, {"64x64": 2, "64x32": 1})
    assert found["encodes"] == {"encode_image": 3, "encode_prompt": 4}  # the empty prompt is always cached
    assert set(found["weights"]) == {"transformer", "vae", "text_encoder", "tokenizer", "scheduler"}
    assert found["toml"] == str(Path("runs/a/dsplit.toml"))

    os.chdir(here / "runs" / "a")
    model, data, cache = resolved("cache")
    assert (model.model, model.task) == ("../../weights", None)
    assert (data.data, data.max_pixels) == ("../../pictures", 4096)
    assert cache.out is None
    assert resolved("train", "--from-cache")[2].from_cache == "cache"
    assert main(["prepare", "--check"]) == 0
    assert "3 rows in 2 buckets, for qwen-image" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--out", "new"], ["--overwrite"]])
def test_nothing_to_prepare_says_what_to_give(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", *words]) == 2
    assert "nothing to prepare: give --model, --data or both; --demo FOLDER writes" in capsys.readouterr().err
    assert list(here.iterdir()) == []
    (here / "dsplit.toml").write_text("[data]\ndata = 'pictures'\n")
    tiny.dataset(here / "pictures", 1)
    assert main(["prepare"]) == 0
    assert capsys.readouterr().out.startswith("1 row in 1 bucket, for qwen-image\n")


def test_a_folder_made_for_nothing_goes_away(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.dataset(here / "pictures", 1)
    assert main(["prepare", "--model", "nope", "--data", "pictures", "--out", "runs/a"]) == 1
    assert main(["cache", "--model", "nope", "--data", "pictures", "--out", "runs/a/cache"]) == 1
    (here / "a.safetensors").write_bytes(b"")
    assert main(["validate", "--model", "nope", "--lora", "a.safetensors", "--out", "runs/a/b"]) == 1
    assert capsys.readouterr().err.count("'nope' is no model family") == 3
    assert not (here / "runs").exists()
    (here / "mine").mkdir()
    assert main(["cache", "--model", "nope", "--data", "pictures", "--out", "mine"]) == 1
    assert (here / "mine").is_dir()


def test_a_settings_file_that_is_there_is_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "dsplit.toml").write_text("[train]\nrank = 7\n")
    tiny.dataset(here / "pictures", 1)
    assert main(["prepare", "--data", "pictures"]) == 0
    assert (here / "dsplit.toml").read_text() == "[train]\nrank = 7\n"
    assert "--data are not written into it" in capsys.readouterr().err
    assert main(["prepare", "--data", "pictures", "--overwrite"]) == 0
    assert tomllib.loads((here / "dsplit.toml").read_text())["data"] == {"data": "pictures"}


def test_uncommented_defaults_are_the_defaults(here: Path) -> None:
    lines = [
        line.removeprefix("# ") if line.startswith("# ") and " = " in line and "..." not in line else line
        for line in template({}).splitlines()
    ]
    (here / "dsplit.toml").write_text("\n".join(lines))
    model, data, cache = resolved("cache")
    assert (model, data, cache.name, cache.workers) == (ModelOptions(), DataOptions(), "default", 2)
    train = resolved("train")[2]
    assert (train.rank, train.lr, train.epochs, train.out) == (32, 1e-4, 1, "runs/lora")
    assert resolved("validate")[2].prompt == ["a dog"]


def test_the_template_holds_every_shown_option() -> None:
    text = template({"model": {"model": 'a "b" \\ c'}})
    assert tomllib.loads(text)["model"] == {"model": 'a "b" \\ c'}
    for section, group in SECTIONS.items():
        block = text.split(f"[{section}]")[1].split("\n[")[0]
        for field in fields(group):
            if not field.metadata["hidden"] and field.name not in {*LEFT_OUT, "name"}:
                assert f"{field.name} = " in block
                assert field.metadata["help"] in block


def test_the_check_tells_all_faults_at_once_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = tiny.dataset(here / "pictures", 4)
    (here / "pictures" / "img01.png").unlink()
    (here / "pictures" / "img03.png").write_bytes((here / "pictures" / "img03.png").read_bytes()[:60])
    assert main(["prepare", "--check", "--data", "pictures"]) == 1
    message = capsys.readouterr().err
    assert f"{Path('pictures', metadata.name)}:3" in message
    assert f"{Path('pictures', metadata.name)}:5" in message
    assert main(["prepare", "--check", "--data", "pictures", "--skip-bad", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["skipped"], found["family"]) == (2, 2, "qwen-image")
    assert found["bytes"] > 2 * 2 * 16 * 8 * 8
    assert sorted(p.name for p in here.iterdir()) == ["pictures"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--check", "--check: name the data set"),
        ("--check --verify x", "--verify and --check are two jobs"),
        ("--stage 3", "--stage 3: there are two stages"),
        (f"--model {MODEL} --local-dir x", "there is nothing to fetch"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(capsys: pytest.CaptureFixture[str], words: str, says: str) -> None:
    assert main(["prepare", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_verify_names_every_faulty_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.qwen_image(here / "weights")
    assert main(["prepare", "--verify", "weights"]) == 0
    assert "every weight file is complete" in capsys.readouterr().out
    vae = next((folder / "vae").glob("*.safetensors"))
    size = vae.stat().st_size
    os.truncate(vae, size - 10)
    text_encoder = next((folder / "text_encoder").glob("*.safetensors"))
    text_encoder.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert main(["prepare", "--verify", "weights"]) == 1
    message = capsys.readouterr().err
    assert f"{vae.relative_to(here)}: truncated: {size - 10} of {size} bytes" in message
    assert f"{text_encoder.relative_to(here)}: Git-LFS pointer, not weights" in message
    assert main(["prepare", "--model", "weights"]) == 1
    assert "truncated" in capsys.readouterr().err
    assert not (here / "dsplit.toml").exists()


def test_the_demo_is_written_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--demo", "demo"]) == 0
    assert sorted(p.name for p in (here / "demo").iterdir()) == ["data", "dsplit.toml", "model"]
    os.chdir(here / "demo")
    model, data, train = resolved("train", "--from-cache")
    assert (model.model, data.data, train.from_cache, train.out) == ("model", "data", "cache", "runs/ink")
    os.chdir(here)
    assert main(["prepare", "--demo", "demo"]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_files() -> dict[str, bytes]:
    return {p.relative_to(MODEL).as_posix(): p.read_bytes() for p in Path(MODEL).rglob("*") if p.is_file()}


def prepare(hub: Hub, *words: str) -> subprocess.CompletedProcess[str]:
    """`dsplit prepare` in a process of its own: the clients read the environment when they are imported."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "MODELSCOPE_ENDPOINT": hub.endpoint,
        "HF_ENDPOINT": hub.endpoint,
    }
    command = [sys.executable, "-m", "dsplit", "prepare", "--json", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_stage_two_fetches_no_encoder(here: Path, tiny_files: dict[str, bytes]) -> None:
    with Hub({"ORG/tiny": tiny_files}) as hub:
        done = prepare(hub, "--model", "ORG/tiny", "--stage", "2", "--out", "run")
        assert done.returncode == 0, done.stderr
        assert hub.asked("transformer/")
        assert not hub.asked("text_encoder/")
        assert not hub.asked("vae/")
    assert set(json.loads(done.stdout)["weights"]) == {"transformer", "scheduler"}
    os.chdir(here / "run")
    model = resolved("train", "--from-cache")[0]
    assert (model.model, model.model_path) == ("ORG/tiny", "../models/ORG/tiny")
    assert (here / "models" / "ORG" / "tiny" / "model_index.json").is_file()


def test_weights_go_where_they_are_told_and_damage_is_mended(here: Path, tiny_files: dict[str, bytes]) -> None:
    with Hub({"ORG/tiny": tiny_files}) as hub:
        words = ("--model", "ORG/tiny", "--local-dir", "w", "--hub", "huggingface")
        done = prepare(hub, *words)
        assert done.returncode == 0, done.stderr
        weights = next((here / "w" / "vae").glob("*.safetensors"))
        right = weights.read_bytes()
        weights.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))  # of the right size, with a sound header
        assert prepare(hub, *words).returncode == 0
    assert weights.read_bytes() == right
    assert not (here / "models").exists()
    assert tomllib.loads((here / "dsplit.toml").read_text())["model"] == {
        "model": "ORG/tiny", "hub": "huggingface", "model_path": "w",
    }  # fmt: skip


def test_a_data_set_is_fetched_in_part(here: Path) -> None:
    files = {"a/x.txt": b"x", "a/y.txt": b"y", "b/z.txt": b"z"}
    with Hub({"ORG/pictures": files}) as hub:
        done = prepare(hub, "--dataset", "ORG/pictures", "--include", "a/*", "--local-dir", "d")
        assert done.returncode == 0, done.stderr
        assert not hub.asked("z.txt")
    assert json.loads(done.stdout) == {"dataset": "d"}
    assert sorted(p.relative_to(here / "d").as_posix() for p in (here / "d").rglob("*.txt")) == ["a/x.txt", "a/y.txt"]
    assert not (here / "dsplit.toml").exists()


def test_a_failed_fetch_is_an_error(here: Path, tiny_files: dict[str, bytes]) -> None:
    with Hub({"ORG/tiny": tiny_files}) as hub:
        done = prepare(hub, "--model", "ORG/absent")
        assert done.returncode == 1
        assert "ORG/absent" in done.stderr
        assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (here / "dsplit.toml").exists()


def test_settings_that_cannot_be_written_are_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "dsplit.toml" / "in the way").mkdir(parents=True)
    with pytest.raises(CacheError, match=r"dsplit\.toml: cannot write it: Is a directory"):
        write_toml(tmp_path, {"model": "qwen-image"}, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["dsplit.toml"]
