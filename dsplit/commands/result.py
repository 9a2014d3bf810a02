"""What a command prints on stdout: one JSON object with --json, else a few lines for people."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dsplit.commands.options import Given


def show(given: Given, work: Callable[[], Mapping[str, Any]], text: Callable[[Mapping[str, Any]], str]) -> None:
    """Does `work` and prints its result: as JSON if `given` says so, else what `text` makes of it.

    Whatever libraries print meanwhile goes to stderr, so that stdout holds the result and nothing else. Only the main
    process of a launch prints.
    """
    with contextlib.redirect_stdout(sys.stderr):
        result = work()
    if os.environ.get("RANK", "0") != "0":
        return
    if given.get("as_json"):
        import json

        print(json.dumps(result, default=str, ensure_ascii=False))
    else:
        print(text(result))


def size(count: float) -> str:
    """`1500000` -> `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
