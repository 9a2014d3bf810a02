"""The family that the options name, for commands that load no model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsplit.errors import UsageError
from dsplit.recipe import ModelOptions, listed

if TYPE_CHECKING:
    from dsplit.models.family import ModelFamily
    from dsplit.units import Unit

DEFAULT = "qwen-image"  # whose columns and sizes `dsplit prepare --check` assumes where no model is named


def named_family(options: ModelOptions) -> ModelFamily:
    """The family that the options name; the default one where they name none."""
    from dsplit.models.locate import find_family

    stated = options.model or options.model_path or options.model_id_with_origin_paths or options.model_paths
    return find_family(options if stated else replace(options, model=DEFAULT))


def shape_names(options: ModelOptions, family: ModelFamily) -> dict[str, Any]:
    """What shape formulas read of configs: those of the folder if the model is here, else the family's own."""
    from dsplit.models.locate import find_place, locate
    from dsplit.models.registry import registry

    text = options.model_path or options.model or family.name
    if options.model_id_with_origin_paths or options.model_paths:
        return locate(options, hub=options.hub).names()
    if text not in registry().families:
        folder = find_place(text, options.hub).folder
        if any((folder / c.name).is_dir() for c in family.components):
            return locate(options, hub=options.hub).names()
    return dict(family.config)


def needed_components(family: ModelFamily, options: ModelOptions, stage: int | None) -> dict[str, str]:
    """The components that a stage loads (None: all that the family has), each with a unit that needs it, or ''."""
    from dsplit.models.registry import registry

    task = registry().task(options.task)
    posterior, negative = options.posterior or "mean", bool(task.negative_if)
    split = family.split(task, listed(options.trainable), negative=negative, posterior=posterior)

    def users(units: tuple[Unit, ...]) -> dict[str, str]:
        return {c: u.name for u in units for c in u.components}

    everywhere = users((*split.stage1, *split.stage2))
    if stage is None:
        return {c.name: everywhere.get(c.name, "") for c in family.components}
    return users(split.stage1 if stage == 1 else split.stage2) | dict.fromkeys(family.config_only, "")


def check_columns(options: ModelOptions, names: str, option: str) -> None:
    """Raises UsageError if a column in `names` (comma-separated) is none that the family reads."""
    from dsplit.models.registry import registry

    if wanted := listed(names):
        family = named_family(options)
        known = [c.name for c in family.columns_for(registry().task(options.task))]
        if unknown := [n for n in wanted if n not in known]:
            raise UsageError(
                f"{option}: {family.name} does not read {', '.join(unknown)} (it reads {', '.join(known)})"
            )
