"""Which variants of a picture a family allows."""

from __future__ import annotations

from collections.abc import Sequence

from dsplit.errors import UsageError
from dsplit.recipe import DataOptions


def refuse_variants(family_name: str, allowed: Sequence[str], options: DataOptions) -> None:
    """Raises UsageError if `options` ask for a variant that the family does not allow."""
    asked = {"flip": options.flip, "crops": options.crops > 1}
    if refused := [f"--{name}" for name, given in asked.items() if given and name not in allowed]:
        raise UsageError(f"{', '.join(refused)}: {family_name} does not allow it; leave it out")
