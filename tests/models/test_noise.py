"""Flow matching equals diffusers' scheduler: the shift, the inference schedule, the step, and the noisy sample."""

import math

import dsplit_qwen_image as plugin
import pytest
import torch

LATENTS = torch.randn(2, 16, 1, 8, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def process():
    return plugin.QWEN_IMAGE.noise.build()


def test_mu_depends_on_the_tokens_as_in_the_pipeline(process):
    tokens = 4 * 6
    slope = (0.9 - 0.5) / (8192 - 256)
    assert process.mu(LATENTS) == pytest.approx(tokens * slope + 0.5 - slope * 256)
    large = torch.empty(1, 16, 1, 128, 128)
    assert process.mu(large) == pytest.approx(4096 * slope + 0.5 - slope * 256)


def test_shift_is_monotonic_keeps_the_ends_and_moves_toward_noise(process):
    u = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    sigma = process.shift(u, LATENTS)
    mu = process.mu(LATENTS)
    assert sigma[0] == 0
    assert sigma[-1] == 1
    assert sigma[2].item() == pytest.approx(math.exp(mu) / (math.exp(mu) + 1), abs=1e-6)
    assert (sigma.diff() > 0).all()
    assert (sigma[1:4] > u[1:4]).all()


@pytest.mark.parametrize("steps", [2, 4, 9])
def test_schedule_and_step_equal_the_schedulers(process, steps):
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(plugin.QWEN_IMAGE.noise.scheduler))
    sigmas = process.schedule(LATENTS, steps)
    import numpy as np

    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=process.mu(LATENTS))
    assert torch.equal(sigmas, scheduler.sigmas)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert sigmas[-2].item() == pytest.approx(0.02, abs=1e-6)
    ours = theirs = LATENTS
    velocity = torch.randn(LATENTS.shape, generator=torch.Generator().manual_seed(1))
    for k, t in enumerate(scheduler.timesteps):
        ours = process.step(ours, velocity, sigmas[k], sigmas[k + 1])
        theirs = scheduler.step(velocity, t, theirs, return_dict=False)[0]
        assert torch.equal(ours, theirs)


def test_noisy_sample_and_target_are_consistent(process):
    noise = torch.randn(LATENTS.shape, generator=torch.Generator().manual_seed(2))
    sigma = torch.tensor([0.25, 0.75])
    noisy = process.add_noise(LATENTS, noise, sigma)
    target = process.target(LATENTS, noise, sigma)
    clean = torch.stack([process.step(noisy[i], target[i], sigma[i], torch.tensor(0.0)) for i in range(2)])
    assert torch.allclose(clean, LATENTS, atol=1e-6)
    assert torch.equal(process.add_noise(LATENTS, noise, torch.ones(2)), noise)


def test_sigma_is_fp32_even_for_bf16_latents(process):
    class Rng:
        def draw(self, purpose, draw):
            assert purpose == "sigma"
            return torch.stack([draw(torch.Generator().manual_seed(i)) for i in range(1000)])

    latents = torch.zeros(1000, 16, 1, 2, 2, dtype=torch.bfloat16)
    sigma = process.draw(Rng(), latents)
    assert sigma.dtype == torch.float32
    assert sigma.shape == (1000,)
    assert len(set(sigma.tolist())) == 1000
    assert 0 <= sigma.min() < sigma.max() <= 1


def test_weightings_are_diffusers(process):
    sigma = torch.tensor([0.1, 0.5, 0.9])
    assert torch.equal(process.weight(sigma, "none"), torch.ones(3))
    assert torch.allclose(process.weight(sigma, "sigma_sqrt"), sigma**-2.0)
    bottom = 1 - 2 * sigma + 2 * sigma**2
    assert torch.allclose(process.weight(sigma, "cosmap"), 2 / (math.pi * bottom))
