"""Reads and decodes the pictures of coming rows in threads, while the encoder is busy with earlier ones.

Threads, not processes: Pillow decodes and scales outside the interpreter's lock, and what they make needs no copy, no
shared memory and no picklable code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from dsplit.cache.encode import encode, inputs
from dsplit.cache.keys import Stamp, stamp_of
from dsplit.cache.plan import Call
from dsplit.dataset.packed import Source
from dsplit.errors import DataError
from dsplit.units import Unit

AHEAD = 2  # calls decoded or being decoded, per worker, and batches: pictures in memory

Decoded = tuple[Call, dict[str, Any] | str]


def decoded(
    batches: Iterable[Sequence[Call]], units: Sequence[Unit], stamps: Mapping[Source, Stamp], workers: int
) -> Iterator[list[Decoded]]:
    """Per batch, in order, each call with its inputs and what `units` (without components) make of them; or what is
    wrong, in words.

    stamps: what the files were when their keys were made; a file that changed since is a fault. While a batch is
    encoded, the next one is decoded, and as many more as make two calls per worker.
    """
    if not units or not workers:
        for batch in batches:
            yield [(call, _decode(call, units, stamps)) for call in batch]
        return
    coming = iter(batches)
    waiting: deque[list[tuple[Call, Future[dict[str, Any] | str]]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            while True:
                while len(waiting) < AHEAD or sum(map(len, waiting)) < AHEAD * workers:
                    batch = next(coming, [])
                    if not batch:
                        break
                    waiting.append([(call, pool.submit(_decode, call, units, stamps)) for call in batch])
                if not waiting:
                    return
                yield [(call, values.result()) for call, values in waiting.popleft()]
        finally:
            pool.shutdown(cancel_futures=True)


def _decode(call: Call, units: Sequence[Unit], stamps: Mapping[Source, Stamp]) -> dict[str, Any] | str:
    if call.row is None:
        return encode(units, {"prompt": [""]}, {})
    try:
        values = encode(units, inputs(call.row), {})
        for name, path in call.row.files.items():
            if name in call.job.columns and stamp_of(path) != stamps[path]:
                return f"'{path}' changed while the cache was made"
    except (DataError, OSError, ValueError) as error:
        return str(error)
    return values
