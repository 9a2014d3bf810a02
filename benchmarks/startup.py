"""CPU time of `dsplit --help` and `dsplit tasks` against a bare Typer app of two commands.

python -m benchmarks.startup
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.test_cli import BARE, cpu_ms


def main() -> None:
    print(f"{'command':<16}{'CPU ms':>8}{'bare ms':>9}{'more ms':>9}{'ratio':>7}   (least of 15 runs)")
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(BARE)
        for ours, theirs in (("--help", "--help"), ("tasks", "a")):
            floor = cpu_ms([sys.executable, str(bare), theirs], 15)
            taken = cpu_ms([sys.executable, "-m", "dsplit", ours], 15)
            print(f"dsplit {ours:<9}{taken:>8.0f}{floor:>9.0f}{taken - floor:>9.0f}{taken / floor:>7.2f}")


if __name__ == "__main__":
    main()
