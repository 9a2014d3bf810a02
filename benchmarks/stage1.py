"""Stage 1 against DiffSynth-Studio's `sft:data_process`, and against its own encoders' forward calls.

python -m benchmarks.stage1 --root OUT --peer "PEER/bin/python PEER_SCRIPT" [--runs 3] [--json]

OUT: folder with `models/s`, `models/m`, `data/d64`, `data/d32`, read by both programs. PEER_SCRIPT: runs one stage of
the peer with `--root --task --data --cache --log` and writes its figures as JSON. Both take turns, in fp32 on one
thread; medians of all runs. Without --peer only what needs none is measured. A target is what the figure should keep
to.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from tests import tiny

DEMO = tiny.QWEN_IMAGE.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
MANY = 1000

Figures = list[tuple[str, float, str]]  # what, figure, target


def run(words: list[str]) -> tuple[str, float]:
    """What a command prints, and its wall seconds; ends the benchmark with its messages if it fails."""
    started = time.perf_counter()
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}\n{done.stderr}")
    return done.stdout, time.perf_counter() - started


def ours(model: Path, metadata: Path) -> dict[str, Any]:
    """The figures of one run of stage 1 into an empty folder."""
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, "-m", "benchmarks.timed_stage1", str(model), str(metadata), f"{out}/cache"]
        return json.loads(run(words)[0].splitlines()[-1])


def peers(peer: str, root: Path, data: str) -> dict[str, Any]:
    """The peer's figures for the same rows."""
    with tempfile.TemporaryDirectory() as out:
        words = ["--root", str(root), "--task", "sft:data_process", "--data", data, "--cache", f"{out}/c"]
        run([*shlex.split(peer), *words, "--log", f"{out}/log.json"])
        return json.loads(Path(out, "log.json").read_text())


def against_the_peer(peer: str, root: Path, runs: int) -> Figures:
    """Throughput, text encodes and bytes on the 64 rows of d64, size s."""
    pairs = [(peers(peer, root, "d64"), ours(root / "models/s", root / "data/d64/metadata.csv")) for _ in range(runs)]
    rows, encodes = pairs[0][1]["rows"], pairs[0][1]["encoded"]["encode_prompt"]
    wall, cpu = ([own["loops"][k] / rows for _, own in pairs] for k in (0, 1))
    theirs = [median(their[name] for their, _ in pairs) for name in ("wall_s", "cpu_s", "bytes_per_sample")]
    captions = {line.split(",", 1)[1] for line in (root / "data/d64/metadata.csv").read_text().splitlines()[1:]}
    return [
        ("peer, s per row (wall)", theirs[0], ""),
        ("dsplit, s per row (wall)", median(wall), ""),
        ("throughput against the peer (wall)", theirs[0] / median(wall), ">= 2.5"),
        ("throughput against the peer (CPU)", theirs[1] / median(cpu), ">= 2.5"),
        ("text encodes beyond distinct captions", encodes - len(captions), "== 1"),
        ("bytes per row against the peer", pairs[0][1]["bytes_per_row"] / theirs[2], "<= 0.22"),
    ]


def outside(what: str, model: Path, metadata: Path, runs: int, target: str) -> Figures:
    """The share of stage 1's CPU time that is not the encoders'."""
    found = [ours(model, metadata) for _ in range(runs)]

    def share(part: str) -> float:
        return median(1 - one[part][1] / one["loops"][1] for one in found)

    return [
        (f"outside encode_prompt and encode_image, {what}", share("units"), target),
        (f"outside the networks' forward calls, {what}", share("forward"), target),
    ]


def second_run(runs: int) -> Figures:
    """Seconds of `dsplit cache` over 1,000 rows and once more with nothing changed."""
    with tempfile.TemporaryDirectory() as folder:

        def cache(count: int) -> float:
            words = ["--metadata", f"{folder}/{count}/metadata.csv", "--out", f"{folder}/c{count}", "--device", "cpu"]
            return run([sys.executable, "-m", "dsplit", "cache", "--model", str(tiny.QWEN_IMAGE), *words])[1]

        for count in (1, MANY):
            tiny.dataset(Path(folder, str(count)), count)
        first, _ = cache(MANY), cache(1)
        again, start = median(cache(MANY) for _ in range(runs)), median(cache(1) for _ in range(runs))
        words = ["--model", str(tiny.QWEN_IMAGE), "--metadata", f"{folder}/1/metadata.csv", "--out", f"{folder}/c1"]
        code = "import sys; from dsplit.cli import main\ntry: main()\nfinally: print(len({'torch'} & {*sys.modules}))"
        torch = run([sys.executable, "-c", code, "cache", *words, "--device", "cpu"])[0].split()[-1]
    return [
        (f"first run over {MANY} rows, s", first, ""),
        ("second run, s", again, ""),
        ("start-up (nothing to do on one row), s", start, ""),
        ("second run less start-up, share of the first", max(again - start, 0) / first, "<= 0.02"),
        ("imports of torch in it", float(torch), "== 0"),
    ]


def kept(figure: float, target: str) -> bool:
    """True if `figure` keeps to `target`, such as `<= 0.22`."""
    sign, number = target.split()
    bound = float(number)
    return {"<=": figure <= bound, ">=": figure >= bound, "==": figure == bound}[sign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = outside("demo", tiny.QWEN_IMAGE, DEMO / "data/metadata.csv", options.runs, "<= 0.08")
    figures += second_run(options.runs)
    if options.root:
        metadata = options.root / "data/d32/metadata.csv"
        figures += outside("size m", options.root / "models/m", metadata, options.runs, "<= 0.03")
    if options.root and options.peer:
        figures += against_the_peer(options.peer, options.root, options.runs)
    if options.json:
        print(json.dumps({what: {"figure": figure, "target": target} for what, figure, target in figures}))
        return
    for what, figure, target in figures:
        print(f"{what:<52}{figure:>10.3f}  {target:<8}{'' if not target or kept(figure, target) else 'MISSED'}")


if __name__ == "__main__":
    main()
