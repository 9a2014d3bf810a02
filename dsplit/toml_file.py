"""dsplit.toml: the settings of a run folder, read and checked.

Sections are [model], [data], [cache], [train], [validate]; keys are option names, with `-` or `_`. Options of the
first two may also stand at the top, and in a command's section, where they hold for that command.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dsplit.errors import UsageError
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, TrainOptions, ValidateOptions

NAME = "dsplit.toml"
SHARED = {"model": ModelOptions, "data": DataOptions}
COMMANDS: dict[str, type] = {"cache": CacheOptions, "train": TrainOptions, "validate": ValidateOptions}
PATHS = {"data", "metadata", "out", "from_cache", "lora", "init_lora"}
PERHAPS_PATHS = {"model", "model_path"}  # a path if it is one, seen from the file's folder; else a name


def read_toml(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings in `folder`/dsplit.toml by section, names with underscores; empty where there is no such file.

    Top-level options are merged into their sections; relative paths start at `folder`. Raises UsageError for anything
    that is not TOML, and for unknown sections and keys, all of them at once with the nearest names.
    """
    path = folder / NAME
    sections: dict[str, dict[str, Any]] = {name: {} for name in (*SHARED, *COMMANDS)}
    if not path.is_file():
        return sections
    faults = []
    for key, value in _parse(path).items():
        name = key.replace("-", "_")
        if isinstance(value, Mapping):
            if name in sections:
                sections[name] |= {k.replace("-", "_"): v for k, v in value.items()}
            else:
                faults.append(f"unknown section [{key}]{_near(name, sections)}")
        elif home := next((s for s, group in SHARED.items() if name in names_of(group)), None):
            sections[home].setdefault(name, value)
        else:
            faults.append(f"'{key}'{_where(name, '')}")
    for section, values in sections.items():
        known = names_in(section)
        faults += [f"[{section}] '{name}'{_where(name, section)}" for name in values if name not in known]
    if faults:
        raise UsageError("\n  ".join([f"{path}: unknown settings", *faults]))
    return {s: {n: _from(folder, n, v) for n, v in values.items()} for s, values in sections.items()}


def names_of(group: type) -> list[str]:
    """The option names of a group."""
    return [f.name for f in fields(group)]


def names_in(section: str) -> list[str]:
    """The option names that a section may hold."""
    shared = [n for group in SHARED.values() for n in names_of(group)]
    return names_of(SHARED[section]) if section in SHARED else [*names_of(COMMANDS[section]), *shared]


def _from(folder: Path, name: str, value: Any) -> Any:
    """The value, a relative path in it made to start at `folder`, and `~` the user's home."""
    is_path = name in PATHS or (name in PERHAPS_PATHS and isinstance(value, str) and (folder / value).exists())
    return str(folder / os.path.expanduser(value)) if is_path and isinstance(value, str) and value else value


def _parse(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error})") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error


def _where(name: str, section: str) -> str:
    """What to do about the unknown key `name`: the section where it belongs, or the nearest names."""
    homes = [s for s in (*SHARED, *COMMANDS) if s != section and name in names_of((SHARED | COMMANDS)[s])]
    if homes:
        return " belongs in " + " or ".join(f"[{s}]" for s in homes)
    known = names_in(section) if section else [n for group in SHARED.values() for n in names_of(group)]
    return f" is no setting{_near(name, known)}"


def _near(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
