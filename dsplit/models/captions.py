"""Captions that are longer than the model reads: what is cut is told by row, before it is encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dsplit.console import warn
from dsplit.models.load import load_component
from dsplit.models.model import Model
from dsplit.units import Split

if TYPE_CHECKING:
    from dsplit.dataset import Row

PROMPTS = ("prompt", "negative_prompt")
SUFFIX_TOKENS = 32  # at most, those that a family's template adds after a caption

Captions = dict[str, dict[str, list[str]]]  # column -> caption -> places of its rows


def perhaps_long(model: Model, rows: Iterable[Row], split_of: Callable[[Row], Split]) -> Captions:
    """The captions of `rows` that may be cut; all others have too few bytes, of which a token stands for one at least.

    split_of: the split that holds for a row, which says whether its negative prompt is read.
    """
    found: Captions = {}
    for row in rows:
        for column in PROMPTS:
            for text in row.variants.get(column, (row.columns.get(column) or "",)):
                if len(text.encode()) >= model.family.token_limit - SUFFIX_TOKENS and reads(split_of(row), column):
                    found.setdefault(column, {}).setdefault(text, []).append(row.place)
    return found


def reads(split: Split, column: str) -> bool:
    """True if a unit of the split reads `column`."""
    return any(column in unit.inputs for unit in (*split.stage1, *split.stage2))


def warn_of_cut(model: Model, captions: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
    """Warns of those of `captions` that have more tokens than the family's limit, naming rows and counts.

    Loads the family's tokenizer, and only if there is a caption to count and the model has it.
    """
    family = model.family
    used = {c for unit in family.units if "prompt" in unit.inputs for c in unit.components}
    light = [c for c in sorted(used) if not family.component(c).weights]
    count = family.token_count
    if count is None or not family.token_limit or not any(captions.values()) or not all(map(model.has, light)):
        return
    import torch

    tokenizers = {name: load_component(model, name, torch.float32, "cpu") for name in light}
    for column, texts in captions.items():
        counts = {text: count(text, tokenizers) for text in texts}
        long = [
            f"{place} ({n} tokens)" for text, n in counts.items() if n > family.token_limit for place in texts[text]
        ]
        if long:
            warn(f"{column}: only the first {family.token_limit} tokens count; longer in {', '.join(long)}")
