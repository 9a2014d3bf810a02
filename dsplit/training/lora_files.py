"""LoRA files in the three formats that programs read, and the way from each to each, bit for bit.

    diffusers   transformer.X.lora_A.weight, alpha in the metadata (as `QwenImagePipeline.save_lora_weights` writes it)
    comfyui     diffusion_model.X.lora_A.weight, X.alpha
    diffsynth   X.lora_A.default.weight, X.alpha

Alpha is stated, never folded into the weights. The adapter's config travels with every format, in diffusers' own
metadata entry only where diffusers is to read it: it would apply the alpha twice beside `.alpha` tensors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from dsplit.errors import TrainingError, UsageError

FORMATS = ("diffusers", "comfyui", "diffsynth")
DENOISER = "transformer"  # the component that comfyui's and diffsynth's keys mean
METADATA_KEY = "lora_adapter_metadata"  # diffusers.loaders.lora_base.LORA_ADAPTER_METADATA_KEY
OTHER_METADATA_KEY = "dsplit_adapter_metadata"
COMFYUI = "diffusion_model."
ALPHA = ".alpha"

State = dict[str, torch.Tensor]


def detect(state: Mapping[str, Any]) -> str:
    """The format that the keys are in."""
    if any(k.startswith(COMFYUI) for k in state):
        return "comfyui"
    return "diffsynth" if any(".lora_A.default." in k for k in state) else "diffusers"


def convert(state: State, metadata: Mapping[str, str], source: str, target: str) -> tuple[State, dict[str, str]]:
    """The same LoRA in another format: tensors and file metadata. There and back gives equal bits.

    Raises UsageError where `target` cannot hold it (comfyui and diffsynth know the transformer's LoRA only).
    """
    if source == target:
        return dict(state), dict(metadata)
    return _from_diffusers(*_to_diffusers(state, metadata, source), target)


def refuse_format(lora_format: str, components: Iterable[str]) -> None:
    """Raises UsageError if the format cannot hold the LoRA of all `components`."""
    other = sorted(set(components) - {DENOISER})
    if other and lora_format != "diffusers":
        raise UsageError(f"--lora-format {lora_format} cannot hold a LoRA of {', '.join(other)}; use diffusers")


def read(path: Path) -> tuple[State, dict[str, str]]:
    """The LoRA in `path`, of any of the three formats, as diffusers' keys and metadata.

    Raises TrainingError for a file that is no safetensors file, holds no LoRA, or whose alphas or settings are none.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            state, metadata = {k: file.get_tensor(k) for k in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{path}: not readable as a safetensors file ({error}); give a LoRA file") from error
    if not any(".lora_A." in k for k in state):
        example = f", e.g. '{next(iter(state))}'" if state else ""
        raise TrainingError(f"{path}: holds no LoRA: none of its {len(state)} keys names lora_A{example}")
    for key, tensor in state.items():
        if key.endswith(ALPHA) and tensor.numel() != 1:
            raise TrainingError(f"{path}: '{key}' has the shape {tuple(tensor.shape)}, where an alpha is one number")
        if ".lora_A." in key and tensor.ndim < 2:
            raise TrainingError(f"{path}: '{key}' has the shape {tuple(tensor.shape)}, where a matrix is expected")
    state, metadata = _to_diffusers(state, metadata, detect(state))
    try:
        _check_settings(metadata)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise TrainingError(
            f"{path}: the adapter settings in its metadata are none that peft knows ({what}); save the LoRA again, or "
            "without metadata"
        ) from error
    return state, metadata


def settings(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The adapter settings of diffusers' file metadata (`transformer.r` -> 16); empty if there are none."""
    return json.loads(metadata.get(METADATA_KEY, "{}"))


def _check_settings(metadata: Mapping[str, str]) -> None:
    """Raises ValueError, TypeError or AttributeError, in words, unless peft can make a config of each component's."""
    from peft import LoraConfig

    found = settings(metadata)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, where an object is expected")
    for component in {key.partition(".")[0] for key in found}:
        fields = {k.partition(".")[2]: v for k, v in found.items() if k.partition(".")[0] == component}
        config = LoraConfig(**fields)
        for name, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
            for value in (getattr(config, name), *(getattr(config, pattern) or {}).values()):
                if type(value) not in (int, float) or not value > 0:
                    raise ValueError(f"{component}.{name}: {value!r} is no number above 0")


def serialised(state: State, metadata: Mapping[str, str]) -> bytes:
    """The file's bytes; equal for equal LoRAs (safetensors itself writes metadata in a random order)."""
    from safetensors.torch import save

    data = save({k: v.contiguous() for k, v in state.items()}, metadata={"format": "pt", **metadata})
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:start]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[start:]


def packed(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """File metadata as diffusers writes it, of each component's adapter config."""
    flat = {f"{name}.{key}": value for name, config in configs.items() for key, value in config.items()}
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in flat.items()}
    return {METADATA_KEY: json.dumps(plain, indent=2, sort_keys=True)}


def alphas(state: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, float]:
    """The alpha of every adapted module (diffusers' keys, with the component); the rank where nothing states it."""
    config = settings(metadata)
    found = {}
    for key in state:
        if key.endswith(".lora_A.weight"):
            module = key.removesuffix(".lora_A.weight")
            component, _, name = module.partition(".")
            special = config.get(f"{component}.alpha_pattern") or {}
            found[module] = float(special.get(name, config.get(f"{component}.lora_alpha", state[key].shape[0])))
    return found


def _from_diffusers(state: State, metadata: Mapping[str, str], target: str) -> tuple[State, dict[str, str]]:
    if target == "diffusers":
        return state, dict(metadata)
    refuse_format(target, {k.partition(".")[0] for k in state})
    prefix, infix = (COMFYUI, "") if target == "comfyui" else ("", ".default")
    result = {}
    for key, tensor in state.items():
        name, _, _ = key.removeprefix(f"{DENOISER}.").rpartition(".weight")
        result[f"{prefix}{name}{infix}.weight"] = tensor
    for module, alpha in alphas(state, metadata).items():
        result[f"{prefix}{module.removeprefix(f'{DENOISER}.')}{ALPHA}"] = torch.tensor(alpha)
    rest = {k: v for k, v in metadata.items() if k != METADATA_KEY}
    return result, {**rest, **({OTHER_METADATA_KEY: metadata[METADATA_KEY]} if METADATA_KEY in metadata else {})}


def _to_diffusers(state: State, metadata: Mapping[str, str], source: str) -> tuple[State, dict[str, str]]:
    if source == "diffusers":
        return dict(state), dict(metadata)
    prefix = COMFYUI if source == "comfyui" else ""
    weights, stated = {}, {}
    for key, tensor in state.items():
        name = key.removeprefix(prefix)
        if name.endswith(ALPHA):
            stated[name.removesuffix(ALPHA)] = float(tensor)
        else:
            weights[f"{DENOISER}.{name.replace('.default.weight', '.weight')}"] = tensor
    rest = {k: v for k, v in metadata.items() if k != OTHER_METADATA_KEY}
    if OTHER_METADATA_KEY in metadata:
        return weights, {**rest, METADATA_KEY: metadata[OTHER_METADATA_KEY]}
    return weights, {**rest, **packed({DENOISER: _config(weights, stated)})}


def _config(weights: State, stated: Mapping[str, float]) -> dict[str, Any]:
    """The adapter config of a file that another program wrote: its ranks and alphas, the commonest as the default."""
    prefix, suffix = f"{DENOISER}.", ".lora_A.weight"
    ranks = {k.removeprefix(prefix).removesuffix(suffix): v.shape[0] for k, v in weights.items() if k.endswith(suffix)}
    module_alphas = {m: stated.get(m, float(r)) for m, r in ranks.items()}
    rank, alpha = _commonest(ranks), _commonest(module_alphas)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {m: r for m, r in ranks.items() if r != rank},
        "alpha_pattern": {m: a for m, a in module_alphas.items() if a != alpha},
        "target_modules": sorted(ranks),
    }


def _commonest(values: Mapping[str, Any]) -> Any:
    return Counter(values.values()).most_common(1)[0][0]
