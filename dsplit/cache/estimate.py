"""What stage 1 will cost: bytes of values and of files, memory of components, room on the disk. No torch here."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsplit.cache.plan import Call
from dsplit.console import warn
from dsplit.models.model import Model
from dsplit.models.weights import header
from dsplit.shapes import DTYPE_BYTES, evaluate, ragged_axis

CHARACTERS_PER_TOKEN = 4.5  # of English captions, where no tokenizer counts them
TABLE_BYTES = 150  # per value, in the header of its shard


def value_bytes(
    calls: Iterable[Call], names: Mapping[str, Any], dtype: str, tokens: Callable[[str], int] | None = None
) -> Counter[str]:
    """The bytes that the values of `calls` take, per unit, by the units' shape formulas.

    names: config fields that the formulas read. tokens: the length of a caption; without it, texts are taken for
    English.
    """
    total: Counter[str] = Counter()
    for call in calls:
        unit = call.job.unit
        width, height = call.row.size if call.row else (0, 0)
        known = {**names, "H": height, "W": width, "F": 1}
        if any(ragged_axis(unit.shapes.get(output, "")) is not None for output in call.job.stored):
            known["L"] = max((tokens or _guess)(text) for text in _texts(call))
        for output in call.job.stored:
            kind = unit.dtypes.get(output, "float")
            count = math.prod(evaluate(unit.shapes.get(output, ""), known))
            total[unit.identity] += count * DTYPE_BYTES[dtype if kind == "float" else kind]
    return total


def file_bytes(calls: Iterable[Call], values: int) -> int:
    """The bytes of the shards in which the values of `calls`, `values` bytes of them, will lie."""
    return values + TABLE_BYTES * sum(len(call.keys) for call in calls)


def component_bytes(model: Model, name: str, dtype: str) -> int:
    """The memory that the weights of a component take in `dtype`, by the headers of its files. 0 without weights.

    Raises ModelError for damaged files.
    """
    model.check([name])
    total = 0
    for path in model.part(name).files:
        if path.suffix == ".safetensors":
            tensors = (t for key, t in header(path).items() if key != "__metadata__")
            total += sum(_tensor_bytes(tensor, dtype) for tensor in tensors)
    return total


def free_bytes(folder: Path) -> int:
    """The room on the disk on which `folder` lies or will lie."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def warn_of_full_disk(folder: Path, size: int) -> None:
    """Warns if `size` bytes do not fit; only warns, since what a disk says of itself need not be so."""
    free = free_bytes(folder)
    if size > free:
        warn(
            f"{folder}: about {size / 1e6:.0f} MB will be written, and {free / 1e6:.0f} MB are free; "
            "make room or choose another disk with --out (what is written before the disk is full is kept)"
        )


def _texts(call: Call) -> list[str]:
    texts = [str(v) for k, v in call.row.columns.items() if k in call.job.columns] if call.row else []
    return texts or [""]


def _guess(text: str) -> int:
    return 5 + math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def _tensor_bytes(tensor: Mapping[str, Any], dtype: str) -> int:
    start, end = tensor["data_offsets"]
    floating = tensor["dtype"].startswith(("F", "BF"))
    return math.prod(tensor["shape"]) * DTYPE_BYTES[dtype] if floating else end - start
