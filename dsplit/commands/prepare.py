"""`dsplit prepare`: a run folder, its data set checked, its weights fetched."""

from __future__ import annotations

from dsplit.commands.options import Given, takes
from dsplit.recipe import DataOptions, ModelOptions, PrepareOptions


@takes(ModelOptions, DataOptions, PrepareOptions)
def prepare(given: Given) -> None:
    """Make a run folder: write dsplit.toml, check the data set, fetch the weights."""
