"""Keeping a number in fp32 where a model rounds it to its own dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def unrounded(module: Any, value: torch.Tensor) -> Iterator[None]:
    """While the block runs, `module` is called with `value` in place of its first argument.

    For the time embedding of a denoiser, which computes in fp32 but is handed a sigma that the model rounded to its
    dtype first: in bf16 that leaves 428 of 1000 sigmas.
    """
    hook = module.register_forward_pre_hook(lambda _, arguments: (value, *arguments[1:]))
    try:
        yield
    finally:
        hook.remove()
