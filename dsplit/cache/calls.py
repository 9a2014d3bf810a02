"""The calls of a plan in little room: some 30 bytes each, made into objects when they are asked for."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, overload

from dsplit.cache.draft import Draft
from dsplit.cache.keys import output_key
from dsplit.cache.manifest import Axes
from dsplit.cache.plan import Call, Job

if TYPE_CHECKING:
    from dsplit.dataset import Row

KEY_BYTES = 16
HASHED = 6  # bytes of a key, which is a hash itself, that say where it is looked for
NO_ROW = 0xFFFFFFFF  # stands for the empty prompt
TOGETHER = 2000  # calls looked up with one another
Present = Callable[[Sequence[str]], set[str]]  # of some keys, those that have a value


class KeySet:
    """Keys, each once and numbered in the order in which they came; 24 bytes each where a set takes 120."""

    def __init__(self) -> None:
        self._keys = bytearray()
        self._slots = array("I", bytes(4 << 10))  # numbers from 1, where the keys' hashes put them

    def __len__(self) -> int:
        return len(self._keys) // KEY_BYTES

    def __contains__(self, key: str) -> bool:
        return self._slots[self._place(bytes.fromhex(key))] != 0

    def key(self, number: int) -> str:
        """The key that came as the `number`-th, from 0."""
        return self._keys[KEY_BYTES * number : KEY_BYTES * (number + 1)].hex()

    def find(self, key: str) -> int | None:
        """The number of `key`, if it is there."""
        number = self._slots[self._place(bytes.fromhex(key))]
        return number - 1 if number else None

    def add(self, key: str) -> bool:
        """Adds `key`; False if it was there."""
        data = bytes.fromhex(key)
        place = self._place(data)
        if self._slots[place]:
            return False
        self._keys += data
        self._slots[place] = len(self)
        if 2 * len(self) > len(self._slots):
            self._grow()
        return True

    def _place(self, data: bytes) -> int:
        """The slot in which a key is, or would be."""
        slots, keys, mask = self._slots, self._keys, len(self._slots) - 1
        place = int.from_bytes(data[:HASHED], "little") & mask
        while (number := slots[place]) and keys[KEY_BYTES * (number - 1) : KEY_BYTES * number] != data:
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        self._slots = slots = array("I", bytes(4 * len(self._slots))) * 2
        keys, mask = self._keys, len(slots) - 1
        for number in range(1, len(self) + 1):  # they differ, so the first free slot is right
            start = KEY_BYTES * (number - 1)
            place = int.from_bytes(keys[start : start + HASHED], "little") & mask
            while slots[place]:
                place = (place + 1) & mask
            slots[place] = number


@dataclass
class CallTable:
    """All distinct calls of a plan.

    jobs: of all rows. rows, entries: the data set, and what the manifest says of it. axes: those of each value. empty:
    the keys of the empty prompt's values. job_of, row_of, variant_of, length_of: per call the number of its job, the
    first row that has it, its number among the variants of the row, and the bytes of its longest text where they
    matter. size_of: per row, the number of its size in `sizes`.
    """

    jobs: Sequence[Job]
    rows: Sequence[Row]
    axes: Axes
    entries: Draft = field(default_factory=Draft)
    empty: dict[str, str] = field(default_factory=dict)
    keys: KeySet = field(default_factory=KeySet)
    job_of: array[int] = field(default_factory=lambda: array("B"))
    row_of: array[int] = field(default_factory=lambda: array("I"))
    variant_of: array[int] = field(default_factory=lambda: array("I"))
    length_of: array[int] = field(default_factory=lambda: array("I"))
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    size_of: array[int] = field(default_factory=lambda: array("I"))

    def add(self, key: str, job: int, row: int, variant: int, length: int) -> None:
        """Adds a call, if it is a new one."""
        if self.keys.add(key):
            self.job_of.append(job)
            self.row_of.append(row)
            self.variant_of.append(variant)
            self.length_of.append(length)

    def call(self, number: int) -> Call:
        """The call of this number; its row is as it is with the call's variants."""
        job, i, key = self.job(number), self.row_of[number], self.keys.key(number)
        keys = {name: output_key(key, job.unit, name) for name in job.stored}
        if i == NO_ROW:
            return Call(key, job, None, keys, {name: self.empty[name] for name in job.read})
        row, choice = self.rows[i], {}
        rest = self.variant_of[number]
        for axis in reversed(job.axes):
            if axis in row.variants:
                rest, choice[axis] = divmod(rest, len(row.variants[axis]))
        entry = self.entries[i] if job.read else None
        given = {name: entry.key(name, self.axes[name], choice) for name in job.read} if entry else {}
        return Call(key, job, row.pick(choice) if choice else row, keys, given)

    def job(self, number: int) -> Job:
        """The job of a call."""
        return self.jobs[self.job_of[number]]

    def value_keys(self, number: int) -> Sequence[str]:
        """The keys of the values that a call makes."""
        key, job = self.keys.key(number), self.job(number)
        return [output_key(key, job.unit, name) for name in job.stored]


class Calls(Sequence[Call]):
    """Some calls of a table, by their numbers."""

    def __init__(self, table: CallTable, numbers: Sequence[int]) -> None:
        self.table, self.numbers = table, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, i: int) -> Call: ...
    @overload
    def __getitem__(self, i: slice) -> Calls: ...
    def __getitem__(self, i: int | slice) -> Call | Calls:
        return Calls(self.table, self.numbers[i]) if isinstance(i, slice) else self.table.call(self.numbers[i])

    @property
    def jobs(self) -> list[Job]:
        """The jobs that they are calls of."""
        return [self.table.jobs[job] for job in sorted(set(self._jobs()))]

    def counts(self) -> Counter[str]:
        """How many there are, per unit."""
        found = Counter[str]()
        for job, n in sorted(Counter(self._jobs()).items()):
            found[self.table.jobs[job].unit.identity] += n
        return found

    def shapes(self) -> Counter[tuple[tuple[int, int], int]]:
        """How many there are of each target size (W, H) and length of the longest text, in bytes."""
        table, sizes = self.table, [*self.table.sizes, (0, 0)]
        rows = map(table.row_of.__getitem__, self.numbers)
        found = Counter(
            (-1 if i == NO_ROW else table.size_of[i], table.length_of[number])
            for number, i in zip(self.numbers, rows, strict=True)
        )
        return Counter({(sizes[size], length): n for (size, length), n in found.items()})

    def values(self) -> Iterable[str]:
        """The keys of all their values; can be gone through again."""
        return _Values(self)

    @property
    def value_count(self) -> int:
        """How many values they make."""
        stored = [len(job.stored) for job in self.table.jobs]
        return sum(stored[job] * n for job, n in Counter(self._jobs()).items())

    def by_job(self) -> dict[str, Calls]:
        """The calls of each job, by the name of its unit."""
        names = [job.unit.name for job in self.table.jobs]
        found: dict[str, array[int]] = {}
        for number, job in zip(self.numbers, self._jobs(), strict=True):
            found.setdefault(names[job], array("I")).append(number)
        return {name: Calls(self.table, numbers) for name, numbers in found.items()}

    def without(self, present: Present) -> Calls:
        """Those of which some value is not present."""
        left = array("I")
        for start in range(0, len(self), TOGETHER):
            numbers = self.numbers[start : start + TOGETHER]
            keys = [self.table.value_keys(number) for number in numbers]
            there = present([key for some in keys for key in some])
            left.extend(compress(numbers, (not there.issuperset(some) for some in keys)))
        return Calls(self.table, left)

    def longer(self, bytes_: int) -> Calls:
        """Those whose longest text has at least so many bytes."""
        lengths = map(self.table.length_of.__getitem__, self.numbers)
        return Calls(self.table, array("I", compress(self.numbers, (length >= bytes_ for length in lengths))))

    def where(self, wanted: Callable[[str], bool]) -> Calls:
        """Those whose own key is `wanted`."""
        key = self.table.keys.key
        return Calls(self.table, array("I", (number for number in self.numbers if wanted(key(number)))))

    def share(self, rank: int, world: int) -> Calls:
        """Those that one of several processes makes; the same in each of them, whatever the others have."""
        return self.where(lambda key: int(key[:12], 16) % world == rank)

    def _jobs(self) -> Iterator[int]:
        return map(self.table.job_of.__getitem__, self.numbers)


class _Values(Iterable[str]):
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(map(self._calls.table.value_keys, self._calls.numbers))


def by_job(calls: Sequence[Call]) -> Mapping[str, Sequence[Call]]:
    """The calls of each job, by the name of its unit."""
    if isinstance(calls, Calls):
        return calls.by_job()
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(call.job.unit.name, []).append(call)
    return found
