"""The processes of a launch as training sees them: accelerate's accelerator, and tensors gathered from all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from dsplit.cache import ranks
from dsplit.errors import UsageError

PRECISIONS = ("no", "bf16", "fp16")


def own_device(device: torch.device) -> torch.device:
    """The device of this process: of several GPUs, the one that the launcher gave it."""
    if device.type == "cuda" and device.index is None and ranks.world() > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def precision_of(stated: str | None, device: torch.device) -> str:
    """`no`, `bf16` or `fp16`: what the user states, else what the launcher does. Raises UsageError for a CPU's fp16."""
    precision = stated or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in PRECISIONS:
        raise UsageError(f"mixed precision {precision}: choose from {', '.join(PRECISIONS)}")
    if precision == "fp16" and device.type == "cpu":
        raise UsageError("--mixed-precision fp16: a CPU has no half-precision training; use no or bf16")
    return precision


class Processes:
    """What is equal in all processes of the launch, and what each does for itself.

    rank: from 0. world: how many there are. accelerator: accelerate's, for precision and the distributed model.
    """

    def __init__(self, device: torch.device, precision: str) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.utils import GradientAccumulationPlugin

        self.accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),  # a launcher's own must not divide
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes

    @property
    def main(self) -> bool:
        """True in the one process that writes."""
        return self.rank == 0

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """`own` of every process, by rank: (world, ...); of equal shape in all."""
        if self.world == 1:
            return own.unsqueeze(0)
        return self.accelerator.gather(own.unsqueeze(0).contiguous())

    @contextlib.contextmanager
    def accumulating(self, model: Any, last: bool) -> Iterator[None]:
        """Within it, gradients are exchanged only if this is the `last` batch of the step."""
        with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
            yield

    def wait(self) -> None:
        """Until all processes are here."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leaves the group, so that no thread of it outlives the interpreter."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
