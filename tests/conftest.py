"""The environment of all tests: no terminal, no network, one thread; and the command in this process."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.commandline import Done, Dsplit

# before Typer and torch are imported, which read them once
os.environ["_TYPER_FORCE_DISABLE_TERMINAL"] = "1"
os.environ["TERMINAL_WIDTH"] = "200"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["DSPLIT_INDEX"] = tempfile.mkdtemp(prefix="dsplit-index-")
atexit.register(shutil.rmtree, os.environ["DSPLIT_INDEX"], ignore_errors=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit equality holds at equal thread counts."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def dsplit(capfd: pytest.CaptureFixture[str]) -> Dsplit:
    """`dsplit("cache", "--data", folder, ...)` runs the command in this process; no error may show a traceback."""
    from dsplit.cli import main
    from tests.commandline import Done

    def run(*words: Any) -> Done:
        capfd.readouterr()
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        assert "unexpected; run with --debug" not in err
        return Done(code, out, err)

    return run
