"""What the user should know of good rows: one warning per kind, naming all rows that it is about."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from dsplit.dataset.draft import Draft
from dsplit.dataset.faults import list_lines
from dsplit.dataset.views import views_of
from dsplit.errors import Problem
from dsplit.recipe import DataOptions

HUGE = 89_478_485  # pixels from which a picture is mentioned: a quarter of a GiB in RGB
LONGEST = 4  # width to height, or height to width, from which a size is mentioned


@dataclass
class _Rows:
    """Rows of one kind: the first, its file, their lines in it, and the places of those that no line tells."""

    first: str
    source: str
    lines: array[int] = field(default_factory=lambda: array("Q"))
    places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(filter(None, (list_lines(self.lines), *self.places)))


class Notices:
    """Collects warnings while rows go by; `problems` gives them."""

    def __init__(self, options: DataOptions) -> None:
        self._crops = options.crops
        self._kinds: dict[str, _Rows] = {}
        self._windows = 1  # the most that a picture has

    def add(self, draft: Draft) -> None:
        """Looks at a good row."""
        image, size = draft.picture.size, draft.size
        if self._windows < self._crops:
            self._windows = max(self._windows, len(views_of(image, size, self._crops)))
        for name in draft.cells.empty:
            self._say(f"empty {name}, used as an empty text", draft)
        if max(size) > LONGEST * min(size):
            self._say("longer than 4:1, which models have seldom seen", draft)
        if any(p.animated for p in draft.pictures.values()):
            self._say("more than one frame, the first is used", draft)
        if any(p.size[0] * p.size[1] > HUGE for p in draft.pictures.values()):
            self._say(f"more than {HUGE} pixels, decoding needs much memory", draft)
        if size[0] > image[0] or size[1] > image[1]:
            self._say("smaller than the stated size, scaled up", draft)

    def _say(self, what: str, draft: Draft) -> None:
        rows = self._kinds.setdefault(what, _Rows(draft.where, draft.source))
        if draft.line and not draft.item and draft.source == rows.source:
            rows.lines.append(draft.line)
        else:
            rows.places.append(draft.where)

    def problems(self) -> list[Problem]:
        """The warnings, each at its first row."""
        found = [Problem(rows.first, f"{what}: {rows}") for what, rows in self._kinds.items()]
        if self._crops > 1 and self._windows == 1:
            what = "every picture has the shape of its target size, so each has one window"
            found.append(Problem(f"--crops {self._crops}", what, "state another --resolution, or leave --crops out"))
        return found
