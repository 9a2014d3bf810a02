"""Stage 1 killed, out of disk, without torch, and in several processes at once."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from dsplit.cache import shards, store
from dsplit.cache.rows import CachedRows
from dsplit.errors import CacheError
from tests import tiny
from tests.cache.runs import cache, child, kill_at, log_puts

ROWS = 6


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.dataset(tmp_path_factory.mktemp("data") / "data", ROWS)


@pytest.fixture(scope="module")
def whole(metadata: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted run says."""
    return cache(tmp_path_factory.mktemp("whole") / "cache", metadata)


@pytest.fixture(autouse=True)
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "HAND_OVER", 2)


# In order: the remembered digests, the manifest, 4 commits of captions, 3 of pictures, 2 merges. Each file takes a
# write, an fsync, a rename, and an fsync of its folder.
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("replace", 3),
        ("fsync", 9),
        ("replace", 11),
        *(pytest.param(*point, marks=pytest.mark.slow) for point in [("fsync", 1), ("replace", 6), ("fsync", 16)]),
    ],
)
def test_kill_9_loses_at_most_one_commit(
    metadata: Path, whole: dict[str, Any], tmp_path: Path, name: str, call: int
) -> None:
    out, log = tmp_path / "cache", tmp_path / "log"
    log.touch()

    def work() -> None:
        log_puts(log)
        kill_at(call, os, name)
        cache(out, metadata)

    assert child(work) == -9
    result = cache(out, metadata)
    assert result["digest"] == whole["digest"]
    encoded, reused = sum(result["encoded"].values()), sum(result["reused"].values())
    assert encoded + reused == 2 * ROWS + 1
    assert 0 <= len(log.read_text()) - reused <= 2 * store.HAND_OVER
    assert [p for p in out.rglob("*") if p.suffix == ".tmp"] == []
    assert len(list(out.glob("shards/*/*"))) == 2


@pytest.mark.parametrize("deletion", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_kill_9_during_the_deletions_of_a_merge(
    metadata: Path, whole: dict[str, Any], tmp_path: Path, deletion: int
) -> None:
    out = tmp_path / "cache"

    def work() -> None:
        def partly(paths: Iterable[Path]) -> None:
            for path in list(paths)[:deletion]:
                path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

        shards._delete = partly
        cache(out, metadata)

    assert child(work) == -9
    result = cache(out, metadata)
    assert result["digest"] == whole["digest"]
    assert len(CachedRows(out)) == ROWS


def test_training_refuses_what_a_killed_run_left(metadata: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"

    def work() -> None:
        kill_at(7, os, "replace")
        cache(out, metadata)

    assert child(work) == -9
    with pytest.raises(CacheError, match=rf"cache incomplete: \d of {ROWS} rows"):
        CachedRows(out)


def test_a_file_size_limit_is_named_and_no_half_entry_counts(
    metadata: Path, whole: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cache"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # the manifest fits, a commit of latents does not
        cache(out, metadata)

    assert child(work) == 1
    said = capfd.readouterr().err
    assert "CacheError" in said
    assert "File too large" in said
    assert str(out / "shards") in said
    assert [p for p in out.rglob("*") if p.suffix == ".tmp"] == []
    assert cache(out, metadata)["digest"] == whole["digest"]


SECOND_RUN = """
import sys, time
from tests.cache.runs import cache
from pathlib import Path
result = cache(Path(sys.argv[1]), Path(sys.argv[2]), device=None)
assert sum(result["encoded"].values()) == 0, result
print([name for name in ("torch", "transformers", "diffusers") if name in sys.modules])
"""


def test_with_nothing_to_do_torch_is_not_imported(metadata: Path, tmp_path: Path) -> None:
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("the default dtype depends on the GPU, which torch must be asked for")
    cache(tmp_path / "cache", metadata)
    command = [sys.executable, "-c", SECOND_RUN, str(tmp_path / "cache"), str(metadata)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def launch(world: int, out: Path, metadata: Path, **options: Any) -> list[dict[str, Any] | str]:
    """What each of `world` processes of one launch says: its result, or its error."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, pids = [], []
    for rank in range(world):
        receiver, sender = Pipe(duplex=False)
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            try:
                sender.send(json.dumps(cache(out, metadata, **options)))
            except BaseException as error:
                sender.send(json.dumps(f"{type(error).__name__}: {error}"))
            os._exit(0)
        sender.close()
        pipes.append(receiver)
        pids.append(pid)
    said = [json.loads(pipe.recv()) for pipe in pipes]
    for pid in pids:
        os.waitpid(pid, 0)
    return said


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_the_work(metadata: Path, whole: dict[str, Any], tmp_path: Path, world: int) -> None:
    results = launch(world, tmp_path / "cache", metadata)
    for result in results:
        assert isinstance(result, dict), result
        assert result["encoded"] == {"encode_image": ROWS, "encode_prompt": ROWS + 1}  # nothing twice
        assert result["digest"] == whole["digest"]
    assert sum(result["encoded"]["encode_image"] for result in launch(world + 1, tmp_path / "cache", metadata)) == 0  # type: ignore[index]
    assert len(CachedRows(tmp_path / "cache")) == ROWS


def test_more_processes_than_rows(tmp_path: Path) -> None:
    metadata = tiny.dataset(tmp_path / "data", 1)
    results = launch(3, tmp_path / "cache", metadata)
    assert [r["encoded"] for r in results] == [{"encode_image": 1, "encode_prompt": 2}] * 3  # type: ignore[index]


def test_a_process_that_stops_stops_the_launch(metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsplit.cache import stage1
    from dsplit.models.load import load_component

    def load(*args: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise CacheError("the disk of this process is full")
        return load_component(*args)

    monkeypatch.setattr(stage1, "load_component", load)
    first, second = launch(2, tmp_path / "cache", metadata)
    assert second == "CacheError: the disk of this process is full"
    assert str(first).startswith("CacheError: another process of this launch stopped")


@pytest.mark.slow
def test_under_torchrun(metadata: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dsplit", "cache"]
    command += ["--model", str(tiny.QWEN_IMAGE), "--metadata", str(metadata), "--out", str(tmp_path / "cache")]
    command += ["--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert results
    assert results[0]["encoded"] == {"encode_image": ROWS, "encode_prompt": ROWS + 1}
    assert results[0]["digest"] == whole["digest"]
