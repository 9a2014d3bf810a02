"""`--posterior sample`: mean and log-variance are stored, and latents drawn from them anew at each visit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import dsplit_qwen_image as plugin
import pytest
import torch
from diffusers import AutoencoderKLQwenImage

from dsplit import shapes, unit
from dsplit.cache.rows import CachedRows
from dsplit.errors import CacheError, UsageError
from dsplit.models import draw_latents, one_frame
from dsplit.models.registry import registry
from dsplit.training.batches import Reader
from dsplit.training.rng import Rng
from tests import tiny
from tests.training.conftest import Made, loras, losses, make, metrics, model, same

SAMPLED = ("latents_mean", "latents_logvar", "prompt_embeds", "prompt_mask")


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three rows whose cache holds the posterior."""
    return make(tmp_path_factory.mktemp("sampled"), 3, model(posterior="sample"))


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage.from_pretrained(tiny.QWEN_IMAGE / "vae", dtype=torch.float32).eval()


class Given:
    """An rng of one noise."""

    def __init__(self, noise: torch.Tensor) -> None:
        self.noise = noise

    def normal(self, purpose: str, like: torch.Tensor) -> torch.Tensor:
        return self.noise


def noise(seed: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [(64, 64), (96, 64)])
def test_a_draw_is_the_vaes_own_sample_normalised(vae, size):
    pixels = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    fast = one_frame(AutoencoderKLQwenImage.from_pretrained(tiny.QWEN_IMAGE / "vae", dtype=torch.float32).eval())
    with torch.no_grad():
        posterior = vae.encode(pixels.unsqueeze(2)).latent_dist
        values = plugin.encode_posterior({"pixels": pixels}, {"vae": fast})
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    expected = (posterior.sample(generator=torch.Generator().manual_seed(5)) - mean) / std
    rng = Given(noise(5, posterior.mean.shape))
    latents = draw_latents({**values, "rng": rng}, {})["latents"]
    assert (latents - expected).abs().max() < 1e-5
    still = draw_latents({**values, "rng": Given(torch.zeros(posterior.mean.shape))}, {})["latents"]
    assert (latents - still).abs().max() > 0.05  # the noise counts
    assert torch.equal(still, values["latents_mean"])
    assert torch.equal(still, plugin.encode_image({"pixels": pixels}, {"vae": fast})["latents"])
    names = {"vae.z_dim": 16, "H": size[0], "W": size[1]}
    for name, value in values.items():
        assert shapes.evaluate(plugin.encode_posterior.shapes[name], names) == tuple(value.shape[1:])


def test_draws_follow_the_posterior():
    """Over 4,000 visits: the mean within 4 standard errors, the spread within 4."""
    mean, logvar = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.0, -3.0]])
    draws = torch.cat(
        [
            draw_latents(
                {"latents_mean": mean, "latents_logvar": logvar, "rng": Rng(0, ["a"], [visit])}, {}
            )["latents"]
            for visit in range(4000)
        ]
    )  # fmt: skip
    std = (0.5 * logvar[0]).exp()
    assert ((draws.mean(0) - mean[0]).abs() < 4 * std / 4000**0.5).all()
    assert ((draws.std(0) / std - 1).abs() < 4 / 8000**0.5).all()


def test_a_rows_draw_is_its_own_and_new_at_each_visit():
    mean, logvar = noise(1, torch.Size((3, 16, 1, 8, 8))), noise(2, torch.Size((3, 16, 1, 8, 8)))

    def latents(rows: list[int], visits: list[int]) -> torch.Tensor:
        rng = Rng(0, [f"row{i}" for i in rows], visits)
        return draw_latents({"latents_mean": mean[rows], "latents_logvar": logvar[rows], "rng": rng}, {})["latents"]

    together = latents([0, 1, 2], [4, 4, 5])
    assert all(torch.equal(together[k], latents([k], [v])[0]) for k, v in enumerate((4, 4, 5)))
    assert not torch.equal(latents([0], [0]), latents([0], [1]))
    used = Rng(0, ["row0"], [0]).normal("noise", mean[:1])
    assert not torch.equal(latents([0], [0]), mean[:1] + (0.5 * logvar[:1]).exp() * used)  # not the noise of the loss


def test_bf16_is_drawn_in_fp32_and_rounded_once():
    mean, logvar = noise(1, torch.Size((1, 4))).bfloat16(), noise(2, torch.Size((1, 4))).bfloat16()
    given = noise(3, torch.Size((1, 4)))
    latents = draw_latents({"latents_mean": mean, "latents_logvar": logvar, "rng": Given(given)}, {})["latents"]
    assert latents.dtype == torch.bfloat16
    assert torch.equal(latents, (mean.float() + (logvar.float() / 2).exp() * given).bfloat16())


@pytest.mark.parametrize(
    ("trained", "boundary", "stage2"),
    [
        (("transformer",), SAMPLED, ["draw_latents", "denoise"]),
        (("vae",), ("pixels", "prompt_embeds", "prompt_mask"), ["encode_posterior", "draw_latents", "denoise"]),
    ],
)
def test_where_the_cut_lies(trained, boundary, stage2):
    family, task = registry().family("qwen-image"), registry().task("sft")
    split = family.split(task, trained, posterior="sample")
    assert split.boundary == boundary
    assert [u.name for u in split.stage2] == stage2
    assert "latents" in family.split(task, posterior="mean").boundary


def test_a_family_without_posterior_units_refuses():
    family = replace(registry().family("qwen-image"), name="other", posterior=())
    with pytest.raises(UsageError, match="--posterior sample: other has no units that sample") as caught:
        family.split(registry().task("sft"), posterior="sample")
    assert caught.value.exit_code == 2


def test_only_units_that_make_the_same_values_are_replaced():
    @unit(outputs="image_latents", components="vae")
    def encode_condition(pixels, vae):
        return pixels

    family = registry().family("qwen-image")
    family = replace(family, units=(*family.units, encode_condition))
    names = [u.name for u in family.units_for("sample")]
    assert names == ["load_image", "encode_posterior", "draw_latents", "encode_prompt", "encode_condition"]


def test_the_cache_holds_mean_and_log_variance(sampled):
    rows = CachedRows(sampled.cache)
    assert rows.header["posterior"] == "sample"
    values = rows.values(0)
    assert sorted(values) == sorted(SAMPLED)
    assert values["latents_mean"].shape == values["latents_logvar"].shape == (16, 1, 8, 8)


@pytest.mark.parametrize("trained", ["transformer", "vae", "transformer,text_encoder"])
def test_split_and_unsplit_are_equal(tmp_path: Path, sampled, trained):
    made = sampled if trained == "transformer" else make(tmp_path, 3, model(posterior="sample", trainable=trained))
    options = {"max_steps": 5, "lr": 1e-3, "batch_size": 2, "repeat": 2}
    options |= {"targets": "to_qkv,proj"} if trained == "vae" else {}
    made.train(tmp_path / "split", **options)
    made.train(tmp_path / "unsplit", split=False, **options)
    assert metrics(tmp_path / "split") == metrics(tmp_path / "unsplit")
    split, unsplit = loras(tmp_path / "split"), loras(tmp_path / "unsplit")
    assert split
    assert all(same(split[name], unsplit[name]) for name in split)
    assert json.loads((tmp_path / "split" / "recipe.json").read_text())["resolved"]["posterior"] == "sample"


def test_direct_distill_aims_at_the_sample(tmp_path: Path):
    columns = {"seed": [3, 4], "rand_device": ["cpu", "cpu"], "num_inference_steps": [2, 2]}
    made = make(tmp_path, 2, model(task="direct_distill", posterior="sample"), **columns)
    made.train(tmp_path / "split", max_steps=4)
    made.train(tmp_path / "unsplit", split=False, max_steps=4)
    made.train(tmp_path / "mean", split=False, max_steps=4, model=model(task="direct_distill"))
    assert losses(tmp_path / "split") == losses(tmp_path / "unsplit")
    assert losses(tmp_path / "split") != losses(tmp_path / "mean")


def test_a_cache_of_the_other_posterior_is_refused(three, sampled, tmp_path: Path):
    with pytest.raises(CacheError, match="posterior: cached mean, requested sample"):
        three.train(tmp_path / "o", model=model(posterior="sample"))
    with pytest.raises(CacheError, match="posterior: cached sample, requested mean"):
        sampled.train(tmp_path / "o", model=model(posterior="mean"))
    sampled.train(tmp_path / "o", model=model(), max_steps=1)  # not stated: the cache's


def test_one_reader_serves_both(sampled):
    batch = Reader(CachedRows(sampled.cache), {"prompt_embeds": 0, "prompt_mask": 0})[[(0, 0), (2, 1)]]
    assert batch["latents_mean"].shape == (2, 16, 1, 8, 8)
