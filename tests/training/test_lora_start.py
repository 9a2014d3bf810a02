"""`--init-lora`: training goes on from the weights of a file, of any format, or says why it cannot."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dsplit.cache.rows import CachedRows
from dsplit.cli import main
from dsplit.errors import ModelError, TrainingError, UsageError
from dsplit.models.load import load_component
from dsplit.models.locate import locate
from dsplit.models.registry import registry
from dsplit.recipe import TrainOptions
from dsplit.training.batches import Reader, ragged_axes
from dsplit.training.objective import Objective
from tests import tiny
from tests.training.conftest import Made, loras, losses, metrics, model


@pytest.fixture(scope="module")
def first(three: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The LoRA of a run of two steps, per format; the rates are high, so that it changes the loss."""
    files = {}
    for lora_format in ("diffusers", "comfyui", "diffsynth"):
        out = tmp_path_factory.mktemp(lora_format)
        three.train(out, max_steps=2, lr=3e-2, alpha=6, lora_format=lora_format)
        (files[lora_format],) = out.glob("*.safetensors")
    return files


def loss_with(made: Made, file: Path | None, out: Path) -> float:
    """The loss of the row that the run in `out` saw first, the LoRA put on by diffusers' own loader."""
    found = locate(model())
    names = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
    parts = {name: load_component(found, name, torch.float32, "cpu") for name in names}
    if file:
        QwenImagePipeline(**parts).load_lora_weights(file.parent, weight_name=file.name)
    family, task = found.family, registry().task("sft")
    process = family.noise.build(found.config("scheduler"))
    options = vars(TrainOptions())
    objective = Objective(family, task, parts, ["transformer"], process, 0, options)
    rows = CachedRows(made.cache)
    (seen,) = metrics(out)[0]["rows"]
    batch = Reader(rows, ragged_axes(objective.widest)).read([(list(rows.ids).index(seen), 0)])
    with torch.no_grad():
        return float(objective(batch))


@pytest.mark.parametrize("lora_format", ["diffusers", "comfyui", "diffsynth"])
def test_the_first_loss_is_that_of_the_file(
    three: Made, first: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], lora_format: str
) -> None:
    three.train(tmp_path / "o", max_steps=1, rank=None, init_lora=str(first[lora_format]))
    (loss,) = losses(tmp_path / "o")
    expected, without = (loss_with(three, file, tmp_path / "o") for file in (first["diffusers"], None))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert abs(loss - without) > 1e-3 * without
    said = capfd.readouterr().err
    assert f"{first[lora_format]}: 96 of 96 keys loaded" in said
    assert "rank 4, alpha 6" in said


def test_weights_and_alpha_are_the_files_bit_for_bit(three: Made, first: dict[str, Path], tmp_path: Path) -> None:
    """At a learning rate too small for fp32, a step changes nothing."""
    options = {"max_steps": 1, "rank": None, "lr": 1e-38, "weight_decay": 0.0}
    three.train(tmp_path / "o", init_lora=str(first["comfyui"]), **options)
    (made,) = loras(tmp_path / "o").values()
    before = load_file(first["diffusers"])
    assert made.keys() == before.keys()
    assert all(torch.equal(made[k], before[k]) for k in made)
    with safe_open(tmp_path / "o" / "epoch-0.safetensors", "pt") as new, safe_open(first["diffusers"], "pt") as old:
        assert new.metadata() == old.metadata()


def test_an_unsplit_run_starts_from_it_too(three: Made, first: dict[str, Path], tmp_path: Path) -> None:
    for split in (True, False):
        three.train(tmp_path / str(split), split=split, max_steps=1, init_lora=str(first["diffusers"]))
    assert losses(tmp_path / "True") == losses(tmp_path / "False")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 8}, "--rank 8, but --init-lora .* has rank 4; leave --rank out"),
        ({"alpha": 4}, "--alpha 4, but --init-lora .* has alpha 6; leave --alpha out"),
        ({"targets": "to_q"}, r"adapts 48 modules, this run 4: '.*' is in the file alone; .*--targets .*to_q"),
        ({"targets": "to_q,proj_out"}, r"'transformer.proj_out' is not in the file; '.*' is in the file alone"),
    ],
)  # fmt: skip
def test_what_the_user_states_must_agree(
    three: Made, first: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, said: str
) -> None:
    monkeypatch.setattr("dsplit.training.run.load_component", None)
    with pytest.raises(UsageError, match=said):
        three.train(tmp_path / "o", init_lora=str(first["diffusers"]), **options)
    assert not (tmp_path / "o").exists()


def test_the_targets_that_the_message_names_do_work(three: Made, tmp_path: Path) -> None:
    three.train(tmp_path / "few", max_steps=1, targets="to_q,img_mlp.net.2")
    file = str(tmp_path / "few" / "epoch-0.safetensors")
    with pytest.raises(UsageError, match="this run 48") as error:
        three.train(tmp_path / "o", init_lora=file)
    targets = str(error.value).rpartition("--targets ")[2]
    assert targets == "attn.to_q,img_mlp.net.2"
    three.train(tmp_path / "o", max_steps=1, init_lora=file, targets=targets)
    assert loras(tmp_path / "o")["epoch-0.safetensors"].keys() == loras(tmp_path / "few")["epoch-0.safetensors"].keys()


def test_a_lora_of_another_model_is_refused_before_anything_loads(
    three: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsplit.training.run.load_component", None)
    path = tmp_path / "foreign.safetensors"
    save_file({f"other.block.{k}.lora_{s}.weight": torch.zeros(4, 4) for k in range(3) for s in "AB"}, path)
    with pytest.raises(ModelError, match=r"0 of 6 keys fit .*'other\.block\.0\.lora_A.*; the model has 'transformer\."):
        three.train(tmp_path / "o", init_lora=str(path))
    with pytest.raises(TrainingError, match=r"gone\.safetensors: not readable"):
        three.train(tmp_path / "o", init_lora=str(tmp_path / "gone.safetensors"))
    assert not (tmp_path / "o").exists()


def test_modules_of_several_ranks_are_refused(three: Made, first: dict[str, Path], tmp_path: Path) -> None:
    state = load_file(first["comfyui"])
    name = next(k for k in state if ".lora_A." in k)
    for side, halved in (("A", lambda t: t[:2]), ("B", lambda t: t[:, :2])):
        key = name.replace(".lora_A.", f".lora_{side}.")
        state[key] = halved(state[key]).contiguous()
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(TrainingError, match=r"its modules differ in rank \(2, 4\)"):
        three.train(tmp_path / "o", init_lora=str(tmp_path / "x.safetensors"))


def test_a_trained_text_encoder_is_loaded_too(three: Made, tmp_path: Path) -> None:
    both = model(trainable="transformer,text_encoder")
    three.train(tmp_path / "one", split=False, model=both, max_steps=2, lr=1e-2)
    file = tmp_path / "one" / "epoch-0.safetensors"
    three.train(tmp_path / "two", split=False, model=both, max_steps=1, lr=1e-38, weight_decay=0.0, init_lora=str(file))
    before, (after,) = load_file(file), loras(tmp_path / "two").values()
    assert {k.partition(".")[0] for k in before} == {"transformer", "text_encoder"}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_the_references_name_means_the_same(three: Made, first: dict[str, Path], tmp_path: Path) -> None:
    words = f"train --from-cache {three.cache} --model {tiny.QWEN_IMAGE} --max-steps 1 --device cpu"
    for name, file in (("a", first["diffsynth"]), ("b", "")):
        assert main([*shlex.split(words), "--out", str(tmp_path / name), "--lora_checkpoint", str(file)]) == 0
    assert losses(tmp_path / "a") == pytest.approx([loss_with(three, first["diffusers"], tmp_path / "a")], rel=1e-5)
    assert losses(tmp_path / "b") == pytest.approx([loss_with(three, None, tmp_path / "b")], rel=1e-5)
