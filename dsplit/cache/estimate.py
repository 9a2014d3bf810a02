"""What stage 1 will cost: bytes of values and of files, memory of components, room on the disk. No torch here."""

from __future__ import annotations

import math
import shutil
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache as remembered
from pathlib import Path
from typing import Any

from dsplit.cache.calls import Calls
from dsplit.cache.plan import text_bytes
from dsplit.console import warn
from dsplit.models.model import Model
from dsplit.models.weights import header
from dsplit.shapes import DTYPE_BYTES, evaluate, ragged_axis

BYTES_PER_TOKEN = 4.5  # of English captions, where no tokenizer counts them
NEAR = 20  # on either side, of the counted captions that stand for one of their length
COUNTED = 2000  # captions whose tokens are counted; of more, the others are taken to be like these
TABLE_BYTES = 150  # per value, in the header of its shard


def value_bytes(
    calls: Calls, names: Mapping[str, Any], dtype: str, tokens: Callable[[str], int] | None = None
) -> Counter[str]:
    """The bytes that the values of `calls` take, per unit, by the units' shape formulas.

    names: config fields that the formulas read. tokens: the length of a caption, which is asked for a few thousand of
    them; without it, texts are taken for English.
    """
    total: Counter[str] = Counter()
    for some in calls.by_job().values():
        unit, stored = some[0].job.unit, some[0].job.stored
        for (width, height), length, n in _sizes(some, tokens):
            known = {**names, "H": height, "W": width, "F": 1, "L": length}
            for output in stored:
                kind = unit.dtypes.get(output, "float")
                count = math.prod(evaluate(unit.shapes.get(output, ""), known))
                total[unit.identity] += n * count * DTYPE_BYTES[dtype if kind == "float" else kind]
    return total


def file_bytes(calls: Calls, values: int) -> int:
    """The bytes of the shards in which the values of `calls`, `values` bytes of them, will lie."""
    return values + TABLE_BYTES * calls.value_count


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


def _sizes(calls: Calls, tokens: Callable[[str], int] | None) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Target size (W, H), tokens of the caption, and how many of the calls of a job have these."""
    job = calls[0].job
    if all(ragged_axis(job.unit.shapes.get(output, "")) is None for output in job.stored):
        yield from ((size, 0, n) for (size, _), n in calls.shapes().items())
    elif tokens and len(calls) <= COUNTED:
        for call in calls:
            yield call.row.size if call.row else (0, 0), max(map(tokens, call.texts)), 1
    else:
        length = _neighbours(calls, tokens) if tokens else _guess
        yield from ((size, length(bytes_), n) for (size, bytes_), n in calls.shapes().items())


def _neighbours(calls: Calls, tokens: Callable[[str], int]) -> Callable[[int], int]:
    """The tokens of a caption of so many bytes, as those of about this length among some that are counted."""
    step = math.ceil(len(calls) / COUNTED)
    texts = sorted((max(call.texts, key=len) for call in calls[::step]), key=text_bytes)
    lengths, counts = [text_bytes(text) for text in texts], [tokens(text) for text in texts]

    def length(bytes_: int) -> int:
        place = bisect(lengths, bytes_)
        near = counts[max(place - NEAR, 0) : place + NEAR]
        return round(sum(near) / len(near))

    return remembered(length)


def _guess(bytes_: int) -> int:
    return 5 + math.ceil(bytes_ / BYTES_PER_TOKEN)


def _tensor_bytes(tensor: Mapping[str, Any], dtype: str) -> int:
    start, end = tensor["data_offsets"]
    floating = tensor["dtype"].startswith(("F", "BF"))
    return math.prod(tensor["shape"]) * DTYPE_BYTES[dtype] if floating else end - start
