"""Puts a LoRA file, in any of the three formats, on a pipeline; refuses one that does not fit as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.errors import ModelError

if TYPE_CHECKING:
    import torch

NAME = "dsplit"
KEY = re.compile(r"(?P<component>\w+)\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True)
class LoraFile:
    """A LoRA as diffusers' keys (`transformer.X.lora_A.weight`) and adapter config (`transformer.r` -> 16)."""

    path: Path
    state: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> LoraFile:
        """The LoRA in `path`. Raises TrainingError for a file that is none."""
        from dsplit.training.lora_files import METADATA_KEY, read

        state, metadata = read(path)
        return cls(path, state, json.loads(metadata.get(METADATA_KEY, "{}")))

    def check(self, pipeline: Any, trainable: Sequence[str]) -> None:
        """Raises ModelError unless every key fits a module of `pipeline`, and the ranks agree.

        trainable: the components that LoRAs are usually made for; the message takes its example from them.
        """
        modules = {
            f"{name}.{module}": layer.weight
            for name in pipeline.components
            for module, layer in _layers(getattr(pipeline, name))
        }
        odd = [key for key, tensor in self.state.items() if not _fits(key, tensor, modules)]
        if odd:
            count = len(self.state)
            theirs = f"'{odd[0]}' {tuple(self.state[odd[0]].shape)}"
            raise ModelError(
                f"{self.path}: {count - len(odd)} of {count} keys fit this model: the file has {theirs}; "
                f"the model has {_nearest(odd[0], modules, trainable)}; give a LoRA that was trained on this model"
            )
        self._check_ranks()

    def _check_ranks(self) -> None:
        for key, tensor in self.state.items():
            match = KEY.fullmatch(key)
            if match is None or match["side"] != "A":
                continue
            component, module = match["component"], match["module"]
            other = self.state.get(key.replace(".lora_A.", ".lora_B."))
            if other is None:
                raise ModelError(f"{self.path}: '{key}' has no lora_B; the file is not whole, so save it again")
            special = self.config.get(f"{component}.rank_pattern") or {}
            said = special.get(module, self.config.get(f"{component}.r", tensor.shape[0]))
            if not tensor.shape[0] == other.shape[1] == said:
                raise ModelError(
                    f"{self.path}: the ranks of '{component}.{module}' differ: lora_A {tensor.shape[0]}, lora_B "
                    f"{other.shape[1]}, the file's own settings {said}; the file was changed, so save it again"
                )

    def attach(self, pipeline: Any, scale: float) -> int:
        """Puts the LoRA on the pipeline's components at strength `scale`; the number of modules that it patches."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        patched = 0
        for name in dict.fromkeys(key.partition(".")[0] for key in self.state):
            component = getattr(pipeline, name)
            self._load(name, component, pipeline)
            for module in component.modules():
                if isinstance(module, BaseTunerLayer) and NAME in module.active_adapters:
                    module.set_scale(NAME, scale)  # type: ignore[attr-defined]
                    patched += 1
        return patched

    def _load(self, name: str, component: Any, pipeline: Any) -> None:
        prefix = f"{name}."
        if hasattr(component, "load_lora_adapter"):  # a diffusers model: what `pipeline.load_lora_weights` calls
            component.load_lora_adapter(
                dict(self.state), prefix=name, adapter_name=NAME, metadata=dict(self.config) or None, _pipeline=pipeline
            )
            return
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

        config = {k.removeprefix(prefix): v for k, v in self.config.items() if k.startswith(prefix)}
        state = {k.removeprefix(prefix): v for k, v in self.state.items() if k.startswith(prefix)}
        inject_adapter_in_model(LoraConfig(**config), component, adapter_name=NAME)
        set_peft_model_state_dict(component, state, adapter_name=NAME)


def _layers(component: Any) -> list[tuple[str, Any]]:
    """The modules with a weight of a component; none for a tokenizer or a scheduler."""
    named = getattr(component, "named_modules", None)
    return [(n, m) for n, m in named() if getattr(m, "weight", None) is not None] if named else []


def _fits(key: str, tensor: torch.Tensor, modules: Mapping[str, torch.Tensor]) -> bool:
    match = KEY.fullmatch(key)
    weight = modules.get(f"{match['component']}.{match['module']}") if match else None
    if match is None or weight is None or weight.ndim < 2:
        return False
    return tensor.shape[1] == weight.shape[1] if match["side"] == "A" else tensor.shape[0] == weight.shape[0]


def _nearest(key: str, modules: Mapping[str, torch.Tensor], trainable: Sequence[str]) -> str:
    """The module of the trainable components that is most like `key`, with its shape."""
    from difflib import get_close_matches

    weights = {n: w for n, w in modules.items() if w.ndim > 1 and n.partition(".")[0] in trainable}
    wanted = re.sub(r"\.lora_[AB].*", "", key)
    name = next(iter(get_close_matches(wanted, weights, n=1, cutoff=0.0)), None)
    return f"'{name}' {tuple(weights[name].shape)}" if name else "no module with weights"
