"""What `dsplit train` refuses or warns of before it starts, and what it takes from the cache."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from dsplit.cache.manifest import manifest_path
from dsplit.errors import CacheError, TrainingError, UsageError
from dsplit.recipe import DataOptions, TrainOptions
from dsplit.training.run import run_train
from tests import tiny
from tests.training.conftest import losses, make, model


def test_a_cache_of_another_job_is_refused_with_every_difference(three, tmp_path, monkeypatch):
    monkeypatch.setattr("dsplit.training.run.load_component", None)
    wrong = model(task="direct_distill", trainable="transformer,text_encoder", dtype="bfloat16")
    with pytest.raises(CacheError) as caught:
        three.train(tmp_path / "o", model=wrong)
    assert "task: cached sft, requested direct_distill" in str(caught.value)
    assert "trainable: cached transformer, requested transformer,text_encoder" in str(caught.value)
    assert "dtype: cached float32, requested bfloat16" in str(caught.value)


def test_a_cache_of_another_model_is_refused_before_anything_loads(three, tmp_path, monkeypatch):
    monkeypatch.setattr("dsplit.training.run.load_component", None)
    folder = tiny.qwen_image(tmp_path / "model")
    config = folder / "vae" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(CacheError, match=r"another model than .*\n  vae/config.json: cached \w{32}, req") as caught:
        three.train(tmp_path / "o", model=model(model=str(folder)))
    assert "run `dsplit cache` with this model" in str(caught.value)
    assert not (tmp_path / "o").exists()


def test_what_was_not_stated_comes_from_the_cache(tmp_path):
    made = make(tmp_path, 2, model(dtype="bfloat16", trainable="text_encoder"))
    made.train(tmp_path / "o", model=model(model=None), max_steps=1)
    recipe = json.loads((tmp_path / "o" / "recipe.json").read_text())["resolved"]
    assert (recipe["dtype"], recipe["trainable"]) == ("bfloat16", ["text_encoder"])


def test_an_unstated_task_is_that_of_the_cache(distill, tmp_path):
    distill.train(tmp_path / "o", model=model(), max_steps=1)
    recipe = json.loads((tmp_path / "o" / "recipe.json").read_text())
    assert recipe["resolved"]["task"] == "direct_distill"
    assert "task" not in recipe["model"]
    with pytest.raises(CacheError, match="task: cached direct_distill, requested sft"):
        distill.train(tmp_path / "p", model=model(task="sft"))


def test_an_unknown_task_is_named_before_the_cache_is_read(tmp_path):
    with pytest.raises(UsageError, match="unknown task 'direct_destill'; known: direct_distill") as caught:
        run_train(model(task="direct_destill"), DataOptions(), TrainOptions(from_cache="nowhere", out=str(tmp_path)))
    assert caught.value.exit_code == 2


def test_an_incomplete_cache_is_refused(three, tmp_path):
    folder = tmp_path / "cache"
    shutil.copytree(three.cache, folder)
    for shard in folder.rglob("*.safetensors"):
        if any(load_file(shard)[k].ndim == 4 for k in load_file(shard)):
            shard.unlink()
    assert manifest_path(folder, "default").is_file()
    with pytest.raises(CacheError, match="cache incomplete: 0 of 3"):
        replace(three, cache=folder).train(tmp_path / "o")


def test_an_unknown_schedule_names_those_that_exist(three, tmp_path):
    with pytest.raises(UsageError, match="--lr-scheduler: unknown 'cosin'; choose from linear, cosine, "):
        three.train(tmp_path / "o", lr_scheduler="cosin")


def test_noise_seeded_on_a_device_that_is_not_here_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = make(
        tmp_path, 1, model(task="direct_distill"), seed=[1], rand_device=["cuda"], num_inference_steps=[2],
    )  # fmt: skip
    with pytest.raises(TrainingError, match=r"metadata.csv:2: rand_device is cuda"):
        made.train(tmp_path / "o")


def test_captions_that_an_unsplit_run_cuts_are_told_by_row(tmp_path, capfd):
    made = make(tmp_path, 2, prompts=["a cat", "word " * 600])
    told = [line for line in capfd.readouterr().err.splitlines() if "tokens" in line]
    made.train(tmp_path / "o", split=False, max_steps=1)
    assert [line for line in capfd.readouterr().err.splitlines() if "tokens" in line] == told
    assert "metadata.csv:3 (" in told[0]


def test_a_launchers_accumulation_does_not_scale_the_gradient_again(three, tmp_path, monkeypatch):
    three.train(tmp_path / "a", max_steps=2, lr=1e-3)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1000000000")
    three.train(tmp_path / "b", max_steps=2, lr=1e-3)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_an_output_that_is_a_file_is_refused(three, tmp_path):
    (tmp_path / "o").write_text("")
    with pytest.raises(TrainingError, match="is a file, not a folder"):
        three.train(tmp_path / "o")
