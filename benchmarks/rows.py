"""Reading metadata of many rows: time and memory.

python -m benchmarks.rows [--rows 1000000] [--json]

Writes CSV and JSON Lines metadata over 50 pictures, each row with a caption of its own, and reads it as every command
does, in a process of its own. Memory is what comes on top of the imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import tiny

PICTURES = 50
READ = """
import json, resource, sys, time
from dsplit.dataset import read_dataset
from dsplit.dataset.images import pillow
from dsplit.models.family import Column
from dsplit.recipe import DataOptions
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, wall, cpu = peak(), time.perf_counter(), time.process_time()
rows = read_dataset(DataOptions(metadata=sys.argv[1]), (Column("image", "file"), Column("prompt")), 16).rows
print(json.dumps({"rows": len(rows), "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu,
    "mb": peak() - before}))
"""


def write(folder: Path, rows: int) -> list[Path]:
    """The same rows as CSV and as JSON Lines."""
    for k in range(PICTURES):
        tiny.picture(folder / f"{k}.png", (64, 64 + 16 * (k % 4)), k)
    paths = [folder / "rows.csv", folder / "rows.jsonl"]
    with paths[0].open("w") as csv, paths[1].open("w") as lines:
        csv.write("image,prompt\n")
        for i in range(rows):
            name, text = f"{i % PICTURES}.png", f"a picture of the thing with the number {i}"
            csv.write(f"{name},{text}\n")
            lines.write(json.dumps({"image": name, "prompt": text}) + "\n")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in write(Path(folder), options.rows):
            words = [sys.executable, "-c", READ, str(path)]
            found[path.suffix[1:]] = json.loads(
                subprocess.run(words, check=True, capture_output=True, text=True).stdout
            )
    if options.json:
        print(json.dumps(found))
        return
    for form, f in found.items():
        print(f"{form:<6} {f['rows']:>9} rows  {f['wall']:6.1f} s  {f['cpu']:6.1f} s CPU  {f['mb']:6.0f} MB")


if __name__ == "__main__":
    main()
