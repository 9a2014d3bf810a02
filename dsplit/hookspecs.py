"""The two hooks that a plugin may implement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from dsplit.models.family import ModelFamily, Task

hookspec = pluggy.HookspecMarker("dsplit")
hookimpl = pluggy.HookimplMarker("dsplit")


@hookspec
def dsplit_register_families() -> Iterable[ModelFamily]:  # type: ignore[empty-body]
    """Model families that this plugin adds."""


@hookspec
def dsplit_register_tasks() -> Iterable[Task]:  # type: ignore[empty-body]
    """Training tasks that this plugin adds."""
