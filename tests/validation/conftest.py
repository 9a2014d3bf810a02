"""A pipeline and LoRA files that the validation tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsplit.models.load import load_component
from dsplit.models.locate import Model, locate
from dsplit.recipe import ModelOptions
from dsplit.training.lora import adapters, inject, state
from dsplit.training.lora_files import serialised
from dsplit.validation.pipeline import load_pipeline
from tests import tiny

WriteLora = Callable[..., Path]


@pytest.fixture(autouse=True)
def threads(one_thread):
    """One for all tests here."""


@pytest.fixture(scope="session")
def model() -> Model:
    return locate(ModelOptions(model=str(tiny.QWEN_IMAGE)))


@pytest.fixture
def pipeline(model: Model):
    """A new pipeline without a LoRA."""
    return load_pipeline(model, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def write_lora(model: Model) -> WriteLora:
    """`write_lora(path, lora_format)` writes a LoRA with random weights, large enough to change pictures."""

    def write(
        path: Path, lora_format: str = "diffusers", *, rank: int = 4, alpha: float = 4, part: str = "transformer"
    ):
        component = load_component(model, part, torch.float32, "cpu")
        plan = adapters({part: component}, None, model.family.lora_targets, model.family.trainable)
        weights = inject({part: component}, plan, rank, alpha, 0)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in weights:
                weight.copy_(0.15 * torch.randn(weight.shape, generator=generator))
        path.write_bytes(serialised(*state({part: component}, [part], lora_format)))
        return path

    return write
