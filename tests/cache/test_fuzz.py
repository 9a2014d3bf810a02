"""Whatever bytes a cache holds: a clear error or the right values; no code is run, nothing is written outside."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsplit.cache import shards
from dsplit.cache.earlier import Earlier
from dsplit.cache.gc import run_gc
from dsplit.cache.keys import key_of
from dsplit.cache.manifest import line_of, manifest_path
from dsplit.cache.rows import CachedRows
from dsplit.cache.status import run_status
from dsplit.cache.verify import run_verify
from dsplit.errors import DsplitError
from tests.cache.runs import shards as shards_of

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40)
ODD = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))
NASTY = ODD | st.sampled_from(["../../../out", "/out", 2**63, -(2**70), "a" * 32, "A" * 32, [2**62, 1], [-1, -4]])


def outside(folder: Path) -> set[str]:
    """What lies beside the cache."""
    return {path.name for path in folder.parent.iterdir()} | {path.name for path in folder.iterdir()}


def bears(out: Path, act: Callable[[], Any]) -> None:
    """All that reads a cache says a clear error or works, and leaves everything around it as it was."""
    before = outside(out) | {"holds"}
    for work in (
        act,
        lambda: Earlier(manifest_path(out, "default")),
        lambda: run_status(out),
        lambda: run_verify(out),
        lambda: run_gc(out, remove=False),
    ):
        with contextlib.suppress(DsplitError):
            work()
    assert outside(out) <= before


def read_rows(out: Path) -> None:
    rows = CachedRows(out)
    for i in range(len(rows)):
        rows.place(i), rows.columns(i), rows.group(i), rows.values(i)
        last = {axis: n - 1 for axis, n in rows.variants(i).items()}
        for choice in (last, {**last, "prompt": None}):
            rows.columns(i, choice), rows.values(i, choice)


@pytest.fixture(scope="module")
def scratch(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "cache"
    shutil.copytree(made[1], folder)
    return folder


def mutated(data: bytes, changes: list[tuple[int, int]], cut: int | None) -> bytes:
    result = bytearray(data)
    for place, byte in changes:
        result[place % len(result)] = byte
    return bytes(result[:cut])


BYTES = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=6)


@FEW
@given(changes=BYTES, cut=st.none() | st.integers(0, 3000), which=st.integers(0, 2))
def test_bytes(scratch: Path, changes: list[tuple[int, int]], cut: int | None, which: int) -> None:
    path = [*shards_of(scratch), manifest_path(scratch, "default")][which]
    good = path.read_bytes()
    try:
        path.write_bytes(mutated(good, changes, cut))
        bears(scratch, lambda: read_rows(scratch))
    finally:
        path.write_bytes(good)


def checked(header: dict[str, Any], lines: str) -> bytes:
    """A manifest whose check is right, whatever it says."""
    header = {**header, "check": ""}
    rest = lines.encode("utf-8", "surrogatepass")
    header["check"] = key_of(line_of(header), hashlib.blake2b(rest, digest_size=16).hexdigest())
    return line_of(header).encode("utf-8", "surrogatepass") + rest


@FEW
@given(
    field=st.sampled_from(["id", "place", "size", "columns", "keys", "inputs", "variants", "fault", "other"]),
    value=NASTY,
    inside=st.sampled_from(["", "latents", "prompt", "view"]),
)
def test_rows_that_say_anything(scratch: Path, field: str, value: Any, inside: str) -> None:
    path = manifest_path(scratch, "default")
    good = path.read_bytes()
    first, *lines = good.decode().splitlines()
    row = {**json.loads(lines[0]), field: {inside: value} if inside else value}
    try:
        path.write_bytes(checked(json.loads(first), "\n".join([json.dumps(row), *lines[1:], ""])))
        bears(scratch, lambda: read_rows(scratch))
    finally:
        path.write_bytes(good)


@FEW
@given(
    field=st.sampled_from(["dsplit_manifest", "columns", "axes", "empty_prompt", "family", "rows"]),
    value=NASTY,
    inside=st.sampled_from(["", "latents", "prompt"]),
)
def test_headers_that_say_anything(scratch: Path, field: str, value: Any, inside: str) -> None:
    path = manifest_path(scratch, "default")
    good = path.read_bytes()
    first, _, lines = good.decode().partition("\n")
    try:
        header = {**json.loads(first), field: {**json.loads(first)["axes"], inside: value} if inside else value}
        path.write_bytes(checked(header, lines))
        bears(scratch, lambda: read_rows(scratch))
    finally:
        path.write_bytes(good)


@FEW
@given(
    part=st.sampled_from(["dtype", "shape", "data_offsets", "crc32", "key", "unit", "format", "dsplit"]), value=NASTY
)
def test_shards_that_say_anything(scratch: Path, part: str, value: Any) -> None:
    """With a name that fits, as somebody who means harm would write it."""
    good = shards_of(scratch)[0]
    data = good.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    table = json.loads(header["__metadata__"]["dsplit"])
    key = next(key for key in header if key != "__metadata__")
    if part in header[key]:
        header[key][part] = value
    elif part == "crc32":
        table["crc32"][key] = value
    elif part == "key":
        header[str(value)] = header.pop(key)
        table["crc32"][str(value)] = table["crc32"][key]
    elif part in table:
        table[part] = value
    header["__metadata__"]["dsplit"] = value if part == "dsplit" else json.dumps(table)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    head = len(text).to_bytes(8, "little") + text
    bad = good.with_name(f"{shards._name(head)}.safetensors")
    good.unlink()
    try:
        bad.write_bytes(head + data[8 + length :])
        bears(scratch, lambda: read_rows(scratch))
    finally:
        bad.unlink(missing_ok=True)
        good.write_bytes(data)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 50_000, "1" * 10_000, '{"dsplit_manifest": NaN}', "\ud800"])
def test_json_that_would_break_a_parser(scratch: Path, text: str) -> None:
    path, data = manifest_path(scratch, "default"), text.encode("utf-8", "surrogatepass")
    good = path.read_bytes()
    shard = shards_of(scratch)[0]
    head = len(data).to_bytes(8, "little") + data
    bad = shard.with_name(f"{shards._name(head)}.safetensors")
    try:
        bad.write_bytes(head)
        bears(scratch, lambda: read_rows(scratch))
        path.write_bytes(data)
        bears(scratch, lambda: read_rows(scratch))
        first, _, _ = good.decode().partition("\n")
        path.write_bytes(checked(json.loads(first), text + "\n"))
        bears(scratch, lambda: read_rows(scratch))
    finally:
        path.write_bytes(good)
        bad.unlink()


def test_links_that_lead_out_are_never_written_through(scratch: Path, tmp_path: Path) -> None:
    """A manifest or a shard that is a link to a file elsewhere is read, and replaced, never the file it leads to."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    link = shards_of(scratch)[0].with_name(f"{'0' * 32}.safetensors")
    os.utime(victim, (1, 1))
    os.symlink(victim, link)
    run_gc(scratch, remove=True)
    assert not link.is_symlink()
    assert (victim.read_bytes(), victim.stat().st_mtime) == (b"precious", 1)
