"""The reference's ways to name weights: `REPO_OR_FOLDER:COMPONENT/PATTERN` lists, and JSON lists of files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from dsplit.errors import ModelError, UsageError
from dsplit.models.family import ModelFamily

ALIASES = {"dit": "transformer"}
SYNTAX = "REPO_OR_FOLDER:COMPONENT/PATTERN"
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*$")


@dataclass(frozen=True)
class Origin:
    """One entry of a list: `place` is a folder or a repo id; `pattern` names files below it (empty: all)."""

    place: str
    pattern: str

    @property
    def component(self) -> str:
        """The component that the pattern names first; empty for an empty pattern."""
        first = self.pattern.split("/")[0]
        return ALIASES.get(first, first)

    def glob(self, root: Path) -> list[Path]:
        """The files below `root` that the pattern names, sorted; a folder stands for all its files."""
        below = self.pattern.split("/", 1)[1:] or [""]
        folder = root / self.component
        if not folder.is_dir():
            return []
        return sorted(p for p in folder.glob(below[0] or "*") if p.is_file())


def is_repo_id(text: str) -> bool:
    """True for `ORG/NAME`."""
    return bool(_REPO.match(text))


def read_origins(text: str) -> list[Origin]:
    """The entries of a `--model-id-with-origin-paths` list.

    An entry is split at the last colon before which stands an existing folder, else at the last one before which
    stands a repo id: folders may hold colons and spaces. Raises ModelError for an entry with neither.
    """
    return [_origin(entry) for entry in _entries(text)]


def read_offloaded(text: str, family: ModelFamily) -> frozenset[str]:
    """The components that an `--offload-models` list names: in the same syntax, or plainly by name.

    Raises UsageError for an entry that names no component of the family.
    """
    known = {c.name for c in family.components}
    found = set()
    for entry in _entries(text):
        tails = [entry[colon + 1 :] for colon in (*_colons(entry), -1)]
        names = [Origin("", tail).component for tail in tails]
        name = next((n for n in names if n in known), None)
        if name is None:
            raise UsageError(f"--offload-models: '{entry}' names no component of {family.name} ({', '.join(known)})")
        found.add(name)
    return frozenset(found)


def read_paths(text: str) -> list[Path]:
    """The files of a `--model-paths` JSON list; an inner list holds the shards of one component.

    Raises UsageError if it is no such list, ModelError for a file that does not exist.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--model-paths is no JSON ({error}); write it as '[\"model/vae/x.safetensors\"]'") from error
    items = [i for item in (value if isinstance(value, list) else [value])
             for i in (item if isinstance(item, list) else [item])]  # fmt: skip
    if not items or not all(isinstance(i, str) and i for i in items):
        raise UsageError("--model-paths: a JSON list of files, or of lists of files (shards), is needed")
    paths = [Path(i).expanduser() for i in items]
    missing = [missing_path(p) for p in paths if not p.exists()]
    if missing:
        raise ModelError("\n".join(missing))
    return paths


def missing_path(path: Path) -> str:
    """`model folder 'm/nope' not found: ...`, with the nearest names that exist in its deepest existing folder."""
    inner = path
    while not inner.parent.is_dir():
        inner = inner.parent
    return f"'{path}' not found: there is no '{inner.name}' in '{inner.parent}'{nearest(inner.name, inner.parent)}"


def nearest(name: str, folder: Path) -> str:
    """` (nearest: a, b)`: the names in `folder` that are most like `name`, else the first few."""
    try:
        names = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    except OSError:
        return ""
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f" (nearest: {', '.join(near)})"
    shown = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    return f" (it holds: {shown})" if names else " (it is empty)"


def _origin(entry: str) -> Origin:
    halves = [(entry[:colon], entry[colon + 1 :]) for colon in _colons(entry)]
    for place, pattern in halves:
        if Path(place).expanduser().is_dir():
            return Origin(place, pattern)
    if Path(entry).expanduser().is_dir():
        return Origin(entry, "")
    for place, pattern in halves:
        if is_repo_id(place):
            return Origin(place, pattern)
    if not halves:
        raise ModelError(f"'{entry}' is not {SYNTAX}, e.g. Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors")
    raise ModelError(f"{missing_path(Path(halves[0][0]).expanduser())}; it is no repo id (ORG/NAME) either")


def _entries(text: str) -> Iterator[str]:
    return (entry.strip() for entry in text.split(",") if entry.strip())


def _colons(entry: str) -> list[int]:
    """Where the colons of an entry are, the last one first."""
    return [m.start() for m in re.finditer(":", entry)][::-1]
