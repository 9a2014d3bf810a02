"""Kill -9 at thirty points, a full disk, a file-size limit: the next run does only the rest, and gives the same digest.

The real tiny model, with small commits, so that there are many. A run kills itself at a drawn call, or is killed from
outside at a drawn time.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsplit.cache import shards, store
from dsplit.cache.verify import run_verify
from tests import tiny
from tests.cache.runs import cache, child, counts, kill_at, log_puts

pytestmark = pytest.mark.slow

SEED = 20261201
ROWS, COMMIT = 12, 2
CALLS = 2 * ROWS + 1  # pictures, captions, the empty prompt
LOST = 2 * COMMIT  # a commit is written while the next one fills
REPLACES, FSYNCS = 17, 34  # of one run: digests, manifest, 7 + 6 commits, 2 merges
WRITTEN, MERGED = 51, 91  # what is written by all commits, in pieces, and then by the merges


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.dataset(tmp_path_factory.mktemp("data") / "data", ROWS, sizes=((64, 64), (96, 64)))


@pytest.fixture(scope="module")
def whole(metadata: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """The digest of a run that nothing interrupts, and the seconds that it takes in a child of this process."""
    first, out = tmp_path_factory.mktemp("whole") / "cache", tmp_path_factory.mktemp("timed") / "cache"
    digest = cache(first, metadata)["digest"]
    started = time.monotonic()
    assert child(lambda: small(out, metadata)) == 0
    return digest, time.monotonic() - started


def small(out: Path, metadata: Path, **options: Any) -> dict[str, Any]:
    """`dsplit cache` with small commits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "HAND_OVER", COMMIT)
        return cache(out, metadata, **options)


def die_in_a_write(piece: int) -> None:
    """From now on, the process dies before it writes the `piece`-th piece of a shard, in the midst of a file."""
    real, numbers = shards.write_file, itertools.count(1)

    def pieces(chunks: Iterable[bytes | bytearray]) -> Iterator[bytes | bytearray]:
        for chunk in chunks:
            if next(numbers) == piece:
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk

    shards.write_file = lambda path, chunks: real(path, pieces(chunks))


def die_in_the_deletions(after: int) -> None:
    """From now on, the process dies when a merge has deleted `after` old shards."""

    def partly(paths: Iterable[Path]) -> None:
        for path in list(paths)[:after]:
            path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    shards._delete = partly


def kill_points() -> list[tuple[str, float]]:
    """30 points, drawn from SEED: 12 within a file, of these 4 within that of a merge, 2 between its deletions, ..."""
    draw = random.Random(SEED)
    return [
        *(("write", draw.randint(1, WRITTEN)) for _ in range(8)),
        *(("write", draw.randint(WRITTEN + 1, MERGED)) for _ in range(4)),
        *(("delete", draw.randint(0, 6)) for _ in range(2)),
        *(("replace", draw.randint(1, REPLACES)) for _ in range(3)),
        *(("fsync", draw.randint(1, FSYNCS)) for _ in range(3)),
        *(("time", round(draw.random(), 3)) for _ in range(10)),
    ]


@pytest.mark.parametrize(("kind", "point"), kill_points())
def test_kill_9_at_any_moment(
    metadata: Path, whole: tuple[str, float], tmp_path: Path, kind: str, point: float
) -> None:
    out, log = tmp_path / "cache", tmp_path / "log"
    log.touch()

    def work() -> None:
        log_puts(log)
        match kind:
            case "write":
                die_in_a_write(int(point))
            case "delete":
                die_in_the_deletions(int(point))
            case "replace" | "fsync":
                kill_at(int(point), os, kind)
        small(out, metadata)

    if kind == "time":
        killed_after(point * whole[1], work)
    else:
        assert child(work) == -signal.SIGKILL
    result = small(out, metadata)
    assert result["digest"] == whole[0]
    encoded, reused = sum(result["encoded"].values()), sum(result["reused"].values())
    assert encoded + reused == CALLS
    assert 0 <= len(log.read_text()) - reused <= LOST
    assert [p for p in out.rglob("*") if p.suffix == ".tmp"] == []
    assert run_verify(out)["ok"]


def killed_after(seconds: float, work: Callable[[], None]) -> None:
    """Does `work` in a child, and kills it after a while, if it still runs."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_the_kill_points_are_where_they_should_be(metadata: Path, tmp_path: Path) -> None:
    """So many pieces, renames and syncs has a run; else the points above are not what their names say."""
    seen = {"write": 0, "merged": 0, "replace": 0, "fsync": 0}

    def work() -> None:
        real = {name: getattr(os, name) for name in ("replace", "fsync")}
        for name in real:
            setattr(os, name, lambda *args, name=name: (count(name), real[name](*args))[1])
        write, join = shards.write_file, shards.join
        merging = []

        def pieces(chunks: Iterable[bytes | bytearray]) -> Iterator[bytes | bytearray]:
            for chunk in chunks:
                count("merged" if merging else "write")
                yield chunk

        shards.write_file = lambda path, chunks: write(path, pieces(chunks))
        shards.join = lambda *args: (merging.append(1), join(*args))[1]
        small(tmp_path / "cache", metadata)
        (tmp_path / "seen").write_text(json.dumps(seen))

    def count(name: str) -> None:
        seen[name] += 1

    assert child(work) == 0
    assert json.loads((tmp_path / "seen").read_text()) == {
        "write": WRITTEN, "merged": MERGED - WRITTEN, "replace": REPLACES, "fsync": FSYNCS
    }  # fmt: skip


@pytest.mark.parametrize(("limit", "in_merge"), [(10_000, False), (40_000, True)])
def test_a_file_size_limit(
    metadata: Path,
    whole: tuple[str, float],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    limit: int,
    in_merge: bool,
) -> None:
    out, log = tmp_path / "cache", tmp_path / "log"
    log.touch()

    def work() -> None:
        log_puts(log)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        small(out, metadata)

    assert child(work) == 1
    said = capfd.readouterr().err
    assert "CacheError" in said
    assert "File too large" in said
    assert [p for p in out.rglob("*") if p.suffix == ".tmp"] == []
    result = small(out, metadata)
    assert result["digest"] == whole[0]
    assert (sum(result["encoded"].values()) == 0) is in_merge
    assert 0 <= len(log.read_text()) - sum(result["reused"].values()) <= LOST


FULL_DISK = """
import json, os, subprocess, sys
from pathlib import Path
disk, metadata, log = map(Path, sys.argv[1:])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150k", "none", disk], check=True)
from dsplit.cache import store
from dsplit.errors import CacheError
from tests.cache.runs import cache, log_puts
store.HAND_OVER = 2
log_puts(log)
try:
    first = cache(disk / "cache", metadata)
except CacheError as error:
    first = str(error)
left = [path.name for path in disk.rglob("*.tmp")]
put = len(log.read_text())
subprocess.run(["mount", "-o", "remount,size=10m", "none", disk], check=True)
print(json.dumps([first, left, put, cache(disk / "cache", metadata)]))
"""


def test_a_full_disk(metadata: Path, whole: tuple[str, float], tmp_path: Path) -> None:
    disk, log = tmp_path / "disk", tmp_path / "log"
    disk.mkdir()
    log.touch()
    try:
        may = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", disk], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare here, so no small disk can be made")
    if may.returncode:
        pytest.skip(f"no small disk can be made here: {may.stderr}")
    words = ["unshare", "-rm", sys.executable, "-c", FULL_DISK, str(disk), str(metadata), str(log)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    error, left, put, result = json.loads(done.stdout.splitlines()[-1])
    assert "No space left on device" in error
    assert str(disk / "cache" / "shards") in error
    assert left == []
    assert result["digest"] == whole[0]
    assert 0 <= put - sum(result["reused"].values()) <= LOST
    assert 0 < sum(result["encoded"].values()) < CALLS


DYING = """
import os, sys
from pathlib import Path
from dsplit.cache import store
from tests.cache.runs import cache, kill_at, log_puts
out, metadata, log = map(Path, sys.argv[1:])
assert os.environ["WORLD_SIZE"] == "2"
store.HAND_OVER = 1
log_puts(log)
if os.environ["RANK"] == "1":
    kill_at(6, os, "replace")
cache(out, metadata)
"""


def test_a_rank_that_is_killed_ends_the_launch(metadata: Path, whole: tuple[str, float], tmp_path: Path) -> None:
    out, log, script = tmp_path / "cache", tmp_path / "log", tmp_path / "dying.py"
    log.touch()
    script.write_text(DYING)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    started = time.monotonic()
    done = subprocess.run(
        [*words, str(out), str(metadata), str(log)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stderr
    assert time.monotonic() - started < 60
    result = cache(out, metadata)
    assert result["digest"] == whole[0]
    assert counts(result)["encode_prompt"][1] > 0
    assert 0 <= len(log.read_text()) - sum(result["reused"].values()) <= 2 * 2  # two processes, commits of one row
