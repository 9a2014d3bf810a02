"""`dsplit train --num-processes N`: starts the same command in N processes with torch.distributed.run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from dsplit.errors import UsageError


def wanted(processes: int | None) -> bool:
    """True if this process is to start others. Raises UsageError where a launcher started another number of them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if processes and world > 1 and processes != world:
        raise UsageError(f"--num-processes {processes}, but a launcher started {world}; state it in one of the two")
    return bool(processes and processes > 1 and world == 1)


def launch(processes: int) -> int:
    """The exit code of this command run by `processes` processes; 130 or 143 after a signal, which all of them get."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    started = subprocess.Popen([*words, "-m", "dsplit", *sys.argv[1:]])
    caught = 0

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        caught = number
        started.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = started.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + caught if caught else min(abs(code), 1)
