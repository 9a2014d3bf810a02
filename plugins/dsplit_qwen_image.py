"""Qwen-Image: a 20B flow-matching transformer over the latents of a causal 3D VAE, conditioned on Qwen2.5-VL."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

from dsplit import Column, Component, ModelFamily, hookimpl, unit
from dsplit.models import FlowMatch, draw_latents, load_image, one_frame, unrounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

TOKEN_LIMIT = 512  # QwenImagePipeline.__call__ cuts prompts here


@unit(outputs="latents", components="vae", version=1, shapes={"latents": "vae.z_dim, 1, H/8, W/8"})
def encode_image(pixels: torch.Tensor, vae: Any) -> torch.Tensor:
    """pixels: (B, 3, H, W) in [-1, 1] -> latents: (B, 16, 1, H/8, W/8), unit variance.

    The posterior's mean, normalised; equals `QwenImageEditPipeline._encode_vae_image`.
    """
    latents = _posterior(pixels, vae).mode()
    mean, std = _unit_variance(vae, latents)
    return (latents - mean) / std


@unit(
    outputs="latents_mean latents_logvar",
    components="vae",
    version=1,
    shapes={"latents_mean": "vae.z_dim, 1, H/8, W/8", "latents_logvar": "vae.z_dim, 1, H/8, W/8"},
)
def encode_posterior(pixels: torch.Tensor, vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """pixels: (B, 3, H, W) in [-1, 1] -> latents_mean, latents_logvar: (B, 16, 1, H/8, W/8), of the scaled latents.

    The posterior of `encode_image`'s latents: a variable divided by s has its log-variance less 2 log s.
    """
    posterior = _posterior(pixels, vae)
    mean, std = _unit_variance(vae, posterior.mean)
    return (posterior.mean - mean) / std, posterior.logvar - 2 * std.log()


def _posterior(pixels: torch.Tensor, vae: Any) -> Any:
    """The VAE's distribution over the latents of `pixels`, one frame each."""
    like = next(vae.parameters())  # vae.device and vae.dtype walk over all modules, which takes a millisecond
    return vae.encode(pixels.unsqueeze(2).to(like.device, like.dtype)).latent_dist


def _unit_variance(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the VAE's latents are normalised with, m and s of `(latents - m) / s`: (1, 16, 1, 1, 1) each."""
    import torch

    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(latents)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(latents)
    return mean, std


@unit(
    outputs="prompt_embeds prompt_mask",
    components="text_encoder tokenizer",
    version=1,
    shapes={"prompt_embeds": "L, text_encoder.text_config.hidden_size", "prompt_mask": "L"},
    dtypes={"prompt_mask": "bool"},
    sources="diffusers/pipelines/qwenimage/pipeline_qwenimage.py",  # the template around the prompt
)
def encode_prompt(prompt: list[str], text_encoder: Any, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """prompt: B texts -> prompt_embeds: (B, L, 3584), prompt_mask: (B, L) bool; L at most 512.

    Equals `QwenImagePipeline.encode_prompt`; its mask is None where every token counts, ours is all True.
    """
    import torch

    pipeline = copy.copy(_bare_pipeline())
    vars(pipeline).update(text_encoder=text_encoder, tokenizer=tokenizer)
    embeds, mask = pipeline.encode_prompt(prompt, device=text_encoder.device, max_sequence_length=TOKEN_LIMIT)
    if mask is None:
        mask = torch.ones(embeds.shape[:2], device=embeds.device)
    return embeds, mask.bool()


def count_tokens(prompt: str, components: Mapping[str, Any]) -> int:
    """The tokens of a caption, without those of the template around it."""
    pipeline = _bare_pipeline()
    text = pipeline.prompt_template_encode.format(prompt)
    return len(components["tokenizer"](text).input_ids) - pipeline.prompt_template_encode_start_idx


@functools.cache
def _bare_pipeline() -> Any:
    """The diffusers pipeline, for the template and the masking that are its own; it holds no component."""
    from diffusers import QwenImagePipeline

    return QwenImagePipeline(None, None, None, None, None)


@unit(outputs="velocity", components="transformer", version=1, shapes={"velocity": "vae.z_dim, 1, H/8, W/8"})
def denoise(
    noisy_latents: torch.Tensor,
    sigma: torch.Tensor,
    prompt_embeds: torch.Tensor,
    prompt_mask: torch.Tensor,
    transformer: Any,
) -> torch.Tensor:
    """noisy_latents: (B, 16, 1, h, w), sigma: (B,) -> velocity: (B, 16, 1, h, w), `noise - latents`.

    Equals the transformer call of `QwenImagePipeline.__call__` (its `timestep / 1000` is sigma), but that sigma stays
    fp32 in a bf16 transformer.
    """
    from diffusers import QwenImagePipeline

    batch, channels, _, height, width = noisy_latents.shape
    packed = QwenImagePipeline._pack_latents(noisy_latents.to(prompt_embeds.dtype), batch, channels, height, width)
    with unrounded(transformer.time_text_embed, sigma):
        velocity = transformer(
            hidden_states=packed,
            timestep=sigma,
            encoder_hidden_states=prompt_embeds,
            encoder_hidden_states_mask=None if prompt_mask.all() else prompt_mask,
            img_shapes=[[(1, height // 2, width // 2)]] * batch,
            return_dict=False,
        )[0]
    return QwenImagePipeline._unpack_latents(velocity, height, width, 1)


def guide(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """The guided velocity, each 2x2 patch scaled to the positive one's norm, as `QwenImagePipeline.__call__` does."""
    from diffusers import QwenImagePipeline

    batch, channels, _, height, width = positive.shape

    def pack(x: torch.Tensor) -> torch.Tensor:
        return QwenImagePipeline._pack_latents(x, batch, channels, height, width)

    combined = pack(negative + scale * (positive - negative))
    norms = pack(positive).norm(dim=-1, keepdim=True), combined.norm(dim=-1, keepdim=True)
    return QwenImagePipeline._unpack_latents(combined * (norms[0] / norms[1]), height, width, 1)


QWEN_IMAGE = ModelFamily(
    name="qwen-image",
    title="Qwen-Image",
    pipeline="diffusers.QwenImagePipeline",
    repos={"modelscope": "Qwen/Qwen-Image", "huggingface": "Qwen/Qwen-Image"},
    components=(
        Component("transformer", "diffusers.QwenImageTransformer2DModel"),
        Component("vae", "diffusers.AutoencoderKLQwenImage", prepare=one_frame),
        Component("text_encoder", "transformers.Qwen2_5_VLForConditionalGeneration"),
        Component("tokenizer", "transformers.Qwen2Tokenizer", weights=False),
        Component("scheduler", "diffusers.FlowMatchEulerDiscreteScheduler", weights=False),
    ),
    columns=(
        Column("image", "file"),
        Column("prompt", "text", required=False, default=""),
        Column("num_inference_steps", "int", minimum=2),  # one step with shift_terminal divides by zero
    ),
    units=(load_image, encode_image, encode_prompt),
    posterior=(encode_posterior, draw_latents),
    denoise=denoise,
    noise=FlowMatch(
        patch=2,
        scheduler={
            "use_dynamic_shifting": True,
            "base_shift": 0.5,
            "max_shift": 0.9,
            "base_image_seq_len": 256,
            "max_image_seq_len": 8192,
            "shift_terminal": 0.02,
        },
    ),
    tasks={"sft": True, "direct_distill": True},
    lora_targets=(
        *("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"),
        *("img_mlp.net.2", "img_mod.1", "txt_mlp.net.2", "txt_mod.1"),
    ),
    config={"vae.z_dim": 16, "text_encoder.text_config.hidden_size": 3584},
    defaults={"lr": 1e-4, "rank": 32},
    guide=guide,
    token_count=count_tokens,
    token_limit=TOKEN_LIMIT,
)


@hookimpl
def dsplit_register_families() -> list[ModelFamily]:
    return [QWEN_IMAGE]
