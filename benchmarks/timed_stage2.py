"""`dsplit train` in this process with a clock at its forward, backward and optimiser calls; prints one JSON object.

python -m benchmarks.timed_stage2 OUT STEPS train-options ...: per step (median, the first ones left out) the wall and
CPU seconds of the whole `step`, and of its parts `forward` (the trained model's own calls), `backward` and `optimiser`;
`first_step`: seconds from the start of this process to the end of the first step; `peak_mb`; `losses`.
"""

import time

STARTED = time.perf_counter()  # before the other imports

import json  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import median  # noqa: E402
from typing import Any  # noqa: E402

SKIPPED = 3
MARKS: list[tuple[float, float]] = []
SPENT: list[dict[str, tuple[float, float]]] = []
CLOCKS = (time.perf_counter, time.process_time)


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def clocked(function: Any, label: str) -> Any:
    """`function`, its seconds added to those of the running step."""

    def run(*args: Any, **kwargs: Any) -> Any:
        before = now()
        try:
            return function(*args, **kwargs)
        finally:
            spent, after = SPENT[-1], now()
            old = spent.get(label, (0.0, 0.0))
            spent[label] = (old[0] + after[0] - before[0], old[1] + after[1] - before[1])

    return run


def figures(losses: list[float]) -> dict[str, Any]:
    """Medians over the steps."""
    steps = list(zip(MARKS[SKIPPED:], MARKS[SKIPPED + 1 :], SPENT[SKIPPED + 1 :], strict=False))
    found: dict[str, Any] = {"step": [median(b[k] - a[k] for a, b, _ in steps) for k in (0, 1)]}
    for label in ("forward", "backward", "optimiser"):
        found[label] = [median(spent[label][k] for _, _, spent in steps) for k in (0, 1)]
    outside = [[b[k] - a[k] - sum(part[k] for part in spent.values()) for a, b, spent in steps] for k in (0, 1)]
    found["outside"] = [median(times) for times in outside]
    found["first_step"] = MARKS[0][0] - STARTED
    found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**found, "losses": losses}


def main() -> None:
    import torch
    from torch.optim.optimizer import Optimizer

    from dsplit.cli import main as dsplit
    from dsplit.training import metrics, run

    out, *options = sys.argv[1:]
    load, write = run.load_component, metrics.Metrics.write

    def load_clocked(*args: Any) -> Any:
        component = load(*args)
        if any(args[1] == name for name in ("transformer", "unet")):
            component.forward = clocked(component.forward, "forward")
        return component

    def write_marked(self: Any, **line: Any) -> None:
        write(self, **line)
        MARKS.append(now())
        SPENT.append({})

    run.load_component = load_clocked
    metrics.Metrics.write = write_marked  # type: ignore[method-assign]
    torch.Tensor.backward = clocked(torch.Tensor.backward, "backward")  # type: ignore[method-assign]
    SPENT.append({})
    Optimizer.profile_hook_step = staticmethod(lambda step: clocked(step, "optimiser"))  # type: ignore[method-assign]
    sys.argv = ["dsplit", "train", "--out", out, *options]
    try:
        dsplit()
    except SystemExit as stopped:
        if stopped.code:
            raise
    lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    print(json.dumps(figures([line["loss"] for line in lines])))


if __name__ == "__main__":
    main()
