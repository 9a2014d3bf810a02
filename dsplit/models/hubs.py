"""The two hubs, through their own clients: modelscope and huggingface_hub."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partialmethod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dsplit.console import counted
from dsplit.errors import ModelError, UsageError

ENDPOINTS = {
    "modelscope": ("MODELSCOPE_ENDPOINT", "https://modelscope.cn"),
    "huggingface": ("HF_ENDPOINT", "https://huggingface.co"),
}
REACH_SECONDS = 5.0
_PORTS = {"http": 80, "https": 443}
_RESUME_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Expected:
    """What the hub says of a file: its path below the folder; size and sha256 where they are still to be compared."""

    path: str
    size: int | None
    sha256: str | None


def download(
    hub: str, repo: str, kind: str, allow: Sequence[str], ignore: Sequence[str], folder: Path
) -> list[Expected]:
    """The files of `repo` that match `allow` and not `ignore`, now in `folder`; complete ones there are kept.

    kind: `model` or `dataset`. ModelScope's client compares size and sha256 with its listing at every call; Hugging
    Face's compares neither for files that it has fetched before, so that is left to the caller. Raises ModelError in
    words for every failure.
    """
    if hub not in ENDPOINTS:
        raise UsageError(f"unknown hub '{hub}'; use {' or '.join(ENDPOINTS)}")
    variable, default = ENDPOINTS[hub]
    endpoint = os.environ.get(variable) or default
    _reach(hub, endpoint)
    if not sys.stderr.isatty():
        _no_bars()
    client = _modelscope if hub == "modelscope" else _huggingface
    try:
        return client(endpoint, repo, kind, list(allow), list(ignore), folder)
    except Exception as error:  # two clients, with three families of errors between them
        raise ModelError(_explain(hub, repo, error)) from error


def _no_bars() -> None:
    """Turns off the clients' progress bars, which redraw their line: in a log each redraw is a line more.

    Their environment variables are read when they are imported, which may have been long ago.
    """
    from huggingface_hub.utils import disable_progress_bars
    from tqdm import tqdm

    disable_progress_bars()
    tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)


def _reach(hub: str, endpoint: str) -> None:
    """Raises ModelError within seconds if nobody listens at the hub (or at the proxy); the clients try for long."""
    url = urlsplit(endpoint)
    proxy = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
    target = urlsplit(proxy) if proxy else url
    address = (target.hostname or "", target.port or _PORTS.get(target.scheme, 80))
    try:
        socket.create_connection(address, timeout=REACH_SECONDS).close()
    except OSError as error:
        other = next(h for h in ENDPOINTS if h != hub)
        raise ModelError(
            f"cannot reach {hub} at {endpoint}{f' through {proxy}' if proxy else ''} ({error}); check the network, "
            f"try --hub {other}, or give a local folder"
        ) from error


def _modelscope(
    endpoint: str, repo: str, kind: str, allow: list[str], ignore: list[str], folder: Path
) -> list[Expected]:
    from modelscope_hub import HubApi  # modelscope.snapshot_download is this, after an import of torch

    logging.getLogger("modelscope_hub").setLevel(logging.WARNING)
    api = HubApi(endpoint=endpoint)
    listed = [f for f in api.list_repo_files(repo, kind) if f.type != "tree"]
    wanted = [f for f in listed if _matches(f.path, allow) and not _matches(f.path, ignore)]
    for file in wanted:
        if file.path.startswith("/") or ".." in file.path.split("/"):
            raise ModelError(
                f"{repo} on modelscope lists '{file.path}', which lies outside the folder; nothing fetched"
            )
    api.download_repo(repo, kind, local_dir=folder, allow_patterns=allow, ignore_patterns=ignore)
    return [Expected(f.path, f.size or None, None) for f in wanted]  # size 0 can mean unknown


def _huggingface(
    endpoint: str, repo: str, kind: str, allow: list[str], ignore: list[str], folder: Path
) -> list[Expected]:
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.hf_api import RepoFile

    constants.DOWNLOAD_CHUNK_SIZE = _RESUME_BYTES  # a cut connection loses the chunk that it was in: 10 MB otherwise
    api = HfApi(endpoint=endpoint)
    # asked here, since snapshot_download takes an existing folder for the answer when the hub refuses
    commit = api.repo_info(repo, repo_type=kind, revision="main").sha
    listed = api.list_repo_tree(repo, recursive=True, revision=commit, repo_type=kind)
    wanted = [f for f in listed if isinstance(f, RepoFile) and _matches(f.path, allow) and not _matches(f.path, ignore)]
    snapshot_download(
        repo, repo_type=kind, revision=commit, allow_patterns=allow, ignore_patterns=ignore, local_dir=folder,
        endpoint=endpoint,
    )  # fmt: skip
    return [Expected(f.path, f.size, f.lfs.sha256 if f.lfs is not None else _etag(folder, f.path)) for f in wanted]


def _etag(folder: Path, path: str) -> str | None:
    """The sha256 that the hub sent as the ETag of a file, if it did: the client notes it beside the download."""
    note = folder / ".cache" / "huggingface" / "download" / f"{path}.metadata"
    lines = note.read_text(encoding="utf-8").splitlines() if note.is_file() else []
    return lines[1] if len(lines) > 1 and _SHA256.fullmatch(lines[1]) else None


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """True as both clients see it: fnmatch of the whole path, where `*` crosses folders."""
    return any(fnmatch(path, p) for p in patterns)


def _explain(hub: str, repo: str, error: Exception) -> str:
    """What went wrong, one line per file, without the clients' request dumps."""
    if isinstance(error, ModelError):
        return str(error)
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    files: dict[str, Any] = getattr(error, "failed_files", {})
    if files:
        lines = [f"  {path}: {_first_line(e)}" for path, e in sorted(files.items())]
        what = f"{counted(len(files), 'file')} of {repo} could not be fetched from {hub}"
        what += "; run the same command again to go on"
        return "\n".join([what, *lines])
    if status in (401, 403):
        login = "modelscope login" if hub == "modelscope" else "hf auth login"
        return f"{hub} does not show '{repo}' (HTTP {status}): check the id; if it is private or gated, `{login}` first"
    if status == 404 and "resolve/" not in str(error):
        return f"{hub} has no repo '{repo}' (HTTP 404): check the id, or try the other --hub"
    return f"'{repo}' could not be fetched from {hub}: {_first_line(error)}; run the same command again to go on"


def _first_line(error: BaseException) -> str:
    """The error without the dump of request and response that follows it."""
    lines = [line.strip() for line in str(error).partition("Request:")[0].splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") if lines else type(error).__name__
