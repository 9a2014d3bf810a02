"""Several processes of one launch (torchrun, accelerate): who encodes what, and waiting for each other."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from dsplit.errors import CacheError

PATIENCE = timedelta(days=2)  # shares are equal in number, not in time; the launcher ends the others if one dies
Gather = Callable[[Any], list[Any]]


def rank() -> int:
    """The number of this process in its launch, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """The number of processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def together() -> Iterator[Gather]:
    """While the block runs, the processes of the launch can meet; gives `gather(thing) -> what each gave, by rank`.

    `thing` is JSON; `gather` waits for all. The launcher's key-value store alone carries it: a process group would
    start threads that can outlive the interpreter.
    """
    if world() == 1:
        yield lambda thing: [thing]
        return
    from torch.distributed import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=PATIENCE))
    rounds = itertools.count()

    def gather(thing: Any) -> list[Any]:
        number = next(rounds)
        try:
            store.set(f"dsplit/{number}/{rank()}", json.dumps(thing))
            return [json.loads(store.get(f"dsplit/{number}/{r}")) for r in range(world())]
        except RuntimeError as error:
            raise CacheError(
                "another process of this launch stopped; see its message. What was sealed is kept: run `dsplit cache` "
                "again"
            ) from error

    yield gather
    gather(None)  # the process that holds the store must not leave first
