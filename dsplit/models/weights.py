"""What is wrong with weight files, found by reading their headers only: no torch, nothing is loaded."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsplit.errors import Problem

LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
LFS_MOST = 1024  # bytes of a Git-LFS pointer, at most
HEADER_MOST = 100_000_000  # bytes of a header that safetensors itself accepts
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FETCH_AGAIN = "fetch it again: `dsplit prepare` replaces damaged files"
_PICKLED_WEIGHTS = re.compile(r"(diffusion_)?pytorch_model.*\.bin$")
INDEX = re.compile(r".+\.safetensors\.index(\.[\w-]+)?\.json$")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}\.safetensors$")
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def faults(path: Path) -> list[Problem]:
    """Every fault of the weights at `path`, a model folder (searched wholly, hidden folders excepted) or one file.

    Empty and truncated files, Git-LFS pointers (of any file, tokenizers too), headers that are no safetensors header,
    missing shards, shards without an index, links to nothing, weights that exist as pickles only. A folder without
    any weight file is a fault too.
    """
    if not path.exists():
        return [Problem(str(path), "no such file or folder")]
    if path.is_file():
        return file_faults(path)
    found: list[Problem] = []
    weights = 0
    for folder, names in walk(path):
        weights += sum(map(is_weights, names))
        found += folder_faults(folder, names)
    if not weights and not found:
        found.append(Problem(str(path), "no weight files (*.safetensors) here or below"))
    return found


def notes(path: Path) -> list[Problem]:
    """Files below `path` that look like pickled weights; dsplit never loads them."""
    return [
        Problem(str(folder / name), "not used: a pickle can run code when it is loaded; dsplit reads safetensors only")
        for folder, names in (walk(path) if path.is_dir() else [(path.parent, [path.name])])
        for name in names
        if name.endswith(PICKLES)
    ]


def is_weights(name: str) -> bool:
    """True for the name of a safetensors file or of an index of shards."""
    return name.endswith(".safetensors") or bool(INDEX.match(name))


def walk(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Each folder at and below `path` with the sorted names of its files; hidden ones (`.git`, `.cache`) left out."""
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        yield Path(folder), sorted(n for n in names if not n.startswith("."))


def folder_faults(folder: Path, names: list[str]) -> list[Problem]:
    """The faults of the files `names` of one folder, and of how they belong together."""
    found = [p for name in names for p in file_faults(folder / name)]
    indexed: set[str] = set()
    for name in names:
        if INDEX.match(name):
            shards, problems = _index_faults(folder / name)
            indexed |= shards
            found += problems
    found += _unindexed(folder, [n for n in names if n not in indexed])
    pickles = [n for n in names if _PICKLED_WEIGHTS.match(n)]
    if pickles and not any(map(is_weights, names)):
        what = f"weights exist only as a pickle ({pickles[0]}), which dsplit never loads"
        found.append(Problem(str(folder), what, "fetch or convert to safetensors"))
    return found


def file_faults(path: Path) -> list[Problem]:
    """The faults of one file: an LFS pointer in place of any file, and whatever is wrong with a safetensors file."""
    try:
        size = path.stat().st_size
        if size <= LFS_MOST and path.read_bytes().startswith(LFS_MAGIC):
            what = "weights" if path.suffix in (".safetensors", *PICKLES) else "its content"
            return [Problem(str(path), f"Git-LFS pointer, not {what}", "run `git lfs pull` or fetch it again")]
        if path.name.endswith(".incomplete"):
            return [Problem(str(path), "a download that was not finished", FETCH_AGAIN)]
        if not path.name.endswith(".safetensors"):
            return []
        what = _safetensors_fault(path, size)
    except FileNotFoundError:
        return [Problem(str(path), "a link to a file that is gone", FETCH_AGAIN)]
    except OSError as error:
        return [Problem(str(path), f"cannot be read: {error.strerror or error}")]
    return [Problem(str(path), what, FETCH_AGAIN)] if what else []


def header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> dtype, shape, data_offsets. Raises ValueError, in words."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError("empty file (0 bytes)")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= HEADER_MOST:
            raise ValueError("not a safetensors header")
        start = file.read(1)
        if start and start != b"{":
            raise ValueError("not a safetensors header")
        if size < 8 + length:
            raise ValueError(f"truncated: {size} of at least {8 + length} bytes (cut within the header)")
        text = start + file.read(length - 1)
    try:
        tensors = json.loads(text, parse_constant=_not_finite)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError("not a safetensors header (no JSON)") from error
    if not isinstance(tensors, dict):
        raise ValueError("not a safetensors header (no table of tensors)")
    return tensors


def _safetensors_fault(path: Path, size: int) -> str:
    """What is wrong with a safetensors file of `size` bytes, or an empty text."""
    try:
        tensors = header(path)
        end = 0
        for name, entry in tensors.items():
            if name != "__metadata__":
                end = max(end, _tensor_end(name, entry))
    except ValueError as error:
        return str(error)
    with path.open("rb") as file:
        whole = 8 + int.from_bytes(file.read(8), "little") + end
    if size < whole:
        return f"truncated: {size} of {whole} bytes"
    if size > whole:
        return f"{size} bytes, but its header describes {whole}"
    return ""


def _tensor_end(name: str, entry: Any) -> int:
    """Where the bytes of a tensor end; raises ValueError unless its sizes are finite and agree with each other."""
    try:
        shape, (start, end), dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a safetensors header (tensor '{name}' lacks dtype, shape or data_offsets)") from error
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError(f"not a safetensors header (tensor '{name}' has no finite size)")
    if end < start or (dtype in _BYTES and end - start != math.prod(shape) * _BYTES[dtype]):
        raise ValueError(f"not a safetensors header (the shape and the bytes of tensor '{name}' disagree)")
    return end


def _index_faults(path: Path) -> tuple[set[str], list[Problem]]:
    """The shards that an index names, and its faults: shards that are missing or lack a tensor it promises."""
    try:
        where = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str]] = {}
        for tensor, shard in where.items():
            shards.setdefault(shard, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set(), [Problem(str(path), "not an index of shards (no weight_map)", FETCH_AGAIN)]
    found = []
    for shard, tensors in sorted(shards.items()):
        if Path(shard).name != shard:
            found.append(Problem(str(path), f"names a shard outside its folder: '{shard}'"))
        elif not (path.parent / shard).exists():
            found.append(Problem(str(path), f"shard {shard} missing", FETCH_AGAIN))
        else:
            found += _lacking(path, path.parent / shard, tensors)
    return set(shards), found


def _lacking(index: Path, shard: Path, tensors: list[str]) -> list[Problem]:
    """A problem if `shard` lacks tensors that `index` says it holds; none if its header cannot be read (see above)."""
    try:
        lacking = sorted(set(tensors) - set(header(shard)))
    except (OSError, ValueError):
        return []
    if not lacking:
        return []
    return [Problem(str(index), f"{shard.name} lacks {len(lacking)} tensors that it names, e.g. '{lacking[0]}'")]


def _unindexed(folder: Path, names: list[str]) -> list[Problem]:
    """A problem for each set of shards that no index names."""
    stems = sorted({m["stem"] for n in names if (m := _SHARD.match(n))})
    return [Problem(str(folder), f"no index names the shards of {stem}", FETCH_AGAIN) for stem in stems]


def _not_finite(text: str) -> None:
    raise ValueError(f"not a safetensors header (a size of {text} is not finite)")
