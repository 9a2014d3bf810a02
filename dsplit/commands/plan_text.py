"""The plan of stage 1 as a few lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsplit.commands.result import size
from dsplit.console import counted, duration

BUCKETS_SHOWN = 12


def plan_text(plan: Mapping[str, Any]) -> str:
    """The lines of what `dsplit cache --dry-run --json` prints: rows, values, disk, memory; time; reasons."""
    return "\n".join(_lines(plan))


def _lines(plan: Mapping[str, Any]) -> Iterator[str]:
    shown = [f"{name}: {n}" for name, n in list(plan["buckets"].items())[:BUCKETS_SHOWN]]
    more = len(plan["buckets"]) - len(shown)
    shown += [f"{more} more"] if more else []
    yield f"{counted(plan['rows'], 'row')} in {counted(len(plan['buckets']), 'bucket')}: {', '.join(shown)}"
    width = max(map(len, plan["values"]), default=0) + 2
    yield f"{'unit':<{width}}{'wanted':>10}{'there':>10}{'to encode':>11}{'bytes':>10}"
    for unit, n in plan["values"].items():
        yield f"{unit:<{width}}{n['wanted']:>10}{n['there']:>10}{n['to_encode']:>11}{size(n['bytes']):>10}"
    fits = "" if plan["fits"] else ": it does not fit"
    yield f"disk:   {size(plan['disk'])} to write into {plan['cache']}, {size(plan['free'])} free{fits}"
    parts = ", ".join(f"{name} {size(n)}" for name, n in plan["memory"].items() if name != "peak")
    if parts:
        peak = size(plan["memory"]["peak"])
        yield f"memory: {peak} of weights at most, on {plan['device']} in {plan['dtype']} ({parts})"
    if "seconds" in plan:
        times = {name: duration(seconds) for name, seconds in plan["seconds"].items()}
        total = times.pop("total")
        yield f"time:   about {total} in one process ({', '.join(f'{name} {t}' for name, t in times.items())})"
    if "why" in plan:
        yield from _why(plan["why"])


def _why(reasons: list[Mapping[str, Any]]) -> Iterator[str]:
    if not reasons:
        yield "why:    nothing is encoded; no key has changed"
    for reason in reasons:
        rest = f" and {reason['values'] - len(reason['rows'])} more" if reason["values"] > len(reason["rows"]) else ""
        yield f"why:    {reason['unit']} {reason['values']}: {', '.join(reason['changed'])}"
        yield f"        {', '.join(reason['rows'])}{rest}"
