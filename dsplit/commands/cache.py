"""`dsplit cache`: stage 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsplit.commands.cache_jobs import do, job_of
from dsplit.commands.families import check_columns
from dsplit.commands.options import Given, takes
from dsplit.commands.plan_text import plan_text
from dsplit.commands.reference import ReferenceOptions
from dsplit.commands.resolve import CACHE, resolve
from dsplit.commands.result import show, size
from dsplit.console import counted
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, TrainOptions
from dsplit.toml_file import names_of

USED = {"dataset_base_path", "extra_inputs", "data_file_keys"}
IGNORED = {*names_of(TrainOptions), *names_of(ReferenceOptions)} - {*names_of(CacheOptions), *USED}


@takes(ModelOptions, DataOptions, CacheOptions, hidden=(TrainOptions, ReferenceOptions))
def cache(given: Given) -> None:
    """Stage 1: encode the data set once, into a cache.

    Only what is missing is encoded. Training options are accepted and ignored: one cache serves every run.
    With --dry-run, --why or --probe the plan is printed and nothing is written.
    """
    model, data, options = resolve("cache", given, CacheOptions)
    if job := job_of(options):
        do(job, Path(options.out or CACHE), given, yes=options.yes)
        return
    ignored = [f"--{n.replace('_', '-')}" for n in given if n in IGNORED]

    check_columns(model, given.get("extra_inputs", ""), "--extra-inputs")

    def work() -> Mapping[str, Any]:
        from dsplit.cache.run import run_cache
        from dsplit.console import say

        if ignored:
            say(f"`dsplit cache` ignores training options: {', '.join(ignored)}")
        return run_cache(model, data, options)

    show(given, work, _text)


def _text(result: Mapping[str, Any]) -> str:
    if "encoded" not in result:
        return plan_text(result)
    encoded = ", ".join(f"{unit} {n}" for unit, n in result["encoded"].items())
    reused = ", ".join(f"{unit} {n}" for unit, n in result["reused"].items())
    return (
        f"{counted(result['rows'], 'row')} in {result['cache']}, {size(result['bytes'])}, {result['seconds']:.1f} s\n"
        f"encoded: {encoded}\nreused:  {reused}\ndigest:  {result['digest']}"
    )
