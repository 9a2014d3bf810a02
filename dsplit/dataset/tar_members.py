"""Lists the members of a tar file from their headers alone, and finds out whether all of it is there."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO

from dsplit.dataset.faults import Refusal

COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
COPY = "copy it again; none of its rows is used"


def members(file: IO[bytes]) -> Iterator[tarfile.TarInfo]:
    """The members of the tar in `file`, in order; what lies in them is passed over, not read.

    The caller may read from `file` in between. Raises Refusal for a file that is no plain tar, ends early, is damaged,
    or goes on after its end mark.
    """
    _check_start(file)
    end = file.seek(0, 2)
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:", errors="surrogateescape") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
                if member.size < 0 or member.offset_data + member.size > end:
                    raise _truncated(f"'{member.name}' goes on beyond the end of the file")
                yield member
            _check_end(file, tar.offset, end)
    except (tarfile.TarError, ValueError, OverflowError, MemoryError) as error:
        if "end of data" in str(error) or "truncated" in str(error):
            raise _truncated("the file ends within a member") from error
        raise Refusal("damaged tar", f"cannot be read as a tar ({error})", COPY) from error


def fault_of(member: tarfile.TarInfo) -> Refusal | None:
    """Why the content of `member` cannot be used where it lies, or None."""
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return Refusal("unsafe name", f"'{member.name}' is a name outside of the tar", "pack it with a relative name")
    if member.issym() or member.islnk():
        what = f"'{member.name}' is a link to '{member.linkname}'"
        return Refusal("not a file", what, "pack the file itself (tar --dereference --hard-dereference)")
    if member.issparse():
        return Refusal("not a file", f"'{member.name}' is stored as a sparse file", "pack it without --sparse")
    if not member.isreg():
        return Refusal("not a file", f"'{member.name}' is no regular file", "leave it out of the tar")
    return None


def _check_start(file: IO[bytes]) -> None:
    file.seek(0)
    start = file.read(512)
    for magic, name in COMPRESSED.items():
        if start.startswith(magic):
            what = f"compressed with {name}; a picture cannot be read from its place in it"
            raise Refusal("compressed tar", what, "decompress it to a plain .tar (its pictures are compressed anyway)")
    if start.startswith(b"version https://git-lfs"):
        raise Refusal("not a tar", "a Git-LFS pointer, not the tar itself", "fetch it with `git lfs pull`")
    if not start:
        raise _truncated("an empty file (0 bytes)")


def _check_end(file: IO[bytes], at: int, end: int) -> None:
    """A whole tar ends in a block of zeros, and nothing else follows it."""
    file.seek(at)
    block = file.read(512)
    if len(block) < 512:
        raise _truncated("it has no end mark")
    if any(block):
        raise Refusal("damaged tar", f"byte {at}: the header of a member is damaged", COPY)
    while chunk := file.read(1 << 20):
        if chunk.count(0) < len(chunk):
            what = f"more data follow its end mark (byte {at} of {end}), perhaps another tar appended to it"
            raise Refusal("damaged tar", what, "pack it anew, or keep the tars apart; none of its rows is used")


def _truncated(what: str) -> Refusal:
    return Refusal("truncated tar", f"truncated: {what}", COPY)
