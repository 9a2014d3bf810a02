"""What a run takes from its model and its rows: the schedule of sigma, and the columns that cross."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from dsplit import unit
from dsplit.dataset import Row
from dsplit.dataset.rows import View
from dsplit.errors import TrainingError, UsageError
from dsplit.models.captions import perhaps_long
from dsplit.models.locate import locate
from dsplit.models.registry import registry
from dsplit.recipe import ModelOptions
from dsplit.training.job import Job, check_devices, refuse_dropout
from dsplit.training.live import LiveRows
from dsplit.units import Split
from tests import tiny
from tests.training.test_batches import Few

LATENTS = torch.zeros(1, 16, 1, 8, 8)
HALF = torch.tensor([0.5])


@unit(outputs="said")
def say(prompt):
    """Captions in capitals."""
    return [text.upper() for text in prompt]


def job(folder) -> Job:
    task = registry().task("sft")
    model = locate(ModelOptions(model=str(folder)))
    return Job(model.family, task, ("transformer",), model, torch.float32, {}, LiveRows([], lambda row: None, {}))


def test_sigma_is_drawn_through_the_shift_of_the_models_own_scheduler(tmp_path, capsys):
    folder = tiny.qwen_image(tmp_path / "model")
    config = folder / "scheduler" / "scheduler_config.json"
    fixed = json.loads(config.read_text()) | {"use_dynamic_shifting": False, "shift": 7.0}
    config.write_text(json.dumps(fixed))
    sigma = job(folder).noise_process().shift(HALF, LATENTS)
    assert sigma.item() == pytest.approx(7 * 0.5 / (1 + 6 * 0.5))
    assert capsys.readouterr().err == ""


def test_a_model_without_a_scheduler_is_warned_of(tmp_path, capsys):
    folder = tiny.qwen_image(tmp_path / "model")
    shutil.rmtree(folder / "scheduler")
    default = job(folder).noise_process()
    assert default.shift(HALF, LATENTS) == job(tiny.QWEN_IMAGE).noise_process().shift(HALF, LATENTS)
    assert "has no scheduler folder: the schedule of Qwen-Image's own weights is used" in capsys.readouterr().err


def test_the_size_crosses_in_an_unsplit_run_as_from_a_cache():
    row = Row("0", "metadata.csv", 2, {"prompt": "a cat"}, {}, (70, 70), (64, 48))
    split = Split((), (), (), ("prompt", "size"))
    assert LiveRows([row], lambda _: split, {}).columns(0) == {"prompt": "a cat", "size": (64, 48)}


def test_live_rows_show_the_variants_that_are_chosen():
    captions, views = ("a cat", "one cat", "cat"), (View(0, 0), View(0, 0, True))
    row = Row(
        "0", "metadata.csv", 2, {"prompt": "a cat", "negative_prompt": "grey"}, {}, (64, 64), (64, 48),
        view=views[0], variants={"prompt": captions, "view": views},
    )  # fmt: skip
    split = Split((say,), (), ("said",), ("prompt", "view", "negative_prompt"))
    rows = LiveRows([row], lambda _: split, {})
    assert rows.variants(0) == {"prompt": 3, "view": 2}
    assert rows.columns(0) == {"prompt": "a cat", "view": views[0], "negative_prompt": "grey"}
    assert rows.columns(0, {"prompt": 2, "view": 1}) == {"prompt": "cat", "view": views[1], "negative_prompt": "grey"}
    assert rows.columns(0, {"prompt": None}) == {"prompt": "", "view": views[0], "negative_prompt": "grey"}
    assert [rows.values(0, {"prompt": k})["said"] for k in (0, 1, 2, None)] == ["A CAT", "ONE CAT", "CAT", ""]


@unit(outputs="scene", components="text_encoder")
def describe(pixels, prompt, text_encoder):
    return prompt


def test_dropout_needs_a_prompt_and_from_a_cache_its_empty_twins():
    family, cached = registry().family("qwen-image"), {"axes": {"prompt_embeds": ["prompt"], "latents": ["view"]}}
    header = {**cached, "empty_prompt": {"prompt_embeds": "k"}}
    whole = replace(job(tiny.QWEN_IMAGE), header=header, rows=Few([1]))
    refuse_dropout(whole)
    refuse_dropout(replace(whole, header={}))  # unsplit

    @unit(outputs="velocity", components="transformer")
    def with_scene(noisy_latents, sigma, scene, prompt_embeds, transformer):
        return scene

    @unit(outputs="velocity", components="transformer")
    def alone(noisy_latents, sigma, transformer):
        return noisy_latents

    seen = replace(family, units=(*family.units, describe), denoise=with_scene)
    axes = {**cached["axes"], "scene": ["view", "prompt"]}
    twinless = replace(whole, family=seen, header={"axes": axes, "empty_prompt": {"prompt_embeds": "k"}})
    with pytest.raises(UsageError, match="--prompt-dropout: the cache has no scene of the empty prompt") as caught:
        refuse_dropout(twinless)
    assert caught.value.exit_code == 2
    refuse_dropout(replace(twinless, header={}))
    with pytest.raises(UsageError, match="--prompt-dropout: qwen-image reads no prompt"):
        refuse_dropout(replace(whole, family=replace(family, denoise=alone)))


class Seeded:
    """Rows with seeds of CUDA; which were read is kept."""

    ids = ("a", "b", "c", "d")

    def __init__(self):
        self.read = []

    def place(self, i):
        return f"metadata.csv:{i + 2}"

    def columns(self, i):
        self.read.append(i)
        return {"seed": [1, None, 2, 3][i], "rand_device": ["cpu", "cuda", "cuda", "cuda"][i]}


def test_seeds_of_a_device_that_is_not_here_are_counted_and_the_first_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match=r"metadata.csv:4: rand_device is cuda, .* \(2 such rows\)"):
        check_devices(Seeded(), ("seed", "rand_device"))


@pytest.mark.parametrize(("crossing", "cuda"), [(("size",), False), (("seed", "rand_device"), True)])
def test_no_row_is_read_for_its_device_where_none_can_be_wrong(monkeypatch, crossing, cuda):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    rows = Seeded()
    check_devices(rows, crossing)
    assert rows.read == []


def test_every_caption_of_a_row_is_looked_at_for_its_length():
    long, longer = "long " * 110, "longer " * 110
    row = Row(
        "0", "m.csv", 2, {"prompt": "a cat"}, {}, (64, 64), (64, 48), variants={"prompt": ("a cat", long, longer)}
    )
    model = locate(ModelOptions(model=str(tiny.QWEN_IMAGE)))
    split = model.family.split(registry().task("sft"))
    assert perhaps_long(model, [row], lambda _: split) == {"prompt": {long: ["m.csv:2"], longer: ["m.csv:2"]}}
