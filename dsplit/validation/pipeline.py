"""The family's diffusers pipeline: put together from the model's parts, with a LoRA attached, drawing pictures."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from dsplit.console import warn
from dsplit.errors import ModelError, UsageError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from dsplit.models.family import ModelFamily
    from dsplit.models.model import Model
    from dsplit.recipe import ValidateOptions

NEGATIVE_PROMPT = " "


def load_pipeline(model: Model, dtype: torch.dtype, device: torch.device, *, cpu_offload: bool = False) -> Any:
    """The pipeline of `model.family`, its components as their real classes, silent, on `device`.

    cpu_offload: components wait in main memory, and only the one at work is on the GPU.
    Raises UsageError for an absent component, ModelError for one that cannot be loaded.
    """
    from dsplit.models.load import load_component

    module, _, name = model.family.pipeline.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    offload = cpu_offload and device.type != "cpu"
    if cpu_offload and not offload:
        warn("--cpu-offload has no effect on a CPU")
    names = [c.name for c in model.family.components if c.name in inspect.signature(cls).parameters]
    model.require(names, {})
    model.check(names)
    place = "cpu" if offload else device
    pipeline = cls(**{name: load_component(model, name, dtype, place) for name in names})
    if offload:
        pipeline.enable_model_cpu_offload(device=device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def check_steps(steps: int, scheduler: Any) -> None:
    """Raises UsageError for a number of steps that the scheduler cannot do."""
    if steps == 1 and scheduler.config.get("shift_terminal"):
        raise UsageError(
            "--steps 1: this model's schedule stretches to a last sigma and divides by zero; use 2 or more"
        )


def picture_size(text: str | None, family: ModelFamily) -> tuple[int, int]:
    """W, H of the pictures: `text` (`WxH`), else the family's. Raises UsageError for any other text or size."""
    if text is None:
        return family.typical["W"], family.typical["H"]
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal()):
        raise UsageError(f"--size {text}: write WxH, for instance 1024x1024")
    size = (int(width), int(height))
    if min(size) == 0 or size[0] % family.size_factor or size[1] % family.size_factor:
        raise UsageError(f"--size {text}: {family.title} draws multiples of {family.size_factor} only")
    return size


def draw(pipeline: Any, prompt: str, size: tuple[int, int], options: ValidateOptions) -> Image:
    """One picture of `prompt`, from noise drawn on the CPU by the seed, so that it is the same on any device.

    Raises ModelError if it holds NaN or infinity.
    """
    import numpy as np
    import torch
    from PIL import Image

    takes = inspect.signature(pipeline.__call__).parameters
    guidance: dict[str, Any] = {"true_cfg_scale" if "true_cfg_scale" in takes else "guidance_scale": options.cfg}
    if options.cfg > 1:
        guidance["negative_prompt"] = NEGATIVE_PROMPT
    result = pipeline(
        prompt=prompt,
        width=size[0],
        height=size[1],
        num_inference_steps=options.steps,
        generator=torch.Generator("cpu").manual_seed(options.seed),
        output_type="np",
        **guidance,
    )
    values = result.images[0]
    if not np.isfinite(values).all():
        raise ModelError(
            f"the picture of '{prompt}' holds NaN or infinity; try --dtype float32 or a smaller --lora-scale"
        )
    return Image.fromarray((values * 255).round().astype("uint8"))
