"""The two tasks of split training: supervised fine-tuning and direct distillation."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dsplit import Column, Task, hookimpl

if TYPE_CHECKING:
    import torch


def sft(denoise: Any, batch: Any, rng: Any, *, weighting: str = "none", sigma_density: str = "uniform") -> torch.Tensor:
    """The loss of each row, (B,): `w(sigma) * || denoise(x_sigma, sigma) - target ||^2`, meaned over the latents.

    Flow matching (Lipman et al. 2023), sigma drawn through the family's shift; the weightings are those of Esser et
    al. 2024 as diffusers names them.
    """
    process, latents = denoise.process, batch["latents"]
    noise = rng.normal("noise", latents)
    sigma = process.draw(rng, latents, sigma_density)
    prediction = denoise(process.add_noise(latents, noise, sigma), sigma)
    error = (prediction.float() - process.target(latents, noise, sigma)) ** 2
    return process.weight(sigma, weighting) * error.flatten(1).mean(1)


def direct_distill(denoise: Any, batch: Any, rng: Any, *, fixed_noise: bool = False) -> torch.Tensor:
    """The loss of each row, (B,): the mean squared distance of the student's own sample from the row's picture.

    The student infers from the row's seed through the family's inference schedule for the row's size, in
    `num_inference_steps` steps with gradients kept throughout; rows without a seed get new noise at each visit.
    """
    process, latents = denoise.process, batch["latents"]
    sample = rng.seeded(batch["seed"], batch["rand_device"], latents, fixed=fixed_noise)
    sigmas = process.schedule(latents, batch["num_inference_steps"][0])
    for sigma, sigma_next in itertools.pairwise(sigmas):
        velocity = denoise.guided(sample, sigma.expand(len(sample)), batch["cfg_scale"][0])
        sample = process.step(sample, velocity, sigma, sigma_next)
    return ((sample - latents.float()) ** 2).flatten(1).mean(1)


SFT = Task(
    "sft",
    sft,
    "supervised fine-tuning: predict the noise of the data set's pictures",
    options=("weighting", "sigma_density"),
)
DIRECT_DISTILL = Task(
    "direct_distill",
    direct_distill,
    "few-step distillation: reach the picture from its own seed in a few steps",
    columns=(
        Column("seed", "int", required=False),
        Column("rand_device", "text", required=False, choices=("cpu", "cuda"), needed_with="seed"),
        Column("num_inference_steps", "int", minimum=1),
        Column("cfg_scale", "float", required=False, default=1.0),
    ),
    group_by=("num_inference_steps", "cfg_scale"),
    options=("fixed_noise",),
    negative_if=lambda columns: columns["cfg_scale"] != 1.0,
)


@hookimpl
def dsplit_register_tasks() -> list[Task]:
    return [SFT, DIRECT_DISTILL]
