"""Looks into the pictures of rows, several at a time, and remembers what it saw of the latest ones."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from dsplit.dataset.faults import Refusal
from dsplit.dataset.packed import Source
from dsplit.recipe import DataOptions

if TYPE_CHECKING:
    from dsplit.dataset.pictures import Picture

THREADS = 8  # waiting for a network file system, not computing
REMEMBERED = 50_000  # pictures; a data set of millions names each of them a few times, close together


class Inspector:
    """`inspector.pictures(sources)` -> what each is; decode: by decoding it wholly, else by header and end mark."""

    def __init__(self, options: DataOptions, decode: bool) -> None:
        self._limit, self._decode = options.max_image_pixels, decode
        self._threads = min((os.cpu_count() or 1) if decode else THREADS, THREADS)
        self._known: dict[Source, Picture | Refusal] = {}

    def pictures(self, sources: Iterable[Source]) -> dict[Source, Picture | Refusal]:
        """The picture at each of `sources`, or why it cannot be used."""
        from dsplit.dataset.images import pillow

        wanted = dict.fromkeys(sources)
        new = [source for source in wanted if source not in self._known]
        if len(self._known) + len(new) > REMEMBERED:
            self._known = {source: self._known[source] for source in wanted if source in self._known}
        if new:
            with pillow(), ThreadPoolExecutor(self._threads) as pool:
                self._known.update(zip(new, pool.map(self._look, new), strict=True))
        return self._known

    def _look(self, source: Source) -> Picture | Refusal:
        from dsplit.dataset.pictures import inspect

        try:
            return inspect(source, self._limit, whole=self._decode)
        except Refusal as refusal:
            return refusal
