"""The reference's option names, underscores, and a bare --from-cache: what they mean here.

No alias is declared as an option, since the help would show it; the words of the command line are rewritten instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsplit.recipe import option

Names = Mapping[str, tuple[str, bool]]
BARE = "\0bare"  # the value of a --from-cache that states none

# reference's name -> ours. `data` is different in `train`, where it may name the cache: see ReferenceOptions.
RENAMED = {
    "dataset-base-path": "data",
    "dataset-metadata-path": "metadata",
    "output-path": "out",
    "dataset-repeat": "repeat",
    "num-epochs": "epochs",
    "learning-rate": "lr",
    "lora-rank": "rank",
    "lora-target-modules": "targets",
    "lora-checkpoint": "init-lora",
    "lora-base-model": "trainable",
    "trainable-models": "trainable",
    "use-gradient-checkpointing": "gradient-checkpointing",
    "dataset-num-workers": "workers",
    "num-workers": "workers",
    "save-every": "save-steps",
}
DIT = {"lora-base-model", "trainable-models"}  # whose values call the transformer `dit`


@dataclass(frozen=True)
class ReferenceOptions:
    """Options of the reference that need more than another name."""

    dataset_base_path: str | None = option(None, "The cache in stage 2, else the data set.", hidden=True)
    remove_prefix_in_ckpt: str | None = option(None, "Without effect: --lora-format says it.", hidden=True)
    find_unused_parameters: bool = option(False, "Without effect: it is automatic.", hidden=True)
    data_file_keys: str | None = option(None, "Columns that are files; the family knows them.", hidden=True)
    extra_inputs: str | None = option(None, "Columns that the model reads; the family knows them.", hidden=True)


def rewrite(args: Sequence[str], names: Names) -> tuple[list[str], list[str]]:
    """The command line in dsplit's own names, and the options in it in order (`model_path`), each at its last place.

    names: the command's options (`--rank`) -> parameter name, and whether it is a flag. Values are never touched,
    except that the reference's `dit` becomes `transformer`.
    """
    out: list[str] = []
    order: dict[str, None] = {}
    rest = deque(args)
    while rest:
        token = rest.popleft()
        if token == "--":
            return [*out, token, *rest], list(order)
        if not token.startswith("--"):
            out.append(token)
            continue
        written, equals, value = token.partition("=")
        name, change = _own_name(written, names)
        if name not in names:
            out.append(token)  # Typer says that there is no such option
            continue
        key, is_flag = names[name]
        order.pop(key, None)
        order[key] = None
        if is_flag:
            out.append(name + equals + value)
        elif equals:
            out.append(f"{name}={change(value)}")
        elif name == "--from-cache" and (not rest or rest[0].startswith("-")):
            out.append(f"{name}={BARE}")
        elif rest:
            out.append(f"{name}={change(rest.popleft())}")
        else:
            out.append(name)  # Typer says that its value is missing
    return out, list(order)


def _own_name(written: str, names: Names) -> tuple[str, Callable[[str], str]]:
    name = written.replace("_", "-")
    alias = name.removeprefix("--")
    if name in names or f"--{RENAMED.get(alias)}" not in names:
        return name, str
    return f"--{RENAMED[alias]}", _without_dit if alias in DIT else str


def _without_dit(value: str) -> str:
    return ",".join("transformer" if part.strip() == "dit" else part for part in value.split(","))
