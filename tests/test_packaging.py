"""What is shipped: the wheel, built from the source archive, holds everything that runs, and nothing else."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import dsplit
from tests.environments import new_environment, run

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder)], ROOT)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"dsplit-{dsplit.__version__}"


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-index"]
    run([*pip, str(source), "--no-deps", "--no-build-isolation", "-w", str(folder)])
    (file,) = folder.glob("*.whl")
    return file


def files(root: Path, *folders: str) -> set[str]:
    found = (p for folder in folders for p in (root / folder).rglob("*") if p.is_file())
    return {p.relative_to(root).as_posix() for p in found if "__pycache__" not in p.parts}


def test_the_source_archive_holds_the_tests_and_the_documentation(source: Path) -> None:
    for folder in ("dsplit", "plugins", "tests", "docs", "completions"):
        assert files(source, folder) == files(ROOT, folder)
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "Makefile", ".ci/run", "constraints/cpu.txt"):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"dsplit-{dsplit.__version__}.dist-info/entry_points.txt").decode()
    info = {name for name in names if ".dist-info/" in name}
    plugins = {name.removeprefix("plugins/") for name in files(ROOT, "plugins")}
    assert names - info == files(ROOT, "dsplit") | plugins
    assert {"dsplit/demo/dsplit.toml", "dsplit/demo/model/model_index.json", "dsplit_qwen_image.py"} <= names
    assert f"dsplit-{dsplit.__version__}.dist-info/licenses/LICENSE" in info
    assert "qwen_image = dsplit_qwen_image" in entry_points
    assert "dsplit = dsplit.cli:main" in entry_points


def test_the_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "venv", wheel)
    look = "import dsplit, dsplit_qwen_image as q; print(dsplit.__file__, q.__file__, sep='\\n')"
    where = [Path(line) for line in run([str(python), "-c", look], tmp_path).splitlines()]
    assert [path.is_relative_to(tmp_path / "venv") for path in where] == [True, True]
    assert run([str(python.with_name("dsplit")), "--version"]).strip() == f"dsplit {dsplit.__version__}"
    run([str(python.with_name("dsplit")), "prepare", "--demo", "demo"], tmp_path)
    assert files(tmp_path / "demo", ".") == files(ROOT / "dsplit" / "demo", ".") - {"__init__.py"}
