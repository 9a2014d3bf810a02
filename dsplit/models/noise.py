"""Noise processes: how sigma is drawn, noise is added, and a sample is integrated. torch is imported when built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FlowMatch:
    """Declares flow matching with the family's shift rule.

    patch: side of the latent patch that makes one token of the denoiser. scheduler: config of the default weights'
    `FlowMatchEulerDiscreteScheduler`, used where a model folder has no scheduler folder.
    """

    patch: int = 2
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    def build(self, config: Mapping[str, Any] | None = None) -> FlowMatchProcess:
        """The noise process for a model's scheduler config."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(config or self.scheduler))
        return FlowMatchProcess(scheduler, self.patch)


@dataclass(frozen=True)
class FlowMatchProcess:
    """Flow matching (Lipman et al. 2023; Liu et al. 2023): sigma 0 is clean, 1 is noise; every sigma is fp32."""

    scheduler: Any
    patch: int

    def mu(self, latents: torch.Tensor) -> float | None:
        """The shift for the size of `latents` (B, C, F, H, W) or (B, C, H, W); None where the scheduler's is fixed.

        Equals `calculate_shift` as the family's pipeline calls it.
        """
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        config = self.scheduler.config
        if not config.use_dynamic_shifting:
            return None
        frames = latents.shape[2] if latents.ndim == 5 else 1
        tokens = frames * (latents.shape[-2] // self.patch) * (latents.shape[-1] // self.patch)
        return calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )

    def shift(self, u: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Sigma of `u`, (B,) in [0, 1], moved toward noise by the shift for the size of `latents`."""
        mu = self.mu(latents)
        if mu is None:
            shift = self.scheduler.config.shift
            return shift * u / (1 + (shift - 1) * u)
        return self.scheduler.time_shift(mu, 1.0, u)

    def draw(self, rng: Any, latents: torch.Tensor, density: str = "uniform") -> torch.Tensor:
        """Sigma, (B,) fp32 in [0, 1], one per row; `density` names diffusers' density before the shift."""
        from diffusers.training_utils import compute_density_for_timestep_sampling

        def one(generator: torch.Generator) -> torch.Tensor:
            return compute_density_for_timestep_sampling(
                density, 1, logit_mean=0.0, logit_std=1.0, mode_scale=1.29, generator=generator
            )[0]

        return self.shift(rng.draw("sigma", one).to(latents.device), latents)

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """`(1 - sigma) * latents + sigma * noise`, fp32."""
        sigma = _like(sigma, latents)
        return (1 - sigma) * latents.float() + sigma * noise.float()

    def target(self, latents: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """What the denoiser is to predict: the velocity `noise - latents`, fp32."""
        return noise.float() - latents.float()

    def weight(self, sigma: torch.Tensor, weighting: str) -> torch.Tensor:
        """The loss weight of each sigma, (B,); equals diffusers' `compute_loss_weighting_for_sd3`."""
        from diffusers.training_utils import compute_loss_weighting_for_sd3

        return compute_loss_weighting_for_sd3(weighting, sigma)

    def schedule(self, latents: torch.Tensor, steps: int) -> torch.Tensor:
        """The `steps + 1` sigmas, from 1 to 0, that the family's pipeline infers with at the size of `latents`."""
        import numpy as np

        scheduler = type(self.scheduler).from_config(self.scheduler.config)
        sigmas = np.linspace(1.0, 1 / steps, steps)
        scheduler.set_timesteps(sigmas=sigmas, mu=self.mu(latents), device=latents.device)
        return scheduler.sigmas

    def step(
        self, sample: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor
    ) -> torch.Tensor:
        """The sample at `sigma_next`, fp32; equals `FlowMatchEulerDiscreteScheduler.step`, and carries gradients."""
        return sample.float() + (sigma_next - sigma) * velocity.float()


def _like(sigma: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    return sigma.view(-1, *[1] * (latents.ndim - 1))
