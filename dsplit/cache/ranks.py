"""Several processes of one launch (torchrun, accelerate): who encodes what, and waiting for each other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from dsplit.errors import CacheError

PATIENCE = timedelta(days=2)  # shares are equal in number, not in time; a process that dies is noticed at once


def rank() -> int:
    """The number of this process in its launch, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """The number of processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """While the block runs, the processes of the launch can `gather`; does nothing for a single one."""
    if world() == 1:
        yield
        return
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def gather(thing: Any) -> list[Any]:
    """What each process gave, by rank; waits for all. Raises CacheError if one of them stopped."""
    if world() == 1:
        return [thing]
    import torch.distributed as dist

    things: list[Any] = [None] * world()
    try:
        dist.all_gather_object(things, thing)
    except RuntimeError as error:
        raise CacheError(
            "another process of this launch stopped; see its message. What was sealed is kept: run `dsplit cache` again"
        ) from error
    return things
