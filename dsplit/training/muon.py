"""Muon for matrices and AdamW for everything else, as one optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Muon(torch.optim.Optimizer):
    """torch's Muon (Jordan et al. 2024) on weights with two axes, AdamW on all others, at one rate.

    Muon's updates are scaled to AdamW's size (`match_rms_adamw`), so that the rate means the same for both. momentum:
    Muon's. betas, eps: AdamW's.
    """

    def __init__(
        self,
        weights: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        every = list(weights)
        matrices = [w for w in every if w.ndim == 2]
        others = [w for w in every if w.ndim != 2]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            adjust: Any = "match_rms_adamw"
            self._parts.append(
                torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn=adjust)
            )
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        super().__init__([{"params": part.param_groups[0]["params"]} for part in self._parts], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """The groups of the parts are this optimiser's own, so that a schedule moves them."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            for name, value in part.param_groups[0].items():
                group.setdefault(name, value)
            part.param_groups[0] = group
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = closure() if closure else None
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of an equal optimiser."""
        super().load_state_dict(state_dict)
        self._share()
