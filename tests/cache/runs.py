"""Stage 1 on the tiny Qwen-Image, in this process or in a child that may die."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsplit.cache.run import run_cache
from dsplit.cache.store import Writer
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions
from tests import tiny


def cache(out: Path, metadata: Path | None, model: Path = tiny.QWEN_IMAGE, **options: Any) -> dict[str, Any]:
    """`dsplit cache --out out --metadata metadata --model model ...` on one thread, in fp32, without workers."""
    groups: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "cache": {}}
    fields = {"model": ModelOptions, "data": DataOptions, "cache": CacheOptions}
    for name, value in options.items():
        group = next(g for g, cls in fields.items() if name in cls.__dataclass_fields__)
        groups[group][name] = value
    paths = {"metadata": str(metadata), "data": str(metadata.parent)} if metadata else {}
    return run_cache(
        ModelOptions(**{"model": str(model), "threads": 1, "device": "cpu", **groups["model"]}),
        DataOptions(**{**paths, **groups["data"]}),
        CacheOptions(**{"out": str(out), "workers": 0, **groups["cache"]}),
    )


def counts(result: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Encoded and reused values per unit."""
    return {unit: (n, result["reused"][unit]) for unit, n in result["encoded"].items()}


def shards(out: Path) -> list[Path]:
    """The shards of a cache."""
    return sorted(out.glob("shards/*/*"))


def child(work: Callable[[], None]) -> int:
    """The exit status of a forked process that does `work`: 0, 1 after an error, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def kill_at(call: int, module: Any, name: str) -> None:
    """From now on, the `call`-th call of `module.name` (counted from 1) kills this process, kill -9, before it acts."""
    real, count = getattr(module, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(module, name, counted)


def log_puts(log: Path) -> None:
    """From now on, each row whose values this process hands to a writer adds a dot to `log`."""
    put = Writer.put

    def logged(self: Writer, values: Any) -> None:
        with log.open("a") as file:
            file.write(".")
        put(self, values)

    Writer.put = logged  # type: ignore[method-assign]
