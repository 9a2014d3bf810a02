"""A model on disk: where each component lies, which files it loads, what its configs say. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsplit.errors import ModelError, Problem, UsageError
from dsplit.models import weights
from dsplit.models.family import ModelFamily

MODELS = Path("models")  # weights of repo ids lie here, as the reference keeps them
CONFIGS = ("config.json", "scheduler_config.json", "tokenizer_config.json", "preprocessor_config.json")
_STANDARD = re.compile(
    r"(diffusion_pytorch_model|model)(\.(?P<variant>[\w-]+?))?(-\d{5}-of-\d{5})?"
    r"(\.safetensors|\.safetensors\.index(\.(?P<index>[\w-]+))?\.json)$"
)
_OTHER_WEIGHTS = (".safetensors", *weights.PICKLES, ".msgpack", ".h5", ".onnx", ".onnx_data", ".gguf", ".ot")
_NEVER_READ = (".md", ".png", ".jpg", ".jpeg", ".gif", ".webp", ".lock", ".incomplete")


@dataclass(frozen=True)
class Part:
    """A component on disk: its folder, and its weight files with their index (none for a tokenizer, a scheduler).

    variant: `fp16` for `model.fp16.safetensors`; from_pretrained takes it under this name. fault: why from_pretrained
    would not find these files, if so; shown when the component is needed.
    """

    folder: Path
    files: tuple[Path, ...] = ()
    variant: str | None = None
    fault: str = ""


@dataclass(frozen=True)
class Model:
    """The parts of a model by component name.

    name: the model as the user gave it. offloaded: components that this stage must not load. looked_in: the folders in
    which the parts were looked for.
    """

    family: ModelFamily
    name: str
    parts: Mapping[str, Part]
    offloaded: frozenset[str] = frozenset()
    looked_in: tuple[Path, ...] = field(default=())

    def has(self, component: str) -> bool:
        """True if the component is there and may be loaded."""
        return component in self.parts and component not in self.offloaded

    def part(self, component: str) -> Part:
        """Where the component lies. Raises ModelError if it is absent."""
        self.family.component(component)
        if component not in self.parts:
            raise ModelError(f"{self.name} has no '{component}'{self._places()}")
        return self.parts[component]

    def files(self, component: str) -> tuple[Path, ...]:
        """Every file that loading the component may read, sorted: weights, index, configs, tokenizer files."""
        part = self.part(component)
        beside = [f / n for f, names in weights.walk(part.folder) for n in names if _may_be_read(n)]
        if not self.family.component(component).weights:
            return tuple(sorted(beside))
        return tuple(sorted({*part.files, *(p for p in beside if not weights.INDEX.match(p.name))}))

    def config(self, component: str) -> dict[str, Any]:
        """The component's own config file; empty if it has none. Raises ModelError if it is no JSON object."""
        folder = self.part(component).folder
        path = next((folder / n for n in CONFIGS if (folder / n).is_file()), None)
        return read_json(path) if path else {}

    def names(self) -> dict[str, Any]:
        """What shape formulas read: `vae.z_dim` -> value, from the configs of this model over the family's own."""
        found = dict(self.family.config)
        for c in self.family.components:
            if c.weights and c.name in self.parts:
                found |= _flat(c.name, self.config(c.name))
        return found

    def require(self, components: Iterable[str], unit_of: Mapping[str, str]) -> None:
        """Raises UsageError if one of `components` is absent or offloaded; `unit_of` says which unit needs it."""
        lines = []
        for name in dict.fromkeys(components):
            need = f"the unit '{unit_of[name]}' needs the component '{name}'" if name in unit_of else f"needs '{name}'"
            if name in self.offloaded:
                lines.append(f"{need}, but --offload-models lists it; take it off that list for this stage")
            elif name not in self.parts:
                lines.append(f"{need}, but {self._lacks(name)}")
        if lines:
            raise UsageError("\n".join(lines))

    def check(self, components: Iterable[str]) -> None:
        """Raises ModelError with every fault of the files of `components`; reads headers only, loads nothing."""
        problems = [p for name in dict.fromkeys(components) for p in self.faults(name)]
        if problems:
            raise ModelError("\n".join([f"{self.name} cannot be loaded:", *(f"  {p}" for p in problems)]))

    def faults(self, component: str) -> list[Problem]:
        """Every fault of the files of one component."""
        part = self.part(component)
        found = [Problem(str(part.folder), part.fault)] if part.fault else []
        by_folder: dict[Path, list[str]] = {}
        for path in (*self.files(component), *(p for p in part.folder.glob("*.bin") if not part.files)):
            by_folder.setdefault(path.parent, []).append(path.name)
        for folder, names in by_folder.items():
            found += weights.folder_faults(folder, names)
        if self.family.component(component).weights:
            if not (part.folder / "config.json").is_file():
                found.append(Problem(str(part.folder), "config.json missing", weights.FETCH_AGAIN))
            if not part.files and not found:
                found.append(Problem(str(part.folder), "no weights (*.safetensors)", weights.FETCH_AGAIN))
        return found

    def _lacks(self, component: str) -> str:
        """What is to be said of an absent component; one that is there is absent only where a list leaves it out."""
        here = next((f for f in self.looked_in if any((f / component).glob("[!.]*"))), None)
        if here:
            return f"the list does not name it; add '{here}:{component}/*.safetensors' to it"
        return f"{self.name} does not have it{self._places()}; add it or fetch it"

    def _places(self) -> str:
        return f" (looked in {', '.join(map(str, self.looked_in))})" if self.looked_in else ""


def find_part(folder: Path, asked: Iterable[Path] | None = None) -> Part:
    """The part in `folder`; `asked`: the files to choose its weights from (default: all in the folder).

    Files without a variant win; a variant (`fp16`) is taken where nothing else is there.
    """
    present = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    chosen = set(present if asked is None else asked)
    variants: dict[str | None, list[Path]] = {}
    for path in present:
        match = _STANDARD.match(path.name)
        if match and (path in chosen or path.suffix == ".json"):
            variants.setdefault(match["variant"] or match["index"], []).append(path)
    if asked is not None:  # an index alone was not asked for
        variants = {v: files for v, files in variants.items() if chosen & set(files)}
    if not variants:
        odd = sorted(p.name for p in chosen if p.suffix == ".safetensors")
        standard = "model.safetensors (transformers) or diffusion_pytorch_model.safetensors (diffusers)"
        return Part(folder, fault=f"from_pretrained finds no '{odd[0]}'; rename it to {standard}" if odd else "")
    if None not in variants and len(variants) > 1:
        return Part(folder, fault=f"several variants ({', '.join(map(str, variants))}); choose one by --model-paths")
    variant = None if None in variants else next(iter(variants))
    return Part(folder, tuple(variants[variant]), variant)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError, in words."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return value


def _may_be_read(name: str) -> bool:
    return not name.endswith((*_OTHER_WEIGHTS, *_NEVER_READ)) and not name.upper().startswith(("README", "LICENSE"))


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested configs with dotted names: `text_encoder.text_config.hidden_size`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(f"{prefix}.{key}", value) if isinstance(value, dict) else {f"{prefix}.{key}": value}
    return flat
