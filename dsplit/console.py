"""What the user sees while dsplit works: lines and progress on stderr, from the main process only."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape

PLAIN_SECONDS = 10.0  # off a terminal, a progress line at most this often
BAR_SECONDS = 0.1  # and on a terminal


def is_main_process() -> bool:
    """True in the first process of a launch (torchrun, accelerate), and without a launcher."""
    return os.environ.get("RANK", "0") == "0"


def stderr() -> Console:
    """The console of messages; made anew so that a redirected stderr is honoured."""
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def say(message: str) -> None:
    """Shows a line."""
    if is_main_process():
        stderr().print(escape(message))


def warn(message: str, *, anyone: bool = False) -> None:
    """Shows a warning; `anyone`: from whichever process of a launch."""
    if anyone or is_main_process():
        stderr().print(f"[yellow]warning:[/] {escape(message)}")


def counted(n: float, noun: str) -> str:
    """`1 row`, `3 batches`, `0.25 epochs`."""
    number = f"{n:.3g}" if isinstance(n, float) else str(n)
    return f"{number} {noun}" if number == "1" else f"{number} {noun}{'es' if noun.endswith('tch') else 's'}"


def duration(seconds: float) -> str:
    """`75.2` -> `1:15`; below ten seconds with one decimal."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def memory() -> str:
    """Peak memory so far, `1.2 GB` (of the GPU if one is in use, else of the process)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB GPU"
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{peak * (1 if sys.platform == 'darwin' else 1024) / 1e9:.1f} GB"


class Progress:
    """A progress display with rate, time left and memory: a bar on a terminal, plain lines off it.

    total: None if nobody knows it.
    `with Progress("encode_prompt", 12, "captions") as p: ... p.advance(1, "loss 0.1234")`.
    """

    def __init__(self, what: str, total: int | None, noun: str = "rows") -> None:
        self.what, self.total, self.noun, self.done = what, total, noun, 0
        self.started = self.shown = time.monotonic()
        self._bar = None
        console = stderr()
        if is_main_process() and console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            figures = TextColumn("{task.fields[figures]}")
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                figures,
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task(escape(what), total=total, figures="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def advance(self, n: int = 1, figures: str = "") -> None:
        """Counts `n` more as done; `figures` is shown beside the rate."""
        self.done += n
        now = time.monotonic()
        last = self.total is not None and self.done >= self.total
        if now - self.shown < (PLAIN_SECONDS if self._bar is None else BAR_SECONDS) and not last:
            return  # an update takes longer than some of the things that are counted
        self.shown = now
        rate = self.done / max(now - self.started, 1e-9)
        text = "  ".join(t for t in (figures, f"{rate:.3g} {self.noun}/s", memory()) if t)
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, figures=escape(text))
        else:
            if self.total is None:
                say(f"{self.what}: {self.done} {self.noun}  {text}")
                return
            left = duration((self.total - self.done) / rate) if rate and not last else "0 s"
            say(f"{self.what}: {self.done}/{self.total} {self.noun}  {text}  left {left}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
