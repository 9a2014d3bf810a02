"""Units that several families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsplit.units import unit

if TYPE_CHECKING:
    from typing import Any

    import torch

    from dsplit.dataset.packed import Source
    from dsplit.dataset.rows import View


@unit(outputs="pixels", version=2, shapes={"pixels": "3, H, W"}, dtypes={"pixels": "float32"})
def load_image(image: list[Source], size: list[tuple[int, int]], view: list[View]) -> torch.Tensor:
    """image: B files, size: B times (W, H), view: B windows -> pixels: (B, 3, H, W) in [-1, 1], upright, on white."""
    import torch

    from dsplit.dataset.images import pixels

    return torch.stack([torch.from_numpy(pixels(*one)) for one in zip(image, size, view, strict=True)])


@unit(outputs="latents", random=True)
def draw_latents(latents_mean: torch.Tensor, latents_logvar: torch.Tensor, rng: Any) -> torch.Tensor:
    """latents_mean, latents_logvar: (B, ...) -> latents: (B, ...), of their dtype; drawn in fp32, anew at each visit.

    `mean + exp(logvar / 2) * noise` (Kingma & Welling 2013, eq. 10); equals `latent_dist.sample()` of diffusers' VAEs.
    """
    noise = rng.normal("posterior", latents_mean)
    return (latents_mean.float() + (0.5 * latents_logvar.float()).exp() * noise).to(latents_mean.dtype)
