"""The field cases of LoRA files, models and the environment (L01, M01, M02, E02, E03) from end to end."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dsplit.training import lora_files
from tests import tiny
from tests.commandline import MODEL, Dsplit, cache_words, names_below
from tests.training.conftest import metrics

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1104\n" % (b"0" * 64)
WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of three rows and its cache."""
    from dsplit.cli import main

    folder = tmp_path_factory.mktemp("made")
    assert main(cache_words(tiny.dataset(folder / "data", 3), folder / "cache")) == 0
    return folder


def train_words(cache: Path, out: Path, *more: Any, model: Path | str = MODEL) -> list[str]:
    """`dsplit train` of a LoRA of rank 4 for two steps."""
    words = ["train", "--model", model, "--from-cache", cache, "--out", out, "--rank", 4, "--max-steps", 2]
    return [str(word) for word in (*words, "--threads", 1, "--device", "cpu", "--json", *more)]


def validate_words(lora: Path, out: Path, model: Path | str = MODEL) -> list[str]:
    words = ["validate", "--model", model, "--lora", lora, "--out", out, "--steps", 2, "--size", "64x64"]
    return [str(word) for word in (*words, "--threads", 1, "--device", "cpu", "--json")]


def test_l01_three_layouts_of_one_lora(dsplit: Dsplit, made: Path, tmp_path: Path) -> None:
    """Same seed, same weights: what each file gives back is bit-identical, and every key of it finds its place."""
    prefixes = {None: "transformer.", "diffusers": "transformer.", "comfyui": "diffusion_model.",
                "diffsynth": "transformer_blocks."}  # fmt: skip
    own, drawn = [], []
    for form, prefix in prefixes.items():
        out = tmp_path / str(form)
        done = dsplit(*train_words(made / "cache", out, *(["--lora-format", form] if form else [])))
        (path,) = map(Path, done.result["checkpoints"])
        tensors = load_file(path)
        assert all(k.startswith(prefix) for k in tensors)
        assert any(".default." in k for k in tensors) == (form == "diffsynth")  # which others skip
        down = [k for k in tensors if ".lora_A." in k]
        assert len(down) == 48
        assert all(k.replace(".lora_A.", ".lora_B.") in tensors for k in down)
        own.append(lora_files.read(path))
        done = dsplit(*validate_words(path, out / "pictures"))
        assert f"{path}: 96 of 96 keys loaded, 0 unmatched, 48 modules patched" in done.err
        drawn.append(np.asarray(Image.open(done.result["images"][0]["lora"])))
    first, metadata = own[0]
    assert any(v.abs().max() > 0 for k, v in first.items() if ".lora_B." in k)
    for tensors, other in own[1:]:
        assert tensors.keys() == first.keys()
        assert all(torch.equal(tensors[k], first[k]) for k in first)
        assert lora_files.alphas(tensors, other) == lora_files.alphas(first, metadata)
    assert all(np.array_equal(picture, drawn[0]) for picture in drawn)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who is online, and any try to use it is a failure."""

    def connect(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"asked the network: {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.usefixtures("no_network")
def test_m01_what_is_not_there_is_named_with_what_is(
    dsplit: Dsplit, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = tiny.qwen_image(tmp_path / "local")
    (tmp_path / "pictures").mkdir()
    tiny.picture(tmp_path / "pictures" / "a.png")
    origins = ("--model", "qwen-image", "--model-id-with-origin-paths")
    tries = {
        ("--model", f"{tmp_path}/locla"): f"there is no 'locla' in '{tmp_path}' (nearest: local)",
        (*origins, f"{local}:vae/*.safetensorz"): (
            f"'{local}:vae/*.safetensorz' matches no file in '{local}/vae' "
            "(it holds: config.json, diffusion_pytorch_model.safetensors)"
        ),
        (*origins, f"{local}:transformer/*.safetensorz"): f"matches no file in '{local}/transformer' (it holds: ",
        ("--model", f"{tmp_path}/pictures"): (
            f"no model files in '{tmp_path}/pictures': looked for model_index.json (it holds: a.png)"
        ),
        ("--model", "loca"): f"no repo id (ORG/NAME), and no folder in '{tmp_path}' (nearest: local)",
        (*origins, "loca:vae/*.safetensors"): "there is no 'loca' in '.' (nearest: local)",
    }
    for words, says in tries.items():
        started = time.monotonic()
        done = dsplit("cache", "--metadata", made / "data" / "metadata.csv", "--out", tmp_path / "cache", *words)
        assert (done.code, says in done.err) == (1, True), done.err
        assert time.monotonic() - started < 10
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("no_network")
def test_m01_a_path_with_a_space_and_a_colon(dsplit: Dsplit, made: Path, tmp_path: Path) -> None:
    model, metadata = tiny.qwen_image(tmp_path / "a b" / "m:1"), made / "data" / "metadata.csv"
    plain = dsplit(*cache_words(metadata, made / "cache")).result
    whole = dsplit(*cache_words(metadata, tmp_path / "whole", model=model)).result
    patterns = ",".join(f"{model}:{part}/*.safetensors" for part in ("vae", "text_encoder", "transformer"))
    words = cache_words(metadata, tmp_path / "listed", model="qwen-image")
    listed = dsplit(*words, "--model-id-with-origin-paths", patterns).result
    assert plain["digest"] == whole["digest"] == listed["digest"]
    assert whole["encoded"]["encode_image"] == listed["encoded"]["encode_image"] == 3


def safetensors(**sizes: int) -> bytes:
    """A file with tensors of so many bytes each."""
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def broken(fault: str) -> dict[str, bytes]:
    """What the transformer's folder holds in place of its weights."""
    whole = safetensors(w=1024)
    shards = {"w": "diffusion_pytorch_model-00001-of-00002.safetensors",
              "v": "diffusion_pytorch_model-00002-of-00002.safetensors"}  # fmt: skip
    return {
        "truncated": {WEIGHTS.name: whole[: len(whole) // 2]},
        "pointer": {WEIGHTS.name: POINTER},
        "zeros": {WEIGHTS.name: bytes(1024)},
        "sharded": {
            shards["w"]: whole,
            f"{WEIGHTS.name}.index.json": json.dumps({"weight_map": shards}).encode(),
        },
    }[fault]


@pytest.mark.parametrize(
    ("fault", "file", "says"),
    [
        ("truncated", WEIGHTS.name, f"truncated: {len(safetensors(w=1024)) // 2} of {len(safetensors(w=1024))} bytes"),
        ("pointer", WEIGHTS.name, "Git-LFS pointer, not weights"),
        ("zeros", WEIGHTS.name, "not a safetensors header"),
        (
            "sharded",
            f"{WEIGHTS.name}.index.json",
            "shard diffusion_pytorch_model-00002-of-00002.safetensors missing",
        ),
    ],
)
def test_m02_weights_that_are_not_whole(
    dsplit: Dsplit, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, file: str, says: str
) -> None:
    model, where = tiny.qwen_image(tmp_path / "model"), made / "data" / "metadata.csv"
    (model / WEIGHTS).unlink()
    for name, content in broken(fault).items():
        (model / "transformer" / name).write_bytes(content)
    assert dsplit(*cache_words(where, tmp_path / "cache", model=model)).code == 0  # stage 1 needs no transformer
    monkeypatch.setattr("dsplit.training.run.load_component", None)
    monkeypatch.setattr("dsplit.validation.run.draw_pairs", None)
    before = names_below(tmp_path)
    out = tmp_path / "out"
    for words in (
        train_words(tmp_path / "cache", out, model=model),
        ["prepare", "--verify", model],
        ["prepare", "--model", model, "--out", tmp_path],
    ):
        done = dsplit(*words)
        assert (done.code, f"{model / 'transformer' / file}: {says}" in done.err) == (1, True), done.err
        assert names_below(tmp_path) == before


def launch(words: list[Any], **environment: str) -> subprocess.CompletedProcess[str]:
    """`dsplit WORDS` in a process of its own."""
    command = [sys.executable, "-m", "dsplit", *map(str, words)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)


@pytest.mark.slow
def test_e02_workers_that_are_spawned(dsplit: Dsplit, tmp_path: Path) -> None:
    site = tmp_path / "site" / "sitecustomize.py"
    site.parent.mkdir()
    site.write_text("import multiprocessing\nmultiprocessing.set_start_method('spawn', force=True)\n")
    metadata = tiny.dataset(tmp_path / "data", 8)
    plain = dsplit(*cache_words(metadata, tmp_path / "plain"), "--workers", 0).result
    path = os.pathsep.join([str(site.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = launch([*cache_words(metadata, tmp_path / "cache"), "--workers", 2], PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["digest"] == plain["digest"]
    assert done.stderr.count("encode_image: 8/8 values") == 1
    assert done.stderr.count("plan: ") == 1
    here = dsplit(*train_words(tmp_path / "cache", tmp_path / "a", "--workers", 0)).result
    done = launch(train_words(tmp_path / "cache", tmp_path / "b", "--workers", 2), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert json.loads(done.stdout)["last_loss"] == here["last_loss"]
    assert done.stderr.count("train: 2/2 steps") == 1


def test_e03_everything_lands_below_out_and_the_plan_comes_first(
    dsplit: Dsplit, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cwd := tmp_path / "cwd").mkdir()
    monkeypatch.chdir(cwd)
    untouched = cwd.stat().st_mtime_ns  # changes even if a file is made and removed: a read-only folder would do
    data, model = os.path.relpath(made / "data", cwd), os.path.relpath(MODEL, cwd)
    out = Path("..", "res")
    done = dsplit(*cache_words(Path(data, "metadata.csv"), out / "cache", model=model))
    assert done.code == 0
    assert done.err.startswith("plan: 3 rows in 1 bucket (64x64: 3), on cpu in float32\nto encode: ")
    done = dsplit(*train_words(out / "cache", out / "lora", model=model))
    assert done.code == 0
    assert done.err.startswith("train: 3 rows in 1 bucket, 3 batches per epoch, 2 steps (0.667 epochs); ")
    assert "float32 on cpu" in done.err.splitlines()[0]
    done = dsplit(*validate_words(out / "lora", out / "pictures", model=model))
    assert done.code == 0
    assert done.err.startswith("1 prompt without and with ../res/lora/epoch-0.safetensors: 64x64, 2 steps, seed 0, ")
    assert "on cpu in float32" in done.err.splitlines()[0]
    assert dsplit("prepare", "--model", model, "--data", data, "--out", out / "run").code == 0
    assert (list(cwd.iterdir()), cwd.stat().st_mtime_ns) == ([], untouched)
    assert {p.name for p in tmp_path.iterdir()} == {"cwd", "res"}
    assert {p.name for p in (tmp_path / "res").iterdir()} == {"cache", "lora", "pictures", "run"}


@pytest.mark.parametrize(
    ("out", "why"), [("file", "is a file, not a folder"), ("file/below", "cannot write there: Not a directory")]
)
def test_e03_an_out_that_cannot_be_written_is_refused_first(
    dsplit: Dsplit, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, why: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "lora").mkdir()
    shutil.copy(Path(MODEL) / WEIGHTS, tmp_path / "lora" / "epoch-0.safetensors")  # never opened
    for loader in ("cache.stage1.load_component", "training.run.load_component", "validation.pipeline.load_pipeline"):
        monkeypatch.setattr(f"dsplit.{loader}", None)
    monkeypatch.setattr("dsplit.commands.prepare.check", None)
    target = tmp_path / out
    for words in (
        cache_words(made / "data" / "metadata.csv", target),
        train_words(made / "cache", target),
        validate_words(tmp_path / "lora", target),
        ["prepare", "--model", MODEL, "--data", made / "data", "--out", target],
    ):
        done = dsplit(*words)
        assert (done.code, f"error: {target}: {why}" in done.err) == (1, True), done.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_e03_the_plan_is_there_within_ten_seconds(made: Path, tmp_path: Path) -> None:
    lora = tmp_path / "lora"
    for words, starts in (
        (cache_words(made / "data" / "metadata.csv", tmp_path / "cache"), "plan: 3 rows"),
        (train_words(made / "cache", lora), "train: 3 rows"),
        (validate_words(lora, tmp_path / "pictures"), "1 prompt"),
    ):
        started = time.monotonic()
        command = [sys.executable, "-m", "dsplit", *words]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            first, waited = process.stderr.readline(), time.monotonic() - started
            process.stderr.read()
        assert (process.returncode, first.startswith(starts)) == (0, True), first
        assert waited < 10
