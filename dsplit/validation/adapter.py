"""Puts a LoRA file, in any of the three formats, on a pipeline; refuses one that does not fit as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.training.lora_files import read, settings
from dsplit.training.lora_fit import refuse_unfit

if TYPE_CHECKING:
    import torch

NAME = "dsplit"


@dataclass(frozen=True)
class LoraFile:
    """A LoRA as diffusers' keys (`transformer.X.lora_A.weight`) and adapter config (`transformer.r` -> 16)."""

    path: Path
    state: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> LoraFile:
        """The LoRA in `path`. Raises TrainingError for a file that is none."""
        state, metadata = read(path)
        return cls(path, state, settings(metadata))

    def check(self, pipeline: Any, trainable: Sequence[str]) -> None:
        """Raises ModelError unless every key fits a module of `pipeline`, and the ranks agree.

        trainable: the components that LoRAs are usually made for; the message takes its example from them.
        """
        parts = {name: getattr(pipeline, name) for name in pipeline.components}
        refuse_unfit(self.path, self.state, self.config, parts, trainable)

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
