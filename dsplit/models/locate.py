"""Finds the model that the options name: its family, and where each component lies. Fetches what is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dsplit.errors import ModelError, UsageError
from dsplit.models.family import ModelFamily
from dsplit.models.model import MODELS, Model, Part, find_part
from dsplit.models.origins import ALIASES, SYNTAX, Origin, nearest, read_offloaded, read_origins, read_paths
from dsplit.models.places import Place, class_of, family_of, find_place, no_files, not_here, offline
from dsplit.models.registry import registry
from dsplit.recipe import ModelOptions

__all__ = ["MODELS", "Model", "Part", "Place", "family_of", "find_family", "find_place", "locate"]


def locate(options: ModelOptions, *, fetch: Sequence[str] | None = None, hub: str = "modelscope") -> Model:
    """The model that the options name.

    `--model-path` wins over `--model`, which then counts only if it names a family; the lists
    `--model-id-with-origin-paths` and `--model-paths` name all weights there are, and their folders give the parts
    without weights. A repo id, and a family without weights of its own, lie in ./models/REPO; those of the components
    `fetch` that are missing or damaged there are fetched from `hub` first, unless HF_HUB_OFFLINE is set.
    Raises UsageError if no model is named, ModelError if it is not found.
    """
    places = _places(options, hub)
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


def find_family(options: ModelOptions) -> ModelFamily:
    """The family that the options name, known before any weights are here. Raises as `locate` does."""
    places = _places(options, options.hub)
    named = _named(places)
    if named:
        return named
    if options.model_id_with_origin_paths or options.model_paths or not places:
        return locate(options, hub=options.hub).family
    return family_of(places[-1], options.hub)


def _places(options: ModelOptions, hub: str) -> list[Place]:
    """Where the options look for the model: a `--model` beside `--model-path` counts only if it names a family."""
    model = options.model
    if options.model_path and model not in registry().families:
        model = None
    return [find_place(text, hub) for text in (model, options.model_path) if text]


def _named(places: Iterable[Place]) -> ModelFamily | None:
    return next((p.family for p in places if p.family), None)


def _parts(family: ModelFamily, place: Place) -> dict[str, Part]:
    """The components below a folder. Raises ModelError if there is none."""
    if not place.folder.is_dir():
        raise ModelError(not_here(place))
    parts = {c.name: _part(family, c.name, place.folder) for c in family.components if _filled(place.folder / c.name)}
    if not parts:
        raise ModelError(no_files(place.folder, [f"{c.name}/" for c in family.components]))
    return parts


def _part(family: ModelFamily, name: str, root: Path, asked: Iterable[Path] | None = None) -> Part:
    return find_part(root / name, asked) if family.component(name).weights else Part(root / name)


def _filled(folder: Path) -> bool:
    return folder.is_dir() and any(not p.name.startswith(".") for p in folder.iterdir())


def _complete(family: ModelFamily, place: Place, components: Sequence[str], hub: str) -> None:
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
    family: ModelFamily,
    origins: Sequence[Origin],
    roots: Mapping[str, Place],
    fetch: Sequence[str],
    hub: str,
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
            found, wanted = class_of(model.config(c.name)), c.cls.rpartition(".")[2]
            if found and found != wanted:
                raise ModelError(
                    f"{model.parts[c.name].folder}: is a {found}, but {model.family.name} needs a {wanted}; "
                    "name another --model, or another --model-path"
                )
