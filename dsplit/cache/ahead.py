"""Reads and decodes the pictures of coming rows in threads, while the encoder is busy with earlier ones.

Threads, not processes: Pillow decodes and scales outside the interpreter's lock, and what they make needs no copy, no
shared memory and no picklable code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from dsplit.cache.encode import encode, inputs
from dsplit.cache.keys import Stamp, stamp_of
from dsplit.cache.plan import Call
from dsplit.dataset.packed import Source
from dsplit.errors import DataError
from dsplit.units import Unit

AHEAD = 2  # calls decoded or being decoded, per worker: pictures in memory


def decoded(
    calls: Sequence[Call], units: Sequence[Unit], stamps: Mapping[Source, Stamp], workers: int
) -> Iterator[tuple[Call, dict[str, Any] | str]]:
    """Per call, in order, its inputs and what `units` (without components) make of them; or what is wrong, in words.

    stamps: what the files were when their keys were made; a file that changed since is a fault.
    """
    if not units or not workers:
        for call in calls:
            yield call, _decode(call, units, stamps)
        return
    coming = iter(calls)
    waiting: deque[tuple[Call, Future[dict[str, Any] | str]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        try:
            while True:
                for call in islice(coming, AHEAD * workers - len(waiting)):
                    waiting.append((call, pool.submit(_decode, call, units, stamps)))
                if not waiting:
                    return
                call, values = waiting.popleft()
                yield call, values.result()
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
