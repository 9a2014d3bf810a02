"""Fetches weights and data sets from ModelScope or Hugging Face: only what is needed, resumed, and verified."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dsplit.console import PLAIN_SECONDS, say
from dsplit.errors import ModelError, Problem, UsageError
from dsplit.models import weights
from dsplit.models.hubs import Expected, download
from dsplit.models.model import MODELS, read_json
from dsplit.models.origins import is_repo_id
from dsplit.models.registry import registry

DATA = Path("data")
UNUSED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", "*.onnx_data", "*.gguf", "*.ot", "*.xml")
ATTEMPTS = 3  # one finds what was damaged before, the next two may fetch it


def fetch_model(
    name: str, *, hub: str = "modelscope", components: Sequence[str] | None = None, local_dir: Path | None = None
) -> Path:
    """The folder with the weights of a family's default repo or of a repo id; by default ./models/REPO.

    components: fetch these only (and model_index.json); None: all. Pickles are never fetched. Files that are there and
    right are kept, cut ones resumed where the client can, wrong ones fetched again. Raises ModelError if a file could
    not be fetched, is damaged, or a component has no files in the repo.
    """
    family = registry().families.get(name)
    repo = family.repos.get(hub, "") if family else name
    if not is_repo_id(repo):
        known = f"{name} has no default repo on {hub}" if family else f"'{name}' is no family and no repo id (ORG/NAME)"
        raise UsageError(f"{known}; name a repo id")
    folder = local_dir or MODELS / repo
    if components is None:
        _fetch(hub, repo, "model", ["model_index.json"], folder)
        components = _listed_components(folder)
    say(f"fetching {repo} ({', '.join(components) or 'model_index.json'}) from {hub} into {folder}")
    fetched = _fetch(hub, repo, "model", ["model_index.json", *(f"{c}/*" for c in components)], folder)
    lacking = [c for c in components if not _usable(c, fetched)]
    if lacking:
        raise ModelError(f"{repo} on {hub} has no safetensors weights in {', '.join(f'{c}/' for c in lacking)}")
    return folder


def fetch_missing(repo: str, missing: Callable[[], list[str]], *, hub: str, local_dir: Path) -> None:
    """Fetches the components that `missing()` names; under a launcher one process does, the others wait for it."""
    from filelock import FileLock

    local_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(local_dir / ".dsplit-fetch.lock"):
        components = missing()
        if components:
            fetch_model(repo, hub=hub, components=components, local_dir=local_dir)


def fetch_dataset(
    repo: str, *, hub: str = "modelscope", include: Sequence[str] = (), local_dir: Path | None = None
) -> Path:
    """The folder with a data set's files that match one of the patterns `include` (default: all); ./data/NAME.

    Raises ModelError if a file could not be fetched or is damaged, and if no file matches.
    """
    if not is_repo_id(repo):
        raise UsageError(f"--dataset '{repo}' is no repo id (ORG/NAME)")
    folder = local_dir or DATA / repo.partition("/")[2]
    allow = [f"{p}*" if p.endswith("/") else p for p in include] or ["*"]
    say(f"fetching the data set {repo} ({', '.join(allow)}) from {hub} into {folder}")
    if not _fetch(hub, repo, "dataset", allow, folder):
        raise ModelError(f"{repo} on {hub} has no file that matches {', '.join(allow)}")
    return folder


def _usable(component: str, fetched: Sequence[str]) -> bool:
    """True if the component has files, and weights beside a config.json (tokenizers and schedulers have none)."""
    names = [path.partition("/")[2] for path in fetched if path.startswith(f"{component}/")]
    return bool(names) and ("config.json" not in names or any(n.endswith(".safetensors") for n in names))


def _listed_components(folder: Path) -> list[str]:
    """The components that model_index.json names. Raises ModelError without one."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise ModelError(f"'{folder}': the repo has no model_index.json; only diffusers folders can be fetched whole")
    entries = read_json(index).items()
    return [k for k, v in entries if isinstance(v, list) and len(v) == 2 and all(v)]


def _fetch(hub: str, repo: str, kind: str, allow: Sequence[str], folder: Path) -> list[str]:
    """The paths that match `allow`, downloaded and compared; wrong files are removed and fetched again.

    Raises ModelError if they stay wrong.
    """
    right: set[str] = set()
    wrong: dict[str, list[Problem]] = {}
    for _ in range(ATTEMPTS):
        for path in wrong:
            say(f"{folder / path} is damaged; fetching it again")
        with _signs_of_life(folder):
            expected = download(hub, repo, kind, allow, UNUSED if kind == "model" else (), folder)
        found = {e.path: _compare(folder, e) for e in expected if e.path not in right}
        wrong = {path: problems for path, problems in found.items() if problems}
        if not wrong:
            return [e.path for e in expected]
        right |= found.keys() - wrong.keys()
        for path in wrong:
            (folder / path).unlink(missing_ok=True)
    lines = [f"  {p}" for problems in wrong.values() for p in problems]
    raise ModelError("\n".join([f"{repo} is damaged on {hub} itself, or on the way:", *lines]))


def _compare(folder: Path, expected: Expected) -> list[Problem]:
    """The faults of a fetched file: not of the size or sha256 that the hub states, or no sound weights."""
    path = folder / expected.path
    if not path.is_file():
        return [Problem(str(path), "missing after the download")]
    size = path.stat().st_size
    if expected.size is not None and size != expected.size:
        return [Problem(str(path), f"{size} bytes, but the hub states {expected.size}")]
    if expected.sha256 and _sha256(path) != expected.sha256:
        return [Problem(str(path), "its sha256 is not the one that the hub states")]
    return weights.file_faults(path)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _signs_of_life(folder: Path) -> Iterator[None]:
    """Off a terminal, where the clients' bars are off, says now and then how much has arrived."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PLAIN_SECONDS):
            arrived = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            say(f"fetching: {arrived / 1e9:.2f} GB are in {folder}")

    if not sys.stderr.isatty():
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
