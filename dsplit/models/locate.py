"""Finds the model that the options name: its family, and where each component lies. Fetches what is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dsplit.errors import ModelError, UsageError
from dsplit.models.family import ModelFamily
from dsplit.models.model import MODELS, Model, Part, find_part, read_json
from dsplit.models.origins import (
    ALIASES,
    SYNTAX,
    Origin,
    is_repo_id,
    missing_path,
    nearest,
    read_offloaded,
    read_origins,
    read_paths,
)
from dsplit.models.registry import registry
from dsplit.recipe import ModelOptions

__all__ = ["Model", "Part", "Place", "locate"]


@dataclass(frozen=True)
class Place:
    """What a text means as a model: its family if the text names one, its repo id if it has one, its folder."""

    text: str
    folder: Path
    repo: str | None = None
    family: ModelFamily | None = None


def locate(options: ModelOptions, *, fetch: Sequence[str] | None = None, hub: str = "modelscope") -> Model:
    """The model that the options name.

    `--model-path` wins over `--model` for the weights; the lists `--model-id-with-origin-paths` and `--model-paths`
    name all weights there are, and their folders give the parts without weights. A repo id, and a family without
    weights of its own, lie in ./models/REPO; those of the components `fetch` that are missing or damaged there are
    fetched from `hub` first, unless HF_HUB_OFFLINE is set.
    Raises UsageError if no model is named, ModelError if it is not found.
    """
    places = [find_place(text, hub) for text in (options.model, options.model_path) if text]
    if options.model_id_with_origin_paths or options.model_paths:
        model = _listed(options, places, fetch or (), hub)
    elif places:
        place = places[-1]
        family = _named(places) or family_of(place, hub if fetch else None)
        if place.repo and fetch:
            _complete(family, place, fetch, hub)
        model = Model(family, place.text, _parts(family, place), looked_in=(place.folder,))
    else:
        raise UsageError("no model is named; give --model FAMILY, FOLDER or REPO (see `dsplit tasks`)")
    _same_classes(model)
    offloaded = read_offloaded(options.offload_models or "", model.family)
    return Model(model.family, model.name, model.parts, offloaded, model.looked_in)


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
        raise ModelError(_not_here(place))
    if index.is_file():
        says = str(read_json(index).get("_class_name"))
        fitting = [f for f in families if f.pipeline.rpartition(".")[2] == says]
    else:
        classes = _classes(place.folder)
        if not classes:
            raise ModelError(_no_files(place.folder, ("model_index.json",)))
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


def _named(places: Iterable[Place]) -> ModelFamily | None:
    return next((p.family for p in places if p.family), None)


def _parts(family: ModelFamily, place: Place) -> dict[str, Part]:
    """The components below a folder. Raises ModelError if there is none."""
    if not place.folder.is_dir():
        raise ModelError(_not_here(place))
    parts = {c.name: _part(family, c.name, place.folder) for c in family.components if _filled(place.folder / c.name)}
    if not parts:
        raise ModelError(_no_files(place.folder, [f"{c.name}/" for c in family.components]))
    return parts


def _part(family: ModelFamily, name: str, root: Path, asked: Iterable[Path] | None = None) -> Part:
    return find_part(root / name, asked) if family.component(name).weights else Part(root / name)


def _filled(folder: Path) -> bool:
    return folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir())


def _complete(family: ModelFamily, place: Place, components: Iterable[str], hub: str) -> None:
    """Fetches those of `components` that are missing or damaged in the place of a repo."""
    from dsplit.models.fetch import fetch_missing

    def incomplete() -> list[str]:
        parts = {n: _part(family, n, place.folder) for n in components if _filled(place.folder / n)}
        here = Model(family, place.text, parts)
        return [n for n in components if n not in parts or here.faults(n)]

    if incomplete() and not offline():
        fetch_missing(str(place.repo), incomplete, hub=hub, local_dir=place.folder)


def _listed(options: ModelOptions, places: Sequence[Place], fetch: Sequence[str], hub: str) -> Model:
    """The model that the two lists name; `places` give its family, and parts without weights the lists do not have."""
    origins = read_origins(options.model_id_with_origin_paths or "")
    files = read_paths(options.model_paths) if options.model_paths else []
    roots = {o.place: _root(o.place, hub) for o in origins}
    for path in files:
        folder = path if path.is_dir() else path.parent
        roots.setdefault(str(folder.parent), Place(str(folder.parent), folder.parent))
    everywhere = [*roots.values(), *places]
    family = _named(places) or family_of(everywhere[0], hub if fetch else None)
    _fetch_listed(family, origins, roots, fetch, hub)

    asked: dict[tuple[str, Path], list[Path]] = {}
    for origin in origins:
        root = roots[origin.place].folder
        for name, found in _matches(family, origin, root, options.offload_models or "").items():
            asked.setdefault((name, root), []).extend(found)
    for path in files:
        folder = path if path.is_dir() else path.parent
        name = ALIASES.get(folder.name, folder.name)
        family.component(name)
        asked.setdefault((name, folder.parent), []).extend([path] if path.is_file() else sorted(folder.iterdir()))
    _once(asked)
    parts = {name: _listed_part(family, name, root, found) for (name, root), found in asked.items()}
    for c in family.components:
        holder = next((p.folder for p in everywhere if _filled(p.folder / c.name)), None)
        if not c.weights and c.name not in parts and holder:
            parts[c.name] = Part(holder / c.name)
    name = ", ".join(p.text for p in roots.values())
    return Model(family, name, parts, looked_in=tuple(dict.fromkeys(p.folder for p in everywhere)))


def _root(text: str, hub: str) -> Place:
    """The place of a list's entry: an existing folder first, so that a folder may be called like a family."""
    folder = Path(text).expanduser()
    return Place(text, folder) if folder.is_dir() else find_place(text, hub)


def _fetch_listed(
    family: ModelFamily, origins: Sequence[Origin], roots: Mapping[str, Place], fetch: Sequence[str], hub: str
) -> None:
    """Fetches what `fetch` needs of the repos in a list: the listed components, and the parts without weights."""
    listed: dict[str, set[str]] = {}
    for origin in origins:
        listed.setdefault(origin.place, set()).add(origin.component)
    everything = set().union(*listed.values()) if listed else set()
    for text, place in roots.items():
        if place.repo:
            plain = {c.name for c in family.components if not c.weights} - everything
            _complete(family, place, [n for n in fetch if n in listed.get(text, set()) | plain], hub)


def _matches(family: ModelFamily, origin: Origin, root: Path, offloaded: str) -> dict[str, list[Path]]:
    """The files of an entry by component; nothing for a component that is not here at all.

    Raises ModelError if the component is here, but no file of that pattern (and it is not offloaded).
    """
    if not origin.pattern:
        return {c.name: sorted((root / c.name).iterdir()) for c in family.components if _filled(root / c.name)}
    name = origin.component
    family.component(name)
    found = origin.glob(root)
    if found or not _filled(root / name) or name in read_offloaded(offloaded, family):
        return {name: found} if found else {}
    last = origin.pattern.rpartition("/")[2]
    folder = root / name
    raise ModelError(f"'{origin.place}:{origin.pattern}' matches no file in '{folder}'{nearest(last, folder)}")


def _listed_part(family: ModelFamily, name: str, root: Path, found: Sequence[Path]) -> Part:
    """The part of the files that a list names. Raises ModelError for a pickle, which is never loaded."""
    part = _part(family, name, root, found)
    if family.component(name).weights and not part.files and not part.fault:
        shown = ", ".join(sorted(p.name for p in found)[:3])
        raise ModelError(f"{root / name}: no safetensors among the listed files ({shown}); dsplit loads nothing else")
    return part


def _once(asked: Iterable[tuple[str, Path]]) -> None:
    """Raises UsageError if a component is listed from two folders."""
    holders: dict[str, Path] = {}
    for name, root in asked:
        if name in holders:
            raise UsageError(f"'{name}' is listed twice: in '{holders[name]}' and in '{root}'; keep one ({SYNTAX})")
        holders[name] = root


def _same_classes(model: Model) -> None:
    """Raises ModelError if a component with weights is of another class than the family's."""
    for c in model.family.components:
        if c.weights and c.name in model.parts:
            found, wanted = _class(model.config(c.name)), c.cls.rpartition(".")[2]
            if found and found != wanted:
                raise ModelError(
                    f"{model.parts[c.name].folder}: is a {found}, but {model.family.name} needs a {wanted}; "
                    "name another --model, or another --model-path"
                )


def _classes(folder: Path) -> dict[str, str]:
    """The class that each component's config names, by component."""
    configs = {p.parent.name: read_json(p) for p in sorted(folder.glob("*/config.json"))}
    return {name: found for name, config in configs.items() if (found := _class(config))}


def _class(config: Mapping[str, Any]) -> str:
    """The class that a config names (diffusers' or transformers' way), or an empty text."""
    return str(config.get("_class_name") or (config.get("architectures") or [""])[0])


def _agrees(family: ModelFamily, classes: Mapping[str, str]) -> bool:
    """True if the folder holds at least one of the family's classes, and no other class under their names."""
    pairs = [(classes[c.name], c.cls.rpartition(".")[2]) for c in family.components if c.weights and c.name in classes]
    return bool(pairs) and all(found == wanted for found, wanted in pairs)


def _no_files(folder: Path, wanted: Sequence[str]) -> str:
    if (folder.parent / "model_index.json").is_file():
        return f"'{folder}' is a part of a model; name the model's folder, its parent '{folder.parent}'"
    return f"no model files in '{folder}': looked for {', '.join(wanted)}{nearest(wanted[0], folder)}"


def _not_here(place: Place) -> str:
    remedy = "HF_HUB_OFFLINE is set; unset it or give a folder" if offline() else "fetch it: `dsplit prepare --model"
    remedy += "" if offline() else f" {place.text}`, or give a folder with --model-path"
    return f"the weights of '{place.repo or place.text}' are not in '{place.folder}'; {remedy}"
