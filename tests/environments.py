"""New virtual environments for tests, filled without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def new_environment(folder: Path, install: Path) -> Path:
    """The python of a new environment that holds `install` and, behind it, sees the packages of this environment.

    install: a wheel or a project folder, installed by pip as a user would, without its dependencies.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    executable = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    theirs = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(here)]  # follows the .pth files there, too
    Path(theirs, "packages_of_the_tests.pth").write_text("\n".join(lines) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(executable), "--disable-pip-version-check"]
    run([*pip, "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", str(install)])
    return executable


def run(command: list[str], cwd: Path | None = None) -> str:
    """What the command prints on stdout; fails with what it printed on stderr."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout
