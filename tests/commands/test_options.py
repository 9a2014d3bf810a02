"""Options: made from the recipe, in every spelling, with the reference's names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest
import typer

from dsplit.commands.options import default_of
from dsplit.commands.reference import BARE, RENAMED
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, PrepareOptions, TrainOptions, ValidateOptions
from tests.commands.parsing import given

REFERENCE = [
    "dataset_base_path",
    "dataset_metadata_path",
    "output_path",
    "dataset_repeat",
    "num_epochs",
    "learning_rate",
    "lora_rank",
    "lora_target_modules",
    "lora_base_model",
    "trainable_models",
    "lora_checkpoint",
    "save_steps",
    "model_id_with_origin_paths",
    "model_paths",
    "offload_models",
    "remove_prefix_in_ckpt",
    "use_gradient_checkpointing",
    "dataset_num_workers",
    "find_unused_parameters",
    "data_file_keys",
    "extra_inputs",
    "height",
    "width",
    "max_pixels",
    "task",
]
ALSO_OURS = {"save_steps", "height", "width", "max_pixels", "task"}
FLAGS = {"use_gradient_checkpointing", "find_unused_parameters"}
NUMBERS = {
    "dataset_repeat",
    "num_epochs",
    "lora_rank",
    "save_steps",
    "dataset_num_workers",
    "height",
    "width",
    "max_pixels",
}


def help_of(command: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "dsplit", command, "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    return result.stdout


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    return {command: help_of(command) for command in ("prepare", "cache", "train", "validate")}


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        ("prepare", (ModelOptions, DataOptions, PrepareOptions)),
        ("cache", (ModelOptions, DataOptions, CacheOptions)),
        ("train", (ModelOptions, DataOptions, TrainOptions)),
        ("validate", (ModelOptions, DataOptions, ValidateOptions)),
    ],
)
def test_the_help_shows_every_option_with_its_default(
    helps: dict[str, str], command: str, groups: tuple[type, ...]
) -> None:
    for group in groups:
        for field in fields(group):
            flag = f"--{field.name.replace('_', '-')} "
            lines = [line for line in helps[command].splitlines() if line.startswith(f"│ {flag}")]
            if field.metadata["hidden"]:
                assert not lines, flag
                continue
            assert len(lines) == 1, flag
            default = default_of(field)
            if field.metadata["shown"]:
                assert f"[default: ({field.metadata['shown']})]" in lines[0]
            elif default in (None, []) or default is False:
                assert "[default" not in lines[0]
            else:
                assert f"[default: {field.name.replace('_', '-') if default is True else default}]" in lines[0]
            assert "--no-" not in lines[0] or default is True


def test_the_references_names_are_absent_from_the_help(helps: dict[str, str]) -> None:
    for text in helps.values():
        for name in set(REFERENCE) - ALSO_OURS:
            assert f"--{name}" not in text
            assert f"--{name.replace('_', '-')} " not in text


@pytest.mark.parametrize("command", ["cache", "train"])
@pytest.mark.parametrize("spell", [str, lambda name: name.replace("_", "-")])
@pytest.mark.parametrize("name", REFERENCE)
def test_the_references_names_are_understood_in_either_spelling(command: str, spell, name: str) -> None:  # type: ignore[no-untyped-def]
    value = "7" if name in NUMBERS else "0.5" if name == "learning_rate" else "x"
    words = [f"--{spell(name)}", *([] if name in FLAGS else [value])]
    ours = RENAMED.get(name.replace("_", "-"), name).replace("-", "_") if name != "dataset_base_path" else name
    wanted = True if name in FLAGS else 7 if name in NUMBERS else 0.5 if name == "learning_rate" else "x"
    assert given(command, words) == {ours: wanted}


def test_dit_becomes_transformer_in_the_references_options_only() -> None:
    assert given("train", ["--lora_base_model", "dit"]) == {"trainable": "transformer"}
    assert given("train", ["--trainable-models=dit,text_encoder"]) == {"trainable": "transformer,text_encoder"}
    assert given("train", ["--trainable", "dit"]) == {"trainable": "dit"}


def test_underscores_are_accepted_in_names_and_kept_in_values() -> None:
    stated = given("validate", ["--lora_scale=0.5", "--prompt", "--snake_case", "--prompt", "a_b", "--out", "my_dir"])
    assert stated == {"lora_scale": 0.5, "prompt": ["--snake_case", "a_b"], "out": "my_dir"}


def test_options_come_in_the_order_of_their_last_place() -> None:
    words = ["--model", "a", "--seed", "1", "--model-path", "b", "--model", "c"]
    assert list(given("train", words)) == ["seed", "model_path", "model"]
    assert given("train", words)["model"] == "c"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--from-cache"], BARE),
        (["--from_cache"], BARE),
        (["--from-cache", "--rank", "4"], BARE),
        (["--from-cache", "here"], "here"),
        (["--from-cache=here"], "here"),
    ],
)
def test_from_cache_may_stand_alone(words: list[str], value: str) -> None:
    stated = given("train", words)
    assert stated["from_cache"] == value
    assert stated.get("rank") == (4 if "--rank" in words else None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rnak", "4"], "No such option: --rnak"),
        (["--rank"], "'--rank' requires an argument"),
        (["--rank", "four"], "--rank"),
        (["extra"], "extra"),
        (["--install"], "No such option: --install"),
    ],
)
def test_wrong_words_are_usage_errors(words: list[str], says: str) -> None:
    with pytest.raises(typer.TyperException) as caught:
        given("train", words)
    assert says in caught.value.format_message()
    assert caught.value.exit_code == 2
