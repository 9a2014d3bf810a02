"""LoRA through peft: which modules are adapted, seeded initialisation, fp32 weights, and the state to save."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from dsplit.errors import UsageError
from dsplit.models.model import Model
from dsplit.training.lora_files import State, convert, packed
from dsplit.training.rng import derived

ADAPTABLE = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Embedding)
TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj")  # attention of transformers' text encoders
AUTO, PATTERN = "auto", "re:"  # entries of --targets that are no names
SHOWN = 40


@dataclass(frozen=True)
class Adapter:
    """How one component is adapted: its modules, what peft is told to find them by, and how many each entry matched."""

    targets: tuple[str, ...]
    modules: tuple[str, ...]
    counts: Mapping[str, int]


def entries(targets: str | None, default: Sequence[str]) -> tuple[str, ...]:
    """The target entries, trimmed. Raises UsageError if the list is empty, or a pattern is none."""
    if targets is None:
        return tuple(default)
    if targets.strip().startswith(PATTERN):  # its commas are its own
        pattern = targets.strip()
        try:
            re.compile(pattern.removeprefix(PATTERN))
        except re.error as error:
            raise UsageError(f"--targets '{pattern}': no regular expression ({error})") from error
        return (pattern,)
    found = tuple(dict.fromkeys(t.strip() for t in targets.split(",") if t.strip()))
    if not found:
        raise UsageError("--targets is empty: name at least one module, or leave the option out for the family's list")
    return found


def adapters(
    skeletons: Mapping[str, torch.nn.Module], targets: str | None, family_targets: Sequence[str], own: Sequence[str]
) -> dict[str, Adapter]:
    """The adapter of every component that is to be trained.

    skeletons: the components, with or without weights. own: the components that `family_targets` are meant for; others
    take the attention projections of text encoders. An entry matches a layer of that name, or whose name ends in
    `.entry`; `re:PATTERN` those whose whole name it matches; `auto` every linear layer of the repeated blocks.
    Raises UsageError, naming what exists, for an entry that matches nothing, and a component without any.
    """
    result, unmatched, faults = {}, set(entries(targets, ())), []
    for name, module in skeletons.items():
        default = family_targets if name in own else TEXT_TARGETS
        matched = {e: matching(e, module) for e in entries(targets, default)}
        found = {e: modules for e, modules in matched.items() if modules}
        modules = tuple(dict.fromkeys(m for modules in found.values() for m in modules))
        told = tuple(t for e, own_ones in found.items() for t in ([e] if _is_name(e) else own_ones))
        result[name] = Adapter(told, modules, {e: len(own_ones) for e, own_ones in found.items()})
        if name in own and targets is None:
            unmatched |= matched.keys()
        unmatched -= found.keys()
        if not found:
            stated = targets is not None or name in own
            faults.append(
                f"no entry matches a module of {name}"
                if stated
                else f"there are no targets for {name} by default; name some of its modules"
            )
    if unmatched or faults:
        everything = [m for module in skeletons.values() for m in adaptable(module)]
        faults = [f"nothing matches {_with_nearest(e, everything)}" for e in sorted(unmatched)] + faults
        raise UsageError(f"--targets: {'; '.join(faults)}\nmodules that exist: {_shown(everything)}")
    return result


def adaptable(module: torch.nn.Module) -> list[str]:
    """The names of the modules that LoRA can adapt."""
    return [name for name, m in module.named_modules() if isinstance(m, ADAPTABLE)]


def matching(entry: str, module: torch.nn.Module) -> list[str]:
    """The adaptable modules that an entry means: by peft's rule for names, by a pattern, or all of the blocks."""
    if entry == AUTO:
        return [n for n, m in module.named_modules() if isinstance(m, torch.nn.Linear) and re.search(r"\.\d+\.", n)]
    if entry.startswith(PATTERN):
        return [n for n in adaptable(module) if re.fullmatch(entry.removeprefix(PATTERN), n)]
    return [n for n in adaptable(module) if n == entry or n.endswith(f".{entry}")]


def _is_name(entry: str) -> bool:
    return entry != AUTO and not entry.startswith(PATTERN)


def skeleton(model: Model, name: str) -> torch.nn.Module:
    """The component without weights, of its config alone: takes no memory and reads no weight file.

    Raises UsageError for a component without weights (a tokenizer).
    """
    from accelerate import init_empty_weights

    component = model.family.component(name)
    if not component.weights:
        raise UsageError(f"--trainable {name}: it has no weights to train")
    module, _, cls_name = component.cls.rpartition(".")
    cls = getattr(importlib.import_module(module), cls_name)
    with init_empty_weights():
        if hasattr(cls, "load_config"):  # diffusers
            return cls.from_config(cls.load_config(model.part(name).folder))
        return cls(cls.config_class.from_pretrained(model.part(name).folder, local_files_only=True))


def inject(
    components: Mapping[str, Any], plan: Mapping[str, Adapter], rank: int, alpha: float, seed: int, dropout: float = 0.0
) -> list[torch.nn.Parameter]:
    """The new LoRA weights, fp32, in place in `components`; everything else of them is frozen.

    The initialisation depends on `seed` alone and leaves torch's own generator as it was.
    """
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig, inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived(seed, "lora"))
        for name, adapter in plan.items():
            targets = list(adapter.targets)
            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=dropout)  # type: ignore[arg-type]
            try:
                inject_adapter_in_model(config, components[name])
            except ValueError as error:
                raise UsageError(f"--targets: peft cannot adapt {name}: {error}") from error
            cast_training_params(components[name], torch.float32)
    return [p for name in plan for p in components[name].parameters() if p.requires_grad]


def state(components: Mapping[str, Any], trained: Sequence[str], lora_format: str) -> tuple[State, dict[str, str]]:
    """The LoRA of the trained components as tensors (on the CPU, fp32) and file metadata, in `lora_format`."""
    from diffusers.training_utils import _collate_lora_metadata
    from peft import get_peft_model_state_dict

    modules = {name: components[name] for name in trained}
    tensors = {
        f"{name}.{key}": tensor.detach().cpu()
        for name, module in modules.items()
        for key, tensor in get_peft_model_state_dict(module, adapter_name="default").items()
    }
    collated = _collate_lora_metadata(modules)
    metadata = packed({name: collated[f"{name}_lora_adapter_metadata"] for name in trained})
    return convert(tensors, metadata, "diffusers", lora_format)


def _with_nearest(entry: str, modules: Sequence[str]) -> str:
    """`'to_qq' (nearest: to_q, to_k)`."""
    endings = {t.split(".", k)[-1] for t in tails(modules) for k in range(t.count(".") + 1)}
    near = get_close_matches(entry, sorted(e for e in endings if not e.isdigit()), n=3, cutoff=0.5)
    return f"'{entry}' (nearest: {', '.join(near)})" if near else f"'{entry}'"


def tails(modules: Sequence[str]) -> list[str]:
    """Names without the numbered block that they are in: `blocks.3.attn.to_q` -> `attn.to_q`."""
    return list(dict.fromkeys(re.sub(r"^[a-z_.]+\.\d+\.(?=[a-z])", "", m) for m in modules))


def _shown(modules: Sequence[str]) -> str:
    found = tails(modules)
    more = f" ... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more
