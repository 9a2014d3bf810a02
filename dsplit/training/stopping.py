"""Ctrl-C and SIGTERM while training: the step is finished and saved, then the run ends."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from dsplit.errors import DsplitError


class Stopped(DsplitError):
    """The user or the system ended the run; all of it is saved. Exit code 130 or 143."""

    def __init__(self, number: int, message: str) -> None:
        self.exit_code = 128 + number
        super().__init__(message)


class Signals:
    """Within it, the first SIGINT or SIGTERM is noted in `number`; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._restore()
