"""Faults of rows: what is wrong, where, and how many of each kind, so that one run can report all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsplit.errors import DataError, Problem


@dataclass(frozen=True)
class Fault:
    """A fault of one row. reason: its kind in a few words, counted in summaries."""

    reason: str
    where: str
    what: str
    remedy: str = ""

    @property
    def problem(self) -> Problem:
        return Problem(self.where, self.what, self.remedy)


class Refusal(DataError):
    """A cell or a picture that cannot be used. reason: the kind of fault; what and remedy as in Problem."""

    def __init__(self, reason: str, what: str, remedy: str = "") -> None:
        self.reason, self.what, self.remedy = reason, what, remedy
        super().__init__(f"{what}; {remedy}" if remedy else what)

    def __reduce__(self) -> tuple[type[Refusal], tuple[str, str, str]]:
        return type(self), (self.reason, self.what, self.remedy)  # so that it comes whole out of a worker process

    def at(self, where: str, prefix: str = "") -> Fault:
        """This refusal as the fault of the row at `where`; `prefix` says which cell."""
        return Fault(self.reason, where, f"{prefix}{self.what}", self.remedy)


def count_reasons(reasons: Iterable[str]) -> str:
    """`3 file not found, 1 truncated`: how often each reason occurs, the most frequent first."""
    return ", ".join(f"{n} {reason}" for reason, n in Counter(reasons).most_common())


def list_lines(lines: Sequence[int]) -> str:
    """`line 3, line 4, line 7 to line 12`: every line of the ascending `lines`, runs of three and more as a range."""
    runs: list[list[int]] = []  # first and last
    for line in lines:
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ", ".join(
        f"line {first} to line {last}" if last - first > 1 else ", ".join(f"line {n}" for n in range(first, last + 1))
        for first, last in runs
    )
