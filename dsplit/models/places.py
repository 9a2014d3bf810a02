"""What a text means as a model: a family name, a folder, or a repo id; and the family of the weights in a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dsplit.errors import ModelError
from dsplit.models.family import ModelFamily
from dsplit.models.model import MODELS, read_json
from dsplit.models.origins import is_repo_id, missing_path, nearest
from dsplit.models.registry import registry


@dataclass(frozen=True)
class Place:
    """What a text means as a model: its family if the text names one, its repo id if it has one, its folder."""

    text: str
    folder: Path
    repo: str | None = None
    family: ModelFamily | None = None


def find_place(text: str, hub: str = "modelscope") -> Place:
    """The place that `text` means: a family name, a folder, or a repo id, in this order.

    Raises ModelError for a path that does not exist, before any network is asked: a text is a path unless it has the
    form ORG/NAME and no folder ORG is here.
    """
    families = registry().families
    if text in families:
        family = families[text]
        repo = family.repos.get(hub) or next(iter(family.repos.values()))
        return Place(text, MODELS / repo, repo, family)
    path = Path(text).expanduser()
    if path.is_dir():
        return Place(text, path)
    if path.is_file():
        raise ModelError(f"'{text}' is a file; name the model's folder (the one that holds model_index.json)")
    if is_repo_id(text) and ((MODELS / text).is_dir() or not path.parent.exists()):
        return Place(text, MODELS / text, text)
    if "/" not in text and os.sep not in text:
        near = get_close_matches(text, families, n=3) or sorted(families)
        raise ModelError(
            f"'{text}' is no model family (nearest: {', '.join(near)}), no repo id (ORG/NAME), "
            f"and no folder in '{Path.cwd()}'{nearest(text, Path.cwd())}"
        )
    raise ModelError(missing_path(path))


def family_of(place: Place, hub: str | None = None) -> ModelFamily:
    """The family of the weights at `place`: from model_index.json, else from the classes that the configs name.

    A repo that is not here yet is known as a family's default repo, or by its model_index.json, fetched if a `hub` is
    given. Raises ModelError if no registered family fits, or several do.
    """
    families = registry().families.values()
    index = place.folder / "model_index.json"
    if place.repo and not index.is_file():
        known = [f for f in families if place.repo in f.repos.values()]
        if known:
            return known[0]
        if hub and not offline():
            from dsplit.models.fetch import fetch_model

            fetch_model(place.repo, hub=hub, components=(), local_dir=place.folder)
    if not place.folder.is_dir():
        raise ModelError(not_here(place))
    if index.is_file():
        says = str(read_json(index).get("_class_name"))
        fitting = [f for f in families if f.pipeline.rpartition(".")[2] == says]
    else:
        classes = _classes(place.folder)
        if not classes:
            raise ModelError(no_files(place.folder, ("model_index.json",)))
        says = ", ".join(classes.values())
        fitting = [f for f in families if _agrees(f, classes)]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(sorted(f.name for f in (fitting or families)))
    problem = f"fits several families ({names})" if fitting else f"is of no registered family ({names})"
    raise ModelError(
        f"'{place.folder}' ({says}) {problem}; name the family: --model FAMILY --model-path '{place.folder}'"
    )


def offline() -> bool:
    """True if the user forbids the network, in the way that huggingface_hub and transformers understand."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def _classes(folder: Path) -> dict[str, str]:
    """The class that each component's config names, by component."""
    configs = {p.parent.name: read_json(p) for p in sorted(folder.glob("*/config.json"))}
    return {name: found for name, config in configs.items() if (found := class_of(config))}


def class_of(config: Mapping[str, Any]) -> str:
    """The class that a config names (diffusers' or transformers' way), or an empty text."""
    return str(config.get("_class_name") or (config.get("architectures") or [""])[0])


def _agrees(family: ModelFamily, classes: Mapping[str, str]) -> bool:
    """True if the folder holds at least one of the family's classes, and no other class under their names."""
    pairs = [(classes[c.name], c.cls.rpartition(".")[2]) for c in family.components if c.weights and c.name in classes]
    return bool(pairs) and all(found == wanted for found, wanted in pairs)


def no_files(folder: Path, wanted: Sequence[str]) -> str:
    if (folder.parent / "model_index.json").is_file():
        return f"'{folder}' is a part of a model; name the model's folder, its parent '{folder.parent}'"
    return f"no model files in '{folder}': looked for {', '.join(wanted)}{nearest(wanted[0], folder)}"


def not_here(place: Place) -> str:
    remedy = "HF_HUB_OFFLINE is set; unset it or give a folder" if offline() else "fetch it: `dsplit prepare --model"
    remedy += "" if offline() else f" {place.text}`, or give a folder with --model-path"
    return f"the weights of '{place.repo or place.text}' are not in '{place.folder}'; {remedy}"
