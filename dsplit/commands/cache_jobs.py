"""The jobs of `dsplit cache` that encode nothing: --status, --verify, --gc; each has a text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from dsplit.commands.options import Given
from dsplit.commands.result import show, size
from dsplit.errors import UsageError
from dsplit.recipe import CacheOptions

JOBS = ("status", "verify", "gc")
PLANS = ("dry_run", "why", "probe")
SHOWN = 20  # lines of a list; --json has all


def job_of(options: CacheOptions) -> str | None:
    """The job that the options name, if one. Raises UsageError for two of them, and for --yes without --gc."""
    named = [name for name in JOBS if getattr(options, name)]
    both = [*named, *(name.replace("_", "-") for name in PLANS if getattr(options, name))]
    if named and len(both) > 1:
        raise UsageError(f"--{both[0]} and --{both[1]} are two jobs; do them one after the other")
    if options.yes and not options.gc:
        raise UsageError("--yes goes with --gc")
    return named[0] if named else None


def do(job: str, folder: Path, given: Given, *, yes: bool) -> None:
    """Does the job and shows its result; `verify` ends with exit code 1 unless all is well."""
    whole = True

    def work() -> Mapping[str, Any]:
        nonlocal whole
        if job == "status":
            from dsplit.cache.status import run_status

            return run_status(folder)
        if job == "gc":
            from dsplit.cache.gc import run_gc

            return run_gc(folder, remove=yes)
        from dsplit.cache.verify import run_verify

        result = run_verify(folder)
        whole = result["ok"]
        return result

    show(given, work, {"status": _status, "verify": _verify, "gc": _gc}[job])
    if not whole:
        raise typer.Exit(1)


def _status(result: Mapping[str, Any]) -> str:
    lines = [f"{result['cache']}:"]
    for unit, total in result["units"].items():
        lines.append(f"  {unit}: {total['values']} values, {size(total['bytes'])} in {total['shards']} shard(s)")
    for name, found in result["sets"].items():
        if "fault" in found:
            lines.append(f"{name}: {found['fault']}")
            continue
        facts = ", ".join(str(found[fact]) for fact in ("family", "task", "dtype", "time") if found[fact])
        lines.append(f"{name}: {found['whole']} of {found['rows']} rows are whole ({facts})")
        lines += _list([f"  {gap['row']}: {gap['value']} missing: {gap['why']}" for gap in found["missing"]])
    lines += [f"{path}: damaged, its values do not count; run `dsplit cache` again" for path in result["unreadable"]]
    if (unwanted := result["unwanted"]) and unwanted["values"]:
        lines.append(
            f"{unwanted['values']} values, {size(unwanted['bytes'])}, that no data set needs: see `dsplit cache --gc`"
        )
    return "\n".join([*lines, *_users(result)])


def _verify(result: Mapping[str, Any]) -> str:
    lines = [f"read {result['values']} good values, {size(result['bytes'])} in {result['shards']} shard(s)"]
    lines += [f"{path}: its header is damaged, none of its values counts" for path in result["unreadable"]]
    damage = []
    for found in result["damaged"]:
        rows = ", ".join(f"{place['row']} {place['value']} (in {place['set']})" for place in found["rows"])
        needed = rows or "no row needs it; `dsplit cache --gc --yes` removes it"
        damage.append(f"{found['shard']}: the value {found['key']} is damaged: {needed}")
    lines += _list(damage)
    lines += _list(
        [f"{gap['row']}: {gap['value']} missing (in {gap['set']}): {gap['why']}" for gap in result["missing"]]
    )
    lines += result["manifests"]
    lines.append(
        "all is well" if result["ok"] else "NOT WHOLE; run `dsplit cache` again: it encodes just what is missing"
    )
    return "\n".join(lines)


def _gc(result: Mapping[str, Any]) -> str:
    lines = []
    for unit, values in result["values"].items():
        lines.append(f"{unit}: {len(values)} values, {size(sum(v['bytes'] for v in values))}, that no data set needs")
        lines += _list([f"  {value['key']} {size(value['bytes'])}" for value in values])
    lines += [f"{path}: damaged, holds nothing of use" for path in result["damaged"]]
    lines += [f"{path}: left" for path in result["left"]]
    if not lines:
        return "\n".join(["every value is needed", *_users(result)])
    last = "removed" if result["removed"] else "a dry run; --yes removes them"
    return "\n".join([*lines, *_users(result), last])


def _users(result: Mapping[str, Any]) -> list[str]:
    return [f"in use by {user}" for user in result["in_use"]]


def _list(lines: Sequence[str]) -> list[str]:
    more = [f"  and {len(lines) - SHOWN} more (--json lists all)"] if len(lines) > SHOWN else []
    return [*lines[:SHOWN], *more]
