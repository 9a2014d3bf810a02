"""The errors that dsplit raises on purpose: each says what went wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One fault of the user's data or files.

    where: a place an editor can jump to (`data/metadata.csv:17`), or a file or folder.
    what: the fault, in words. remedy: what to do about it (may be empty).
    """

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}"
        return f"{text}; {self.remedy}" if self.remedy else text


class DsplitError(Exception):
    """A mistake that the user can mend; shown as a message without a traceback. Exit code 1."""

    exit_code = 1


class UsageError(DsplitError):
    """The command line asks for something that makes no sense. Exit code 2."""

    exit_code = 2


class UnitError(DsplitError):
    """A unit or a family is declared wrongly (a plugin author's mistake)."""


class ModelError(DsplitError):
    """A model folder, a repo id or a weight file is not what it should be."""


class CacheError(DsplitError):
    """A cache is missing, incomplete, damaged, or made for another job."""


class TrainingError(DsplitError):
    """Training cannot start or cannot go on."""


class DataError(DsplitError):
    """The data set has faults; carries all of them, found in one run."""

    def __init__(self, summary: str, problems: Sequence[Problem] = ()):
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  {p}" for p in self.problems)]))
