"""Manifests: readable, whole or refused; and what is said where there is no cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsplit.cache.draft import write_manifest
from dsplit.cache.manifest import (
    Entry,
    Manifest,
    find_manifest,
    manifest_path,
    read_manifest,
    refuse_foreign,
)
from dsplit.errors import CacheError, UsageError

ROWS = (
    Entry(
        "1" * 32, "metadata.csv:2", (64, 96), {"prompt": "eine Größe\n,\u2028\x85", "seed": 7}, {"latents": ["a" * 32]}
    ),
    Entry(
        "2" * 32,
        "metadata.csv:3",
        (64, 64),
        {"prompt": "", "seed": None},
        {"latents": ["b" * 32]},
        fault="NaN in latents",
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = manifest_path(tmp_path, "default")
    write_manifest(path, Manifest({"family": "qwen-image", "threads": None}, ROWS))
    return path


def test_a_manifest_comes_back(path: Path) -> None:
    manifest = read_manifest(path)
    assert tuple(manifest.rows) == ROWS
    assert manifest.header["family"] == "qwen-image"
    assert manifest.header["rows"] == 2


def test_a_manifest_is_readable_text(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3 + 1
    assert json.loads(lines[1])["columns"]["prompt"] == "eine Größe\n,\u2028\x85"
    assert "Größe" in lines[1]


def test_every_flipped_or_missing_byte_is_refused(path: Path) -> None:
    good = path.read_bytes()
    for position in range(len(good)):
        for data in (good[:position], good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :]):
            path.write_bytes(data)
            with pytest.raises(CacheError, match=r"default\.jsonl: .*dsplit"):
                read_manifest(path)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a\\b"])
def test_a_name_stays_within_the_cache(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        manifest_path(tmp_path, name)


def test_what_is_said_where_there_is_no_cache(tmp_path: Path, path: Path) -> None:
    with pytest.raises(CacheError, match=r"no cache in .*nothing: does not exist"):
        find_manifest(tmp_path / "nothing", "default")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CacheError, match=r"no cache in .*empty: no entries"):
        find_manifest(tmp_path / "empty", "default")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.csv").touch()
    with pytest.raises(CacheError, match=r"no cache in .*data: not a cache folder"):
        find_manifest(tmp_path / "data", "default")
    with pytest.raises(CacheError, match=r"no cache in .*metadata\.csv: not a cache folder"):
        find_manifest(tmp_path / "data" / "metadata.csv", "default")
    with pytest.raises(CacheError, match=r"no cache called 'other' in .*: it has default; choose with --name"):
        find_manifest(tmp_path, "other")
    assert find_manifest(tmp_path, "default") == path
    path.unlink()
    path.mkdir()
    with pytest.raises(CacheError, match=r"default\.jsonl: is no file; move it away"):
        find_manifest(tmp_path, "default")


@pytest.mark.parametrize("file", ["0.pth", "0/17.pth"])
def test_the_references_cache_is_refused_unread(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for refuse in (lambda: refuse_foreign(tmp_path), lambda: find_manifest(tmp_path, "default")):
        with pytest.raises(CacheError, match=r"pickled files .*run `dsplit cache` on the original data set"):
            refuse()
