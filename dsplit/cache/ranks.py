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
LOOK = timedelta(seconds=1)  # how often a waiting process looks whether another one has failed
FAILED = "failed"
STOPPED = "another process of this launch stopped; see its message. What was sealed is kept: run `dsplit cache` again"
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
            store.set(f"{number}/{rank()}", json.dumps(thing))
            return [json.loads(_wait(store, f"{number}/{r}")) for r in range(world())]
        except RuntimeError as error:  # the process that holds the store is gone
            raise CacheError(STOPPED) from error

    try:
        yield gather
    except BaseException:
        with contextlib.suppress(RuntimeError):
            store.set(FAILED, str(rank()))
        raise
    store.set(f"left/{rank()}", "")
    if rank() == 0:  # it may hold the store, so it leaves last
        for r in range(world()):
            _wait(store, f"left/{r}")


def _wait(store: Any, key: str) -> bytes:
    """The value of `key`, once it is there. Raises CacheError if a process says that it failed."""
    while True:
        try:
            store.wait([key], LOOK)
        except RuntimeError:  # not yet; if the store is gone, so says the check
            if store.check([FAILED]):
                raise CacheError(STOPPED) from None
        else:
            return store.get(key)
