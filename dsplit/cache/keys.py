"""Keys: a value is named by what made it, so an equal key means equal bytes and a changed source is a missing value."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dsplit.cache.files import write_file
from dsplit.console import Progress, counted
from dsplit.dataset.packed import Source
from dsplit.errors import DataError, ModelError, Problem, UnitError
from dsplit.units import Unit

if TYPE_CHECKING:
    from dsplit.models.model import Model

CHUNK = 1 << 20
FRESH_SECONDS = 2.0  # a file that changed this recently may change again without a new time stamp
NOTEWORTHY_BYTES = 500_000_000  # hashing less than this takes no time that needs a progress display
MEMORY = "digests.json"
KEY_LENGTH = (32).to_bytes(8, "little").decode()  # as it stands before a key in what is hashed

Stamp = tuple[int, int, int, int]  # size, mtime_ns, ctime_ns, inode
S = TypeVar("S", bound=Source)


def key_of(*parts: str) -> str:
    """32 hex digits: blake2b over `parts`, each with its length before it, so that no two lists run together."""
    return hashlib.blake2b(b"".join(map(_part, parts)), digest_size=16).hexdigest()


def text_key(value: Any) -> str:
    """The key of a text, a number, a size, a list or nothing; `7`, `7.0` and `"7"` have different keys."""
    return key_of(type(value).__name__, json.dumps(value))


class CallKeys:
    """Keys of the calls of one unit; what they have in common is hashed once. Arguments as for `call_key`."""

    def __init__(self, unit: Unit, components: Mapping[str, str], dtype: str, rows: int = 1) -> None:
        used = [part for name in unit.components for part in (name, components[name])]
        shared = ["rows", str(rows)] if rows > 1 else []
        parts = ["unit", unit.identity, code_version(unit), "components", *used, "dtype", dtype, *shared, "inputs"]
        self._start = hashlib.blake2b(b"".join(map(_part, parts)), digest_size=16)
        names = (_part(unit.parameters.get(name, name)).decode() for name in unit.inputs)
        self._rest = "".join(f"{name}{KEY_LENGTH}%s" for name in names)

    def of(self, inputs: Iterable[str]) -> str:
        """The key of a call, by those of its inputs in declared order."""
        digest = self._start.copy()
        digest.update((self._rest % tuple(inputs)).encode())
        return digest.hexdigest()


def call_key(unit: Unit, inputs: Mapping[str, str], components: Mapping[str, str], dtype: str, rows: int = 1) -> str:
    """The key of running `unit` once: its code's version, component digests, dtype, the keys of its inputs.

    rows: how many of them share a forward pass, which moves the last bits of a value; one is no part of the key.
    """
    return CallKeys(unit, components, dtype, rows).of(inputs[name] for name in unit.inputs)


def _part(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data


def code_version(unit: Unit) -> str:
    """What says which code makes a unit's results: its module, its version, and the digests of its `sources`.

    Raises UnitError for a source that is not installed.
    """
    return " ".join([unit.function.__module__, str(unit.version), *map(_source_digest, unit.sources)])


@functools.cache
def _source_digest(source: str) -> str:
    package, _, inside = source.partition("/")
    found = find_spec(package)
    path = Path(next(iter(found.submodule_search_locations or [""]))) / inside if found else None
    if path is None or not path.is_file():
        raise UnitError(f"a unit names the library file '{source}', which is not installed")
    return file_digest(path)


def output_key(call: str, unit: Unit, output: str) -> str:
    """The key of one output of a call; equal for all uses of a unit, whatever they name the output."""
    return value_key(call, output_part(unit, output))


def output_part(unit: Unit, output: str) -> str:
    """What the keys of an output have in common."""
    return _part(unit.stored_name(output)).decode()


def value_key(call: str, part: str) -> str:
    """As `output_key`, for `part` of the output: as `key_of` has it, but there may be millions."""
    return hashlib.blake2b(f"{KEY_LENGTH}{call}{part}".encode(), digest_size=16).hexdigest()


class Digests:
    """Digests of files, remembered in the cache folder by (path, size, mtime, ctime, inode) and else computed.

    A packed file's is that of its bytes, remembered by where they lie in its container, with the container's stamp.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / MEMORY
        self._known = _remembered(self._path)
        self._changed = False
        self.stamps: dict[Source, Stamp] = {}  # of every file asked for, as it was when its digest was taken

    def of(self, sources: Iterable[S]) -> dict[S, str]:
        """The blake2b of each file's bytes. Raises OSError for one that cannot be read."""
        groups: dict[Path, list[S]] = {}  # by the file that holds the bytes
        for source in dict.fromkeys(sources):
            groups.setdefault(source if isinstance(source, Path) else source.container, []).append(source)
        found: dict[S, str] = {}
        unknown: dict[Path, tuple[Stamp, list[S]]] = {}
        for file, group in groups.items():
            stamp = stamp_of(file)
            self.stamps.update(dict.fromkeys(group, stamp))
            found |= self._recalled(file, stamp, group)
            if rest := [source for source in group if source not in found]:
                unknown[file] = stamp, rest
        return found | self._hash(unknown)

    def save(self) -> None:
        """Writes what was learnt; the file may be deleted at any time."""
        if self._changed:
            write_file(self._path, [self._text()])
            self._changed = False

    @property
    def unsaved_bytes(self) -> int:
        """The bytes that `save` would write."""
        return len(self._text()) if self._changed else 0

    def _text(self) -> bytes:
        return json.dumps(self._known, indent=0).encode()

    def _recalled(self, file: Path, stamp: Stamp, sources: Iterable[S]) -> dict[S, str]:
        known = self._known.get(str(file.resolve()))
        if not known or tuple(known[:4]) != stamp or os.name != "posix":
            return {}
        whole, spans = (known[4], {}) if isinstance(known[4], str) else ("", known[4])
        digests = {source: whole if isinstance(source, Path) else spans.get(source.span, "") for source in sources}
        return {source: digest for source, digest in digests.items() if digest}

    def _learn(self, file: Path, stamp: Stamp, digests: Mapping[S, str]) -> None:
        name = str(file.resolve())
        spans = {source.span: digest for source, digest in digests.items() if not isinstance(source, Path)}
        known = self._known.get(name)
        if spans and known and tuple(known[:4]) == stamp and isinstance(known[4], dict):
            known[4].update(spans)
        else:
            self._known[name] = [*stamp, spans or next(iter(digests.values()))]
        self._changed = True

    def _hash(self, unknown: Mapping[Path, tuple[Stamp, list[S]]]) -> dict[S, str]:
        files, total = 0, 0
        for stamp, sources in unknown.values():
            files, total = files + len(sources), total + stamp[0]
        progress = Progress("hashing", files, "files") if total > NOTEWORTHY_BYTES else None
        found: dict[S, str] = {}
        with ThreadPoolExecutor(max_workers=4) as pool:
            jobs = pool.map(_digests_of, (sources for _, sources in unknown.values()))
            for (file, (stamp, sources)), digests in zip(unknown.items(), jobs, strict=True):
                found |= digests
                recent = max(stamp[1], stamp[2]) > time.time_ns() - FRESH_SECONDS * 1e9
                if not recent and stamp_of(file) == stamp:
                    self._learn(file, stamp, digests)
                if progress:
                    progress.advance(len(sources))
        return found


def _digests_of(sources: list[S]) -> dict[S, str]:
    """The digests of one file, or of packed ones in the order in which they lie in their container."""
    return {source: file_digest(source) for source in sorted(sources)}


def file_digest(path: Source) -> str:
    """32 hex digits: blake2b of the file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def stamp_of(path: Source) -> Stamp:
    """What the system says of a file, or of a packed one's container; it changes with the bytes, even if the mtime is
    set back."""
    status = (path if isinstance(path, Path) else path.container).stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def component_files(model: Model, names: Iterable[str], digests: Digests) -> dict[str, dict[str, str]]:
    """Per component the digest of every file that loading it reads, by its name within the component's folder.

    Raises ModelError for a file that cannot be read.
    """
    result = {}
    for name in dict.fromkeys(names):
        folder = model.parts[name].folder
        try:
            files = digests.of(model.files(name))
        except OSError as error:
            raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from error
        result[name] = {below(path, folder): digest for path, digest in files.items()}
    return result


def digest_of(files: Mapping[str, str]) -> str:
    """The digest of a component, from those of its files; where it lies does not count."""
    return key_of(*sorted(f"{name} {digest}" for name, digest in files.items()))


def file_keys(files: Mapping[S, str], digests: Digests) -> dict[S, str]:
    """The key of each source file; `files` says per file which row names it. Raises DataError for unreadable ones."""
    keys: dict[S, str] = {}
    try:
        return digests.of(files)
    except OSError:
        pass  # name all of them, not just the first
    problems = []
    for path, place in files.items():
        try:
            keys |= digests.of([path])
        except OSError as error:
            problems.append(Problem(place, f"'{path}' cannot be read: {error.strerror}", "restore the file"))
    if problems:
        raise DataError(f"{counted(len(problems), 'file')} cannot be read:", problems)
    return keys


def content_digest(values: Iterable[tuple[str, str, str, int]]) -> str:
    """The digest of a cached data set over its (row id, value name, key, checksum), which come sorted."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        digest.update(b"".join(map(_part, map(str, value))))
    return digest.hexdigest()


def below(path: Path, folder: Path) -> str:
    """The name of a component's file, as seen from its folder."""
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name


def _remembered(path: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {k: v for k, v in known.items() if isinstance(v, list) and len(v) == 5 and isinstance(v[4], str | dict)}
    except (OSError, ValueError, AttributeError):
        return {}
