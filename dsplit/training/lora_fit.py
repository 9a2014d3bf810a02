"""Whether a LoRA file fits a model as a whole: every key a module of the right shape, pairs whole, ranks agreed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.errors import ModelError

if TYPE_CHECKING:
    import torch

KEY = re.compile(r"(?P<component>\w+)\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


def refuse_unfit(
    path: Path,
    state: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    components: Mapping[str, Any],
    trainable: Sequence[str],
) -> None:
    """Raises ModelError unless every key of the LoRA in `path` fits a module of `components`, and the ranks agree.

    state, settings: as diffusers' keys (`transformer.X.lora_A.weight`) and adapter config (`transformer.r`).
    components: with or without weights. trainable: those that LoRAs are usually made for; the message takes its example
    from them.
    """
    modules = {f"{name}.{m}": layer.weight for name, part in components.items() for m, layer in _layers(part)}
    odd = [key for key, tensor in state.items() if not _fits(key, tensor, modules)]
    if odd:
        count = len(state)
        theirs = f"'{odd[0]}' {tuple(state[odd[0]].shape)}"
        raise ModelError(
            f"{path}: {count - len(odd)} of {count} keys fit this model: the file has {theirs}; "
            f"the model has {_nearest(odd[0], modules, trainable)}; give a LoRA that was trained on this model"
        )
    for key, tensor in state.items():
        if ".lora_A." in key:
            _check_pair(path, key, tensor, state, settings)
        elif key.replace(".lora_B.", ".lora_A.") not in state:
            raise ModelError(f"{path}: '{key}' has no lora_A; the file is not whole, so save it again")


def _check_pair(
    path: Path, key: str, tensor: torch.Tensor, state: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    match = KEY.fullmatch(key)
    assert match is not None  # it fits
    component, module = match["component"], match["module"]
    other = state.get(key.replace(".lora_A.", ".lora_B."))
    if other is None:
        raise ModelError(f"{path}: '{key}' has no lora_B; the file is not whole, so save it again")
    special = settings.get(f"{component}.rank_pattern") or {}
    said = special.get(module, settings.get(f"{component}.r", tensor.shape[0]))
    if not tensor.shape[0] == other.shape[1] == said:
        raise ModelError(
            f"{path}: the ranks of '{component}.{module}' differ: lora_A {tensor.shape[0]}, lora_B "
            f"{other.shape[1]}, the file's own settings {said}; the file was changed, so save it again"
        )


def _layers(component: Any) -> list[tuple[str, Any]]:
    """The modules with a weight of a component; none for a tokenizer or a scheduler."""
    named = getattr(component, "named_modules", None)
    return [(n, m) for n, m in named() if getattr(m, "weight", None) is not None] if named else []


def _fits(key: str, tensor: torch.Tensor, modules: Mapping[str, torch.Tensor]) -> bool:
    match = KEY.fullmatch(key)
    weight = modules.get(f"{match['component']}.{match['module']}") if match else None
    if match is None or weight is None or weight.ndim < 2 or tensor.ndim < 2:
        return False
    return tensor.shape[1] == weight.shape[1] if match["side"] == "A" else tensor.shape[0] == weight.shape[0]


def _nearest(key: str, modules: Mapping[str, torch.Tensor], trainable: Sequence[str]) -> str:
    """The module of the trainable components that is most like `key`, with its shape."""
    from difflib import get_close_matches

    weights = {n: w for n, w in modules.items() if w.ndim > 1 and n.partition(".")[0] in trainable}
    wanted = re.sub(r"\.lora_[AB].*", "", key)
    name = next(iter(get_close_matches(wanted, weights, n=1, cutoff=0.0)), None)
    return f"'{name}' {tuple(weights[name].shape)}" if name else "no module with weights"
