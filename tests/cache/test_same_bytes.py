"""Equal keys, equal bytes: order, number of processes and company of the rows change no value and no digest."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplit.cache.rows import CachedRows
from tests import tiny
from tests.cache.runs import cache

pytestmark = pytest.mark.slow

ROWS, OTHERS = 7, 5
SIZES = ((64, 64), (96, 64), (64, 96))
PROMPTS = ("a red circle", "two blue squares on a plain white ground", "", "a red circle", "漢字 und ein großer Kreis")

RANK = """
import json, os, sys
from pathlib import Path
from tests.cache.runs import cache
out, metadata, told = map(Path, sys.argv[1:])
result = cache(out, metadata)
(told / os.environ["RANK"]).write_text(json.dumps([int(os.environ["WORLD_SIZE"]), result]))
"""


def lines(metadata: Path) -> list[str]:
    return metadata.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All rows, of which the first few are the ones to compare."""
    return tiny.dataset(tmp_path_factory.mktemp("data") / "data", ROWS + OTHERS, sizes=SIZES, prompts=PROMPTS)


@pytest.fixture(scope="module")
def plain(everything: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The rows alone, in order, by one process; and the digest."""
    metadata = everything.with_name("rows.csv")
    metadata.write_text("\n".join(lines(everything)[: ROWS + 1]), encoding="utf-8")
    out = tmp_path_factory.mktemp("plain") / "cache"
    return out, cache(out, metadata)["digest"]


def turned(everything: Path, seed: int) -> Path:
    """The rows in another order."""
    header, *rows = lines(everything)[: ROWS + 1]
    random.Random(seed).shuffle(rows)
    metadata = everything.with_name(f"turned{seed}.csv")
    metadata.write_text("\n".join([header, *rows]), encoding="utf-8")
    return metadata


def values(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    rows = CachedRows(out)
    return {row: rows.values(i) for i, row in enumerate(rows.ids)}


def assert_same(out: Path, digest: str, plain: tuple[Path, str]) -> None:
    assert digest == plain[1]
    expected, got = values(plain[0]), values(out)
    assert len(got) == ROWS
    assert got.keys() == expected.keys()
    for row in got:
        assert got[row].keys() == expected[row].keys() == {"latents", "prompt_embeds", "prompt_mask"}
        for name, value in got[row].items():
            assert value.dtype == expected[row][name].dtype
            assert torch.equal(value, expected[row][name]), (row, name)


@pytest.mark.parametrize("workers", [0, 2])
def test_another_order(everything: Path, plain: tuple[Path, str], tmp_path: Path, workers: int) -> None:
    result = cache(tmp_path / "cache", turned(everything, workers), workers=workers)
    assert_same(tmp_path / "cache", result["digest"], plain)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("among_others", [False, True])
def test_any_number_of_processes(
    everything: Path, plain: tuple[Path, str], tmp_path: Path, world: int, among_others: bool
) -> None:
    out, metadata = tmp_path / "cache", turned(everything, 10 * world + among_others)

    def launch(rows: Path) -> list[dict[str, Any]]:
        told, script = tmp_path / rows.stem, tmp_path / "rank.py"
        told.mkdir()
        script.write_text(RANK)
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), str(script)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
        words += [str(out), str(rows), str(told)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        said = [json.loads((told / str(rank)).read_text()) for rank in range(world)]
        assert [size for size, _ in said] == [world] * world
        return [result for _, result in said]

    if among_others:
        assert launch(everything)[0]["rows"] == ROWS + OTHERS
    results = launch(metadata)
    texts = len({line.split(",", 1)[1] for line in lines(metadata)[1:]} | {""})
    made = {"encode_image": 0 if among_others else ROWS, "encode_prompt": 0 if among_others else texts}
    for result in results:
        assert result["encoded"] == made
        assert_same(out, result["digest"], plain)
