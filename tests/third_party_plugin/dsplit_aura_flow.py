"""AuraFlow: a 6.8B flow-matching transformer over the latents of SDXL's VAE, conditioned on Pile-T5."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dsplit import Column, Component, ModelFamily, hookimpl, unit
from dsplit.models import FlowMatch, draw_latents, load_image

if TYPE_CHECKING:
    import torch

TOKENS = 256  # AuraFlowPipeline pads every prompt with zeros to this length, and the transformer attends to them


@unit(outputs="latents", components="vae", version=1, shapes={"latents": "vae.latent_channels, H/8, W/8"})
def encode_image(pixels: torch.Tensor, vae: Any) -> torch.Tensor:
    """pixels: (B, 3, H, W) in [-1, 1] -> latents: (B, 4, H/8, W/8); the inverse of the pipeline's decoding."""
    return vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode() * vae.config.scaling_factor


@unit(
    outputs="latents_mean latents_logvar",
    components="vae",
    version=1,
    shapes={"latents_mean": "vae.latent_channels, H/8, W/8", "latents_logvar": "vae.latent_channels, H/8, W/8"},
)
def encode_posterior(pixels: torch.Tensor, vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """pixels: (B, 3, H, W) in [-1, 1] -> latents_mean, latents_logvar: (B, 4, H/8, W/8), of the scaled latents."""
    posterior, scale = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist, vae.config.scaling_factor
    return posterior.mean * scale, posterior.logvar + 2 * math.log(scale)


@unit(
    outputs="prompt_embeds",
    components="text_encoder tokenizer",
    version=1,
    shapes={"prompt_embeds": "L, text_encoder.d_model"},
)
def encode_prompt(prompt: list[str], text_encoder: Any, tokenizer: Any) -> torch.Tensor:
    """prompt: B texts -> prompt_embeds: (B, L, 2048), L the longest prompt's tokens, at most 256; zeros after a prompt.

    Equals `AuraFlowPipeline.encode_prompt` without the zeros that all rows end in: `denoise` puts them back.
    """
    from diffusers import AuraFlowPipeline

    pipeline = AuraFlowPipeline(tokenizer, text_encoder, None, None, None)
    embeds, mask, _, _ = pipeline.encode_prompt(
        prompt, do_classifier_free_guidance=False, device=text_encoder.device, max_sequence_length=TOKENS
    )
    tokens = mask.view(embeds.shape)[:, :, 0].sum(1)
    return embeds[:, : max(1, int(tokens.max()))]


@unit(outputs="velocity", components="transformer", version=1, shapes={"velocity": "vae.latent_channels, H/8, W/8"})
def denoise(
    noisy_latents: torch.Tensor, sigma: torch.Tensor, prompt_embeds: torch.Tensor, transformer: Any
) -> torch.Tensor:
    """noisy_latents: (B, 4, h, w), sigma: (B,) -> velocity: (B, 4, h, w), `noise - latents`.

    Equals the transformer call of `AuraFlowPipeline.__call__` (its `t / 1000` is sigma).
    """
    from torch.nn.functional import pad

    padded = pad(prompt_embeds, (0, 0, 0, TOKENS - prompt_embeds.shape[1]))
    latents = noisy_latents.to(padded.dtype)
    return transformer(latents, encoder_hidden_states=padded, timestep=sigma, return_dict=False)[0]


AURA_FLOW = ModelFamily(
    name="aura-flow",
    title="AuraFlow",
    pipeline="diffusers.AuraFlowPipeline",
    repos={"huggingface": "fal/AuraFlow-v0.3"},
    components=(
        Component("transformer", "diffusers.AuraFlowTransformer2DModel"),
        Component("vae", "diffusers.AutoencoderKL"),
        Component("text_encoder", "transformers.UMT5EncoderModel"),
        Component("tokenizer", "transformers.AutoTokenizer", weights=False),
        Component("scheduler", "diffusers.FlowMatchEulerDiscreteScheduler", weights=False),
    ),
    columns=(Column("image", "file"), Column("prompt", required=False, default="")),
    units=(load_image, encode_image, encode_prompt),
    posterior=(encode_posterior, draw_latents),
    denoise=denoise,
    noise=FlowMatch(patch=2, scheduler={"shift": 1.73}),
    tasks={"sft": True},
    lora_targets=("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    config={"vae.latent_channels": 4, "text_encoder.d_model": 2048},
)


@hookimpl
def dsplit_register_families() -> list[ModelFamily]:
    return [AURA_FLOW]
