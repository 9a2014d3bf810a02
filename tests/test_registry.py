"""The plugin registry over real entry points: built-ins come in as a stranger's do, a broken plugin harms no other."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from dsplit.commands.tasks import overview
from dsplit.errors import UnitError, UsageError
from dsplit.models.registry import Registry, registry

GOOD = """
from dsplit import Task, hookimpl

def loss(denoise, batch, rng): ...

@hookimpl
def dsplit_register_tasks():
    return [Task({name!r}, loss, "a task of a stranger")]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that installs a one-file distribution with an entry point, as pip leaves it on disk."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(module: str, source: str) -> None:
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dsplit]\n{module} = {module}\n")

    return put


def read() -> Registry:
    """The registry as a new process would see it."""
    return registry.__wrapped__()


def test_built_ins_are_found_through_their_entry_points() -> None:
    points = {p.name: p.value for p in entry_points(group="dsplit") if p.dist is not None and p.dist.name == "dsplit"}
    assert points["qwen_image"] == "dsplit_qwen_image"
    found = read()
    assert found.broken == ()
    assert {"sft", "direct_distill"} <= set(found.tasks)
    assert dict(found.family("qwen-image").tasks) == {"sft": True, "direct_distill": True}


def test_a_strangers_plugin_stands_beside_the_built_ins(install) -> None:
    install("stranger", GOOD.format(name="inpaint"))
    found = read()
    assert found.broken == ()
    assert found.task("inpaint").summary == "a task of a stranger"
    assert "qwen-image" in found.families


BROKEN = {
    "does_not_import": ("import no_such_module_anywhere", "ModuleNotFoundError", "no_such_module_anywhere"),
    "raises": ("1 / 0", "ZeroDivisionError", "division by zero"),
    "leaves": ("raise SystemExit('bye')", "SystemExit", "bye"),
    "does_not_parse": ("def (", "SyntaxError", ""),
    "misspells_the_hook": (
        "from dsplit import hookimpl\n@hookimpl\ndef dsplit_register_family(): return []",
        "PluginValidationError",
        "dsplit_register_family",
    ),
    "takes_an_argument": (
        "from dsplit import hookimpl\n@hookimpl\ndef dsplit_register_families(manager): return []",
        "PluginValidationError",
        "manager",
    ),
    "forgets_the_marker": (GOOD.format(name="a").replace("@hookimpl", ""), "ValueError", "no family and no task"),
    "gives_no_list": (
        "from dsplit import hookimpl\n@hookimpl\ndef dsplit_register_tasks(): return 3",
        "TypeError",
        "int",
    ),
    "gives_another_type": (
        "from dsplit import hookimpl\n@hookimpl\ndef dsplit_register_families(): return ['flux']",
        "TypeError",
        "'flux', which is no ModelFamily",
    ),
    "fails_when_asked": (
        "from dsplit import hookimpl\n@hookimpl\ndef dsplit_register_tasks(): raise OSError('disk')",
        "OSError",
        "disk",
    ),
    "takes_a_built_in_name": (GOOD.format(name="sft"), "ValueError", "'sft', a name that is taken"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_reported_and_harms_no_other(install, name: str) -> None:
    source, kind, reason = BROKEN[name]
    install(name, source)
    install("stranger", GOOD.format(name="inpaint"))
    found = read()
    assert [b.name for b in found.broken] == [f"{name} ({name})"]
    assert found.broken[0].reason.startswith(f"{kind}: ")
    assert reason in found.broken[0].reason
    assert {"sft", "direct_distill", "inpaint"} <= set(found.tasks)
    assert "qwen-image" in found.families


def test_a_built_in_name_stays_the_built_ins_even_for_a_plugin_that_sorts_first(install) -> None:
    built_in = read().task("sft")
    install("aaa", GOOD.format(name="sft"))
    found = read()
    assert found.task("sft") is built_in
    assert [b.name for b in found.broken] == ["aaa (aaa)"]


def test_of_two_strangers_with_one_name_the_second_is_reported(install) -> None:
    install("first", GOOD.format(name="inpaint"))
    install("second", GOOD.format(name="inpaint"))
    found = read()
    assert found.task("inpaint").loss.__module__ == "first"
    assert [b.name for b in found.broken] == ["second (second)"]


def test_a_plugin_is_used_whole_or_not_at_all(install) -> None:
    install("half", GOOD.format(name="inpaint") + "\n@hookimpl\ndef dsplit_register_families(): return [3]\n")
    found = read()
    assert "inpaint" not in found.tasks
    assert [b.name for b in found.broken] == ["half (half)"]


def test_an_unknown_name_gets_the_nearest_known() -> None:
    with pytest.raises(UsageError, match="unknown model family 'qwen-imgae'; known: qwen-image"):
        read().family("qwen-imgae")
    with pytest.raises(UsageError, match="unknown task 'direct-distill'; known: direct_distill"):
        read().task("direct-distill")


def test_an_unknown_name_points_at_broken_plugins(install) -> None:
    install("raises", "1 / 0")
    with pytest.raises(UsageError, match=r"unknown task 'ours'; .*1 broken plugin: see `dsplit tasks`"):
        read().task("ours")


CIRCLE = """
from dataclasses import replace
from dsplit import hookimpl, unit
from dsplit_qwen_image import QWEN_IMAGE

@unit(outputs="latents")
def encode_image(prompt_embeds): ...

@unit(outputs="prompt_embeds prompt_mask")
def encode_prompt(latents): ...

@hookimpl
def dsplit_register_families():
    return [replace(QWEN_IMAGE, name="circular", units=(encode_image, encode_prompt))]
"""


def test_a_family_that_cannot_be_split_is_reported_by_tasks_and_hides_no_other(install) -> None:
    install("circle", CIRCLE)
    registry.cache_clear()
    try:
        found = overview({})
        with pytest.raises(UnitError, match="in a circle"):
            overview({"model": "circular"})
    finally:
        registry.cache_clear()
    assert "qwen-image" in [family["name"] for family in found["families"]]
    assert found["broken"] == [
        {
            "name": "circular",
            "reason": "units read each other in a circle: encode_image -> encode_prompt -> encode_image",
        }
    ]
