"""The denoiser: which units run when, and what stands in under the negative prompt."""

import pytest
import torch

from dsplit import unit
from dsplit.models.load import load_component
from dsplit.models.locate import locate
from dsplit.models.registry import registry
from dsplit.training.batches import Reader, ragged_axes
from dsplit.training.denoiser import Denoiser, late
from dsplit.training.objective import Objective
from dsplit.training.rng import Rng
from tests.training.conftest import model


@unit(outputs="prompt_embeds")
def encode(prompt):
    return prompt


@unit(outputs="scaled")
def scale(noisy_latents, prompt_embeds):
    return noisy_latents * prompt_embeds


@unit(outputs="velocity")
def denoise(scaled, sigma):
    return scaled + sigma


@unit(outputs="mask")
def make_mask(prompt_embeds):
    return prompt_embeds > 0


def test_units_that_read_drawn_values_run_at_each_call_the_rest_once():
    once, each = late([encode, make_mask, scale, denoise])
    assert once == [encode, make_mask]
    assert each == [scale, denoise]


@pytest.fixture(scope="module")
def family():
    return registry().family("qwen-image")


def test_the_negative_prompt_stands_in_for_the_prompt(family):
    values = {"prompt_embeds": torch.tensor([2.0]), "negative_prompt_embeds": torch.tensor([-3.0])}
    d = Denoiser(family, [scale, denoise], {}, values, None)
    x, sigma = torch.tensor([10.0]), torch.tensor([0.5])
    assert d(x, sigma).tolist() == [20.5]
    assert d.negative(x, sigma).tolist() == [-29.5]
    assert d(x, sigma).tolist() == [20.5]


def test_scale_1_needs_no_negative_prompt(family):
    d = Denoiser(family, [scale, denoise], {}, {"prompt_embeds": torch.tensor([2.0])}, None)
    assert d.guided(torch.tensor([10.0]), torch.tensor([0.5]), 1.0).tolist() == [20.5]


def test_guidance_is_the_familys_own_over_both_prompts(family, distill):
    """The real transformer on a cached row with cfg_scale 2.5."""
    from dsplit.cache.rows import CachedRows

    rows = CachedRows(distill.cache)
    task = registry().task("direct_distill")
    found = locate(model())
    components = {"transformer": load_component(found, "transformer", torch.float32, "cpu")}
    options = {"fixed_noise": False}
    objective = Objective(family, task, components, ["transformer"], family.noise.build(None), 0, options)
    i = next(i for i in range(len(rows)) if rows.columns(i)["cfg_scale"] == 2.5)
    batch = Reader(rows, ragged_axes(objective.widest))[[(i, 0)]]
    assert set(batch.values) >= {"negative_prompt_embeds", "negative_prompt_mask"}
    d = Denoiser(family, objective.units[True][1], components, batch.values, objective.process)
    x = Rng(0, batch.ids, batch.visits).normal("noise", batch["latents"])
    sigma = torch.tensor([0.7])
    positive, negative = d(x, sigma), d.negative(x, sigma)
    assert not torch.equal(positive, negative)
    assert torch.equal(d.guided(x, sigma, 2.5), family.guide(positive, negative, 2.5))
    transformer = components["transformer"]
    swapped = {
        "prompt_embeds": batch["negative_prompt_embeds"],
        "prompt_mask": batch["negative_prompt_mask"],
        "noisy_latents": x,
        "sigma": sigma,
    }
    assert torch.equal(negative, family.denoise(swapped, {"transformer": transformer})["velocity"])


def test_a_rows_loss_does_not_depend_on_its_batch(family, eight):
    """Per-row losses within 1e-5 of those of single rows; noise and sigma are equal bit for bit (test_rng)."""
    from dsplit.cache.rows import CachedRows

    rows = CachedRows(eight.cache)
    components = {"transformer": load_component(locate(model()), "transformer", torch.float32, "cpu")}
    options = {"weighting": "none", "sigma_density": "logit_normal"}
    task = registry().task("sft")
    objective = Objective(family, task, components, ["transformer"], family.noise.build(None), 0, options)
    reader = Reader(rows, ragged_axes(objective.widest))
    wide = [(i, 3) for i in range(len(rows)) if rows.group(i) == (96, 64)]
    assert len(wide) == 5
    with torch.no_grad():
        together = objective(reader[wide])
        alone = torch.cat([objective(reader[[visit]]) for visit in wide])
    assert together.shape == (5,)
    assert together.dtype == torch.float32
    assert torch.allclose(together, alone, atol=1e-5)
    assert len({round(v, 3) for v in alone.tolist()}) == 5
