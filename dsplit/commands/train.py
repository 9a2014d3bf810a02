"""`dsplit train`: stage 2, or the same run unsplit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import typer

from dsplit.commands.families import check_columns
from dsplit.commands.launch import launch, wanted
from dsplit.commands.options import Given, takes
from dsplit.commands.reference import ReferenceOptions
from dsplit.commands.resolve import resolve
from dsplit.commands.result import show
from dsplit.commands.resumed import refuse_changes, run_folder, saved_options
from dsplit.console import counted
from dsplit.recipe import DataOptions, ModelOptions, TrainOptions


@takes(ModelOptions, DataOptions, TrainOptions, hidden=(ReferenceOptions,))
def train(given: Given) -> None:
    """Train a LoRA: from a cache with --from-cache (stage 2), else straight from the data set.

    --from-cache alone takes the cache folder of dsplit.toml, else ./cache.
    """
    model, data, options = resolve("train", given, TrainOptions)
    if options.resume:
        folder = run_folder(options)
        saved = saved_options(folder)
        model, data, options = resolve("train", given, TrainOptions, saved=saved)
        refuse_changes(folder, saved, (model, data, options))
        options = replace(options, out=str(folder))
    if wanted(options.num_processes):
        raise typer.Exit(launch(options.num_processes or 1))
    check_columns(model, given.get("extra_inputs", ""), "--extra-inputs")

    def work() -> Mapping[str, Any]:
        from dsplit.console import say
        from dsplit.training.run import run_train

        if given.get("find_unused_parameters"):
            say("--find-unused-parameters: not needed, unused parameters are found automatically")
        return run_train(model, data, options)

    show(given, work, _text)


def _text(result: Mapping[str, Any]) -> str:
    return (
        f"{counted(result['steps'], 'step')} over {counted(result['rows'], 'row')} in {result['seconds']:.1f} s, "
        f"loss {_loss(result['first_loss'])} -> {_loss(result['last_loss'])}\n"
        f"metrics: {result['metrics']}\n" + "\n".join(f"saved:   {path}" for path in result["checkpoints"])
    )


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
