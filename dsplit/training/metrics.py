"""What a run leaves to look at: one JSON object per optimiser step, and a picture of the loss."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dsplit.cache.files import write_file
from dsplit.console import warn
from dsplit.errors import CacheError, TrainingError

METRICS, PICTURE = "metrics.jsonl", "loss.png"
REDRAW_SECONDS = 60.0


def smooth(losses: Sequence[float]) -> list[float]:
    """The exponential moving average over about a tenth of the run, unbiased at its start."""
    decay = 1 - 1 / max(5.0, min(100.0, len(losses) / 10))
    total = weight = 0.0
    averages = []
    for loss in losses:
        total, weight = decay * total + loss, decay * weight + 1
        averages.append(total / weight)
    return averages


class Metrics:
    """Writes `metrics.jsonl` line by line, so that a killed run keeps every step, and draws `loss.png`.

    done: steps of an earlier part of the run, whose lines are kept. writes: False in all processes but one.

    Raises TrainingError if a line cannot be written; of a picture that cannot, it only warns.
    """

    def __init__(self, folder: Path, done: int = 0, *, writes: bool = True) -> None:
        self.path, self.picture = folder / METRICS, folder / PICTURE
        self.losses: list[float] = []
        self._done, self._writes = done, writes
        self._file: IO[str] | None = None
        self._drawn = time.monotonic()

    def __enter__(self) -> Metrics:
        if self._writes:
            with self._in_words():
                if self._done:
                    write_file(self.path, [line.encode() for line in self._kept()])
                self._file = self.path.open("a" if self._done else "w", encoding="utf-8")
        return self

    def _kept(self) -> list[str]:
        """The lines of the steps that are done, of an earlier part of the run."""
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= self._done]
        self.losses = [json.loads(line)["loss"] for line in kept]
        return kept

    def write(self, **figures: Any) -> None:
        """Adds a line: step (from 1), epoch (from 0), loss, lr and more; floats keep every bit."""
        self.losses.append(figures["loss"])
        if self._file is None:
            return
        with self._in_words():
            self._file.write(json.dumps(figures, allow_nan=False) + "\n")
            self._file.flush()
        if time.monotonic() - self._drawn > REDRAW_SECONDS:
            self.draw()

    def draw(self) -> None:
        """Draws the raw and the smoothed loss over the optimiser steps."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        steps = range(1, len(self.losses) + 1)
        axes.plot(steps, self.losses, color="0.75", linewidth=0.8, label="loss")
        axes.plot(steps, smooth(self.losses), color="tab:blue", label="smoothed")
        axes.set(xlabel="optimiser step", ylabel="loss", xlim=(1, max(2, len(self.losses))))
        axes.legend()
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=120)
        self._drawn = time.monotonic()
        try:
            write_file(self.picture, [png.getvalue()])
        except CacheError as error:
            warn(str(error))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a full disk refuses the last line again, which `write` has told of
            self._file.close()
        if self.losses:
            self.draw()

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (OSError, CacheError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TrainingError(f"{self.path}: cannot write it: {reason}; checkpoints on disk are kept") from error
