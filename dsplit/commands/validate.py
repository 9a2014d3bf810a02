"""`dsplit validate`: pictures with and without the LoRA, and the parity check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from dsplit.commands.options import Given, takes
from dsplit.commands.resolve import resolve
from dsplit.commands.result import show
from dsplit.console import counted
from dsplit.recipe import DataOptions, ModelOptions, ValidateOptions
from dsplit.toml_file import read_toml

RUN = "runs/lora"  # where `dsplit train` writes, unless told


@takes(ModelOptions, DataOptions, ValidateOptions)
def validate(given: Given) -> None:
    """Draw the same pictures with and without the LoRA; --parity compares split with unsplit."""
    model, data, options = resolve("validate", given, ValidateOptions)
    run = read_toml(Path())["train"].get("out", RUN)
    parity: Mapping[str, Any] | None = None

    def work() -> Mapping[str, Any]:
        nonlocal parity
        from dsplit.validation.run import run_validate

        result = run_validate(model, data, options, Path(run))
        parity = result["parity"]
        return result

    show(given, work, _text)
    if parity is not None and not parity["ok"]:
        raise typer.Exit(1)


def _text(result: Mapping[str, Any]) -> str:
    lines = [f"{counted(len(result['images']), 'picture')} with and without the LoRA"] if result["images"] else []
    lines += [f"{name}: {result[name]}" for name in ("grid", "report") if result[name]]
    if parity := result["parity"]:
        lines.append(
            f"parity over {counted(parity['rows'], 'row')}: largest difference of values {parity['max_value']:.3g}, "
            f"loss {parity['max_loss']:.3g}, gradient {parity['max_gradient']:.3g}; "
            f"tolerance {parity['tolerance']:.3g}: {'ok' if parity['ok'] else 'FAILED'}"
        )
    return "\n".join(lines)
