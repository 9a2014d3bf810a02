"""The dsplit.toml that `dsplit prepare` writes: what was stated, and every other option as a comment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from typing import Any

from dsplit.commands.options import default_of, value_type
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, TrainOptions, ValidateOptions

SECTIONS = {
    "model": ModelOptions,
    "data": DataOptions,
    "cache": CacheOptions,
    "train": TrainOptions,
    "validate": ValidateOptions,
}
LEFT_OUT = {"width", "height", "from_cache", "overwrite", "parity", "parity_rows", "tolerance"}
LEFT_OUT |= {"status", "verify", "gc", "yes"}  # jobs of their own
CACHE_ONLY = {"name"}  # train and validate follow the cache's
HEAD = """\
# The settings of this run: `dsplit cache`, `dsplit train --from-cache` and `dsplit validate` read them in this folder.
# Options on the command line win over them. Relative paths start at this folder.
# A line that begins with # shows a default; "..." stands for a value of yours.
"""


def template(stated: Mapping[str, Mapping[str, Any]]) -> str:
    """The text of dsplit.toml. stated: section -> option name -> value, written as settings; all else is comments."""
    parts = [HEAD]
    for section, group in SECTIONS.items():
        parts.append("\n".join([f"[{section}]", *_lines(group, stated.get(section, {}))]) + "\n")
    return "\n".join(parts)


def _lines(group: type, stated: Mapping[str, Any]) -> Iterator[str]:
    for field in fields(group):
        if field.name in stated:
            setting = f"{field.name} = {_toml(stated[field.name])}"
        elif field.metadata["hidden"] or field.name in LEFT_OUT or (field.name in CACHE_ONLY and group != CacheOptions):
            continue
        else:
            setting = f"# {field.name} = {_default(field)}"
        yield f"{setting:<36} # {field.metadata['help']}{_note(field)}".rstrip()


def _default(field: Field) -> str:
    """The default as TOML where it is a value, else `...`."""
    value, shown = default_of(field), field.metadata["shown"]
    if value not in (None, []):
        return _toml(value)
    if value_type(field) in (int, float):
        return shown if shown.replace("e-", "").replace(".", "").isdigit() else "..."
    if field.name in ("out", "task") and " " not in shown:
        return _toml(shown)
    if field.name == "prompt":
        return _toml([shown])
    return '"..."'


def _note(field: Field) -> str:
    """What an unstated option means, where the setting does not show it."""
    return f" Default: {field.metadata['shown']}." if field.metadata["shown"] and "..." in _default(field) else ""


def _toml(value: Any) -> str:
    """A value as TOML; strings and lists of strings are written as in JSON, which TOML reads alike."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
