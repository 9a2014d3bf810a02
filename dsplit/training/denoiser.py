"""The trained model as the tasks see it: a callable over noisy latents and sigma, built from the units of stage 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsplit.models.family import DRAWN, ModelFamily
from dsplit.units import Unit

NEGATIVE = "negative_"


def late(units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
    """The units of stage 2 that run once per batch, and those that run at each call of the denoiser."""
    drawn = set(DRAWN)
    once: list[Unit] = []
    each: list[Unit] = []
    for u in units:
        if drawn & set(u.inputs):
            drawn |= set(u.outputs)
            each.append(u)
        else:
            once.append(u)
    return once, each


def run_units(units: Sequence[Unit], values: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    """`values` and everything that `units`, run in order, make of them."""
    done = dict(values)
    for u in units:
        done |= u(done, components)
    return done


@dataclass(frozen=True)
class Denoiser:
    """`denoise(noisy_latents, sigma)` -> what the family's noise process asks for (`velocity`), for one batch.

    units: those that read drawn values. values: everything else that they read. process: the noise process.
    """

    family: ModelFamily
    units: Sequence[Unit]
    components: Mapping[str, Any]
    values: Mapping[str, Any]
    process: Any

    def __call__(self, noisy_latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """noisy_latents: (B, ...), sigma: (B,) fp32 -> the prediction, of the shape of noisy_latents."""
        drawn = dict(zip(DRAWN, (noisy_latents, sigma), strict=True))
        return run_units(self.units, {**self.values, **drawn}, self.components)[self.family.denoise.outputs[0]]

    def negative(self, noisy_latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """The prediction under the negative prompt: `negative_X` stands in for every value X that has one."""
        stand_ins = {k.removeprefix(NEGATIVE): v for k, v in self.values.items() if k.startswith(NEGATIVE)}
        values = {**self.values, **stand_ins}
        return Denoiser(self.family, self.units, self.components, values, self.process)(noisy_latents, sigma)

    def guided(self, noisy_latents: torch.Tensor, sigma: torch.Tensor, scale: float) -> torch.Tensor:
        """The prediction with classifier-free guidance as the family's pipeline combines it; one pass at scale 1."""
        positive = self(noisy_latents, sigma)
        if scale == 1.0:
            return positive
        return self.family.guide(positive, self.negative(noisy_latents, sigma), scale)
