"""The store of a cache at scale: opening it, its memory, random reads against one file per row, several writers.

python -m benchmarks.store [--rows 1000000] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsplit.cache.draft import write_manifest
from dsplit.cache.manifest import Entry, Manifest, manifest_path
from dsplit.cache.shards import Value, write_shard
from dsplit.cache.store import Store, Writer

LARGE = 2048  # rows whose latents have 128 KB; those of the others have 16 bytes, so that a million fit on a disk
SHAPE = (16, 1, 32, 64)  # of float32: 128 KB
PER_SHARD = 4096  # values: 512 MB of 128 KB each
BLOCKS, READS = 150, 20  # reads alternate in blocks, and the least time of a block counts
HEADER = {
    "family": "qwen-image",
    "task": "sft",
    "trainable": ["transformer"],
    "dtype": "float32",
    "posterior": "mean",
    "units": {},
    "model": {"name": "", "files": {}, "sizes": {}},
    "columns": ["size"],
    "axes": {},
    "empty_prompt": {},
    "data": {},
}
WRITERS, COMMITS, ROWS = 8, 25, 32

OPEN = """
import json, re, sys, time
from pathlib import Path
from dsplit.cache.rows import CachedRows
def peak():  # not ru_maxrss, which counts the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e3
bare, started = peak(), time.perf_counter()
rows = CachedRows(Path(sys.argv[1]))
seconds = time.perf_counter() - started
assert len(rows) == int(sys.argv[2]) and "torch" not in sys.modules
print(json.dumps({"seconds": seconds, "peak_mb": peak(), "bare_mb": bare}))
"""


class Rows(Sequence[Entry]):
    """Rows of a manifest that are made when they are asked for; equal numbers give equal rows."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Entry:
        if i >= self._count:
            raise IndexError
        keys = {name: [key(name, i)] for name in ("latents", "prompt_embeds")}
        return Entry(key("row", i), f"data/metadata.csv:{i + 2}", ((1024, 1024), (832, 1216))[i % 2], {}, keys)


def key(name: str, i: int) -> str:
    """32 hex digits, spread as hashes are."""
    return random.Random(f"{name} {i}").randbytes(16).hex()


def fill(folder: Path, rows: int) -> None:
    """Makes a cache of `rows` rows with two values each."""
    large = bytes(random.Random(0).randbytes(4 * 16 * 32 * 64))
    for start in range(0, rows, PER_SHARD):
        numbers = range(start, min(start + PER_SHARD, rows))
        pictures = {
            key("latents", i): Value("float32", SHAPE, large) if i < LARGE else Value("float32", (4,), large[:16])
            for i in numbers
        }
        texts = {key("prompt_embeds", i): Value("float32", (4,), large[16:32]) for i in numbers}
        for unit, values in (("encode_image", pictures), ("encode_prompt", texts)):
            write_shard(folder / "shards" / unit, unit, values)
    write_manifest(manifest_path(folder, "default"), Manifest(HEADER, Rows(rows)))


def opened(folder: Path, rows: int) -> dict[str, float]:
    """Seconds and peak memory of a new process that opens the cache."""
    command = [sys.executable, "-c", OPEN, str(folder), str(rows)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def reads(folder: Path, rows: int) -> dict[str, float]:
    """Microseconds per random read of a 128 KB value: from the store, and by torch.load of one file per row."""
    import torch

    keys = [key("latents", i) for i in range(min(LARGE, rows))]
    files = folder / "files"
    files.mkdir()
    store = Store(folder)
    for name in keys:
        torch.save({"latents": store.get(name)}, files / f"{name}.pth")
    ways: dict[str, Callable[[str], Any]] = {
        "store": store.get,
        "torch.load": lambda name: torch.load(files / f"{name}.pth", weights_only=True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for block in range(BLOCKS):
        chosen = random.Random(block).sample(keys, min(READS, len(keys)))
        for name, read in ways.items():
            started = time.perf_counter()
            for one in chosen:
                read(one)
            times[name].append((time.perf_counter() - started) / len(chosen) * 1e6)
    return {name: min(found) for name, found in times.items()}


def write(folder: Path, number: int, ready: Any) -> None:
    """Commits rows of 16 KB each into the store that others write to as well."""
    import torch

    torch.set_num_threads(1)
    value = torch.zeros(4096)
    keys = [key(f"writer {number}", i) for i in range(COMMITS * ROWS)]
    store = Store(folder)
    ready.wait()
    with Writer(store, "encode_image") as writer:
        for name in keys:
            writer.put({name: value})
    ready.wait()


def written(folder: Path, processes: int) -> float:
    """Rows per second of so many processes that write at once; all of them can be read afterwards."""
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes + 1)
    workers = [context.Process(target=write, args=(folder, n, ready)) for n in range(processes)]
    for worker in workers:
        worker.start()
    ready.wait()
    started = time.perf_counter()
    ready.wait()
    seconds = time.perf_counter() - started
    for worker in workers:
        worker.join()
    store = Store(folder)
    names = [key(f"writer {n}", i) for n in range(processes) for i in range(COMMITS * ROWS)]
    assert store.present(names) == set(names)
    return len(names) / seconds


def measure(folder: Path, rows: int) -> list[dict[str, Any]]:
    """A row of the table per figure: what, ours, the other's or the limit, their ratio, whether it is as it should."""
    started = time.perf_counter()
    fill(folder, rows)
    print(f"{rows} rows written in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    first, again = opened(folder, rows), min((opened(folder, rows) for _ in range(3)), key=lambda run: run["seconds"])
    read = reads(folder, rows)
    one, many = written(folder / "one", 1), written(folder / "many", WRITERS)
    ours = read["store"]
    return [
        _row("first open, index made (s)", first["seconds"], None),
        _row("first open, peak memory (MB)", first["peak_mb"], None),
        _row("bare imports, memory (MB)", again["bare_mb"], None),
        _row("open (s), against 2 s", again["seconds"], 2.0, least=1),
        _row("open, peak memory (MB), against 300", again["peak_mb"], 300.0, least=1),
        _row("random read of 128 KB (us), against torch.load", ours, read["torch.load"], least=3),
        _row(f"rows/s of 1 writer, against {WRITERS} at once", one, many),
    ]


def _row(what: str, ours: float, other: float | None, least: float | None = None) -> dict[str, Any]:
    ratio = other / ours if other else None
    return {"what": what, "ours": ours, "other": other, "ratio": ratio, "least": least}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", help="where the cache is made, in a folder that is removed afterwards")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        os.environ["DSPLIT_INDEX"] = str(Path(name) / "index")
        table = measure(Path(name) / "cache", options.rows)
    if options.json:
        print(json.dumps({"rows": options.rows, "table": table}))
    else:
        print(f"{'':<50}{'ours':>10}{'other':>10}{'ratio':>8}{'least':>7}")
        for row in table:
            other, ratio, least = ("" if row[n] is None else f"{row[n]:.2f}" for n in ("other", "ratio", "least"))
            print(f"{row['what']:<50}{row['ours']:>10.2f}{other:>10}{ratio:>8}{least:>7}")
    return int(any(row["least"] and row["ratio"] < row["least"] for row in table))


if __name__ == "__main__":
    sys.exit(main())
