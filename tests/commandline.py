"""The `dsplit` command in this process, for tests: its exit code, and what it printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import tiny

MODEL = str(tiny.QWEN_IMAGE)


@dataclass(frozen=True)
class Done:
    """What a command gave back."""

    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """What it printed with --json."""
        assert self.code == 0, self.err
        return json.loads(self.out)


Dsplit = Callable[..., Done]


def cache_words(metadata: Path, out: Path, model: str | Path = MODEL) -> list[str]:
    """`dsplit cache` of a small data set on one thread."""
    options = {"model": model, "metadata": metadata, "out": out, "max-pixels": 16384, "threads": 1, "device": "cpu"}
    return ["cache", "--json", *(str(word) for name, value in options.items() for word in (f"--{name}", value))]


def names_below(folder: Path) -> set[str]:
    """Everything below `folder`, by path."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
