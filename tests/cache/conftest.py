"""A small cached data set."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.cache.runs import cache

PROMPTS = ("a red circle", "a blue square", "a red circle", "")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A data set of four rows with two distinct captions and the empty one, its cache, and what the run said."""
    folder = tmp_path_factory.mktemp("made")
    metadata = tiny.dataset(folder / "data", 4, sizes=((64, 64), (96, 64)), prompts=PROMPTS)
    return metadata, folder / "cache", cache(folder / "cache", metadata)


@pytest.fixture
def copy(made: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> tuple[Path, Path]:
    """Copies of that data set and cache, to change at will."""
    for path in (made[0].parent, made[1]):
        shutil.copytree(path, tmp_path / path.name)
    return tmp_path / "data" / "metadata.csv", tmp_path / "cache"
