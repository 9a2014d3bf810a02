"""The pages people read: links lead somewhere, options exist, and the example task of a plugin runs."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from dsplit import Task
from dsplit.commands.reference import RENAMED, ReferenceOptions
from dsplit.models import FlowMatch
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, PrepareOptions, TrainOptions, ValidateOptions
from dsplit.training.rng import Rng

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUPS = (ModelOptions, DataOptions, CacheOptions, TrainOptions, ValidateOptions, PrepareOptions, ReferenceOptions)
OF_OTHERS = {"num-processes", "nproc-per-node", "cpu", "check"}  # accelerate's, torchrun's, ruff's
OF_ALL = {"help", "version", "debug", "json", "install-completion", "show-completion"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [t for t in targets if "://" not in t]
    assert [t for t in local if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z_-]+)", page.read_text(encoding="utf-8")))
    known = {f.name.replace("_", "-") for group in GROUPS for f in fields(group)} | set(RENAMED) | OF_ALL | OF_OTHERS
    known |= {f"no-{name}" for name in known}
    assert {name for name in named if name.replace("_", "-") not in known} == set()


def test_the_example_task_is_the_loss_it_says() -> None:
    """The code on the page, with a denoiser that always answers 0: the loss is the mean square of noise - latents."""
    page = (ROOT / "docs" / "add-a-plugin.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"## A task\n\n```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict = {"Task": Task, "hookimpl": lambda function: function}
    exec(code, names)  # our own page
    (task,) = names["dsplit_register_tasks"]()

    class Zero:
        process = FlowMatch(scheduler={"shift": 1.0}).build()

        def __call__(self, noisy_latents: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(noisy_latents)

    latents, rng = torch.randn(2, 4, 8, 8), Rng(0, ["a", "b"], [0, 0])
    expected = ((rng.normal("noise", latents) - latents) ** 2).flatten(1).mean(1)
    assert torch.equal(task.loss(Zero(), {"latents": latents}, rng), expected)
