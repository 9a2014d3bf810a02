"""The layers: imports point down, plugins see only what strangers see, and the light paths never load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsplit

PACKAGE = Path(dsplit.__file__).parent
ROOT = PACKAGE.parent
PLUGINS = sorted((ROOT / "plugins").glob("*.py"))

# From the lowest layer to the highest; a module belongs to the longest name here that it starts with.
LAYERS = (
    ("dsplit.errors", "dsplit.units", "dsplit.shapes", "dsplit.console", "dsplit.hookspecs"),
    ("dsplit.recipe", "dsplit.models.family", "dsplit"),
    ("dsplit.dataset", "dsplit.demo"),
    ("dsplit.models",),
    ("dsplit.cache",),
    ("dsplit.training",),
    ("dsplit.validation",),
    ("dsplit.toml_file", "dsplit.commands", "dsplit.cli", "dsplit.__main__"),
)
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}
HEAVY = {"torch", "numpy", "diffusers", "transformers", "accelerate", "peft", "safetensors", "PIL", "matplotlib"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> int:
    """The layer of `module`, by its own name or that of the nearest package around it below `dsplit` itself."""
    name = module
    while name not in LAYER:
        name = name.rpartition(".")[0]
        assert name != "dsplit", f"{module} has no place in LAYERS"
    return LAYER[name]


def imports(path: Path, *, at_import: bool = False) -> Iterator[tuple[int, str]]:
    """Line and name of every module that the file imports; at_import: only those loaded when it is imported itself."""
    open_: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while open_:
        node = open_.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            open_ += node.orelse
            continue
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for name in node.names:  # `from dsplit import hookspecs` imports a module, `from dsplit import unit` a name
                inner = f"{node.module}.{name.name}"
                yield node.lineno, inner if is_module(inner) else str(node.module)
        open_ += ast.iter_child_nodes(node)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=module_name)
def test_imports_point_down(path: Path) -> None:
    here = module_name(path)
    upward = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for line, name in imports(path)
        if name.partition(".")[0] == "dsplit" and layer(name) > layer(here)
    ]
    assert upward == []


@pytest.mark.parametrize("path", PLUGINS, ids=module_name)
def test_a_built_in_plugin_imports_what_a_strangers_may(path: Path) -> None:
    ours = {name for _, name in imports(path) if name.partition(".")[0] == "dsplit"}
    assert ours <= {"dsplit", "dsplit.models"}
    assert not {name for _, name in imports(path) if name in {p.stem for p in PLUGINS}}
    assert not {name.partition(".")[0] for _, name in imports(path, at_import=True)} & HEAVY


LIGHT = (
    "import dsplit, dsplit.models",
    "from dsplit.models.registry import registry; r = registry(); assert not r.broken and r.families and r.tasks",
    "import dsplit.recipe, dsplit.console, dsplit.shapes",
    "import dsplit.cli",
    "import " + ", ".join(p.stem for p in PLUGINS),
)


@pytest.mark.parametrize("statement", LIGHT)
def test_the_light_paths_never_load_torch(statement: str) -> None:
    look = f"{statement}\nimport sys\nprint(sorted(set(sys.modules) & {HEAVY!r}))"
    result = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
