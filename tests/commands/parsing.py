"""Command lines parsed as the commands parse them, without the work that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsplit.commands.cache import cache
from dsplit.commands.options import Declared, Given
from dsplit.commands.prepare import prepare
from dsplit.commands.resolve import resolve
from dsplit.commands.tasks import tasks
from dsplit.commands.train import train
from dsplit.commands.validate import validate
from dsplit.recipe import CacheOptions, PrepareOptions, TrainOptions, ValidateOptions

COMMANDS: dict[str, Declared] = {
    "prepare": prepare, "cache": cache, "train": train, "validate": validate, "tasks": tasks,
}  # fmt: skip
GROUPS: dict[str, type] = {
    "cache": CacheOptions, "train": TrainOptions, "validate": ValidateOptions, "prepare": PrepareOptions,
}  # fmt: skip


def given(command: str, words: Sequence[str]) -> Given:
    """What the command line states, as the command function gets it."""
    caught: list[Given] = []
    replace(COMMANDS[command], function=caught.append).command(command).main(list(words), standalone_mode=False)
    return caught[0]


def resolved(command: str, *words: str, folder: Path | None = None) -> tuple[Any, Any, Any]:
    """The three option groups of a command line, in `folder` (default: here)."""
    return resolve(command, given(command, words), GROUPS[command], folder)
