"""`dsplit cache` in this process with a clock at its encoders' forward calls; prints one JSON object.

python -m benchmarks.timed_stage1 MODEL METADATA OUT: rows, encoded, bytes of the folder per row, and seconds of
wall time and of CPU time: `loops` over all rows, of these `forward` calls and calls of the `units` around them. A run
over the same rows at another size comes first, so that imports and first calls are left out.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsplit.cache import passes, stage1
from dsplit.cache.run import run_cache
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions

FORWARD = {"vae": "encode", "text_encoder": "forward"}  # what calls a component
SPENT: dict[str, list[float]] = {}


def timed(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """`function`, its wall and CPU seconds added up under `label`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent = SPENT.setdefault(label, [0.0, 0.0])
            spent[0] += time.perf_counter() - wall
            spent[1] += time.process_time() - cpu

    return run


def main() -> None:
    model, metadata, out = sys.argv[1:]
    load = stage1.load_component

    def load_timed(*args: Any) -> Any:
        component = load(*args)
        if name := FORWARD.get(args[1]):
            setattr(component, name, timed(getattr(component, name), "forward"))
        return component

    def run(folder: str, **data: Any) -> dict[str, Any]:
        SPENT.clear()
        options = ModelOptions(model=model, threads=1, dtype="float32", device="cpu")
        return run_cache(options, DataOptions(metadata=metadata, **data), CacheOptions(out=folder))

    stage1.load_component = load_timed  # type: ignore[assignment]
    passes.encode = timed(passes.encode, "units")  # type: ignore[assignment]
    stage1.Stage1._run_job = timed(stage1.Stage1._run_job, "loops")  # type: ignore[method-assign]
    with contextlib.redirect_stdout(sys.stderr):
        with tempfile.TemporaryDirectory() as warm:
            run(warm, resolution="32x32")
        result = run(out)
    size = sum(p.stat().st_size for p in Path(out).rglob("*") if p.is_file())
    print(json.dumps({**result, "bytes_per_row": size / result["rows"], **SPENT}))


if __name__ == "__main__":
    main()
