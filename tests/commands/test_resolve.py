"""Command line > dsplit.toml > defaults; what contradicts itself is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsplit.errors import UsageError
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, TrainOptions
from tests.commands.parsing import given, resolved

TOML = """
model = "weights"

[data]
data = "pictures"
max-pixels = 4096

[cache]
out = "store"
name = "ink"

[train]
out = "runs/ink"
rank = 16
lr = 1
seed = 3
dtype = "float32"

[validate]
prompt = "a dog"
steps = 20
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "dsplit.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_line_wins_over_the_file_over_the_defaults(folder: Path) -> None:
    model, data, train = resolved("train", "--seed", "5")
    assert model == ModelOptions(model="weights", dtype="float32")
    assert data == DataOptions(data="pictures", max_pixels=4096)
    assert train == TrainOptions(name="ink", out="runs/ink", rank=16, lr=1.0, seed=5)


def test_a_commands_section_is_its_own(folder: Path) -> None:
    model, _, cache = resolved("cache")
    assert model == ModelOptions(model="weights")
    assert cache == CacheOptions(out="store", name="ink")
    _, _, validate = resolved("validate")
    assert (validate.prompt, validate.steps, validate.seed, validate.name) == (["a dog"], 20, 0, "ink")


def test_a_bare_from_cache_is_the_cache_of_the_file(folder: Path) -> None:
    assert resolved("train", "--from-cache")[2].from_cache == "store"
    assert resolved("train", "--from-cache", "other")[2].from_cache == "other"
    assert resolved("train")[2].from_cache is None
    (folder / "dsplit.toml").unlink()
    assert resolved("train", "--from-cache")[2].from_cache == "cache"


def test_paths_of_the_file_start_at_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "weights").mkdir()
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    model, data, train = resolved("train", "--from-cache", folder=folder)
    assert (model.model, data.data) == (str(folder / "weights"), str(folder / "pictures"))
    assert (train.out, train.from_cache) == (str(folder / "runs" / "ink"), str(folder / "store"))


def test_every_unknown_setting_is_named_with_its_nearest(folder: Path) -> None:
    (folder / "dsplit.toml").write_text('rank = 4\nmodle = "x"\n[train]\nrnak = 3\nsteps = 2\n[trian]\nrank = 1\n')
    with pytest.raises(UsageError) as caught:
        resolved("cache")
    message = str(caught.value)
    assert message.startswith("dsplit.toml: unknown settings")
    for part in (
        "'rank' belongs in [train]",
        "'modle' is no setting; did you mean model",
        "[train] 'rnak' is no setting; did you mean rank",
        "[train] 'steps' belongs in [validate]",
        "unknown section [trian]; did you mean train?",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nrank = 'four'", "--rank: 'four' in dsplit.toml should be int"),
        ("[train]\nrank = true", "--rank: True in dsplit.toml should be int"),
        ("[train]\nrank = 4.5", "--rank: 4.5"),
        ("[train]\nrank = 0", "--rank: 0 is below 1"),
        ("[train]\nlora_format = 'zip'", "--lora-format: unknown 'zip'; choose from diffusers, comfyui, diffsynth"),
        ("[train\n", "not valid TOML"),
        ("[model]\nmodel = 3", "--model: 3 in dsplit.toml should be str"),
    ],
)
def test_wrong_settings_are_usage_errors(folder: Path, text: str, says: str) -> None:
    (folder / "dsplit.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        resolved("train")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "words",
    ["--save-steps 0", "--save-every -1", "--epochs 0", "--max-steps 0", "--batch-size 0", "--lr -1", "--repeat 0"],
)
def test_a_count_below_its_smallest_names_the_option(words: str) -> None:
    name = words.split()[0].replace("every", "steps")
    with pytest.raises(UsageError, match=f"^{name}: .* is below"):
        resolved("train", *words.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", "--lr nan"),
        ("train", "--lr inf"),
        ("train", "--weight-decay inf"),
        ("train", "--alpha -inf"),
        ("validate", "--cfg nan"),
        ("validate", "--lora-scale inf"),
        ("validate", "--tolerance nan"),
    ],
)
def test_a_number_that_is_not_finite_names_the_option(command: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"^{words} is no finite number$".replace(" ", ": ", 1)):
        resolved(command, *words.split())


def test_a_number_of_the_file_must_be_finite_too(folder: Path) -> None:
    (folder / "dsplit.toml").write_text("[train]\nweight_decay = inf\n")
    with pytest.raises(UsageError, match=r"^--weight-decay: inf is no finite number$"):
        resolved("train")


def test_a_tilde_in_the_file_is_the_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("USERPROFILE", "/home/someone")
    text = "[data]\ndata = '~/d'\nmetadata = '~/m.csv'\n[cache]\nout = '~'\n[train]\nout = '~/r'\n"
    (folder / "dsplit.toml").write_text(text)
    _, data, train = resolved("train", "--from-cache")
    assert (data.data, data.metadata) == (str(Path("/home/someone/d")), str(Path("/home/someone/m.csv")))
    assert (train.from_cache, train.out) == (str(Path("/home/someone")), str(Path("/home/someone/r")))


@pytest.mark.parametrize(
    ("words", "model", "path"),
    [
        ("--model a --model-path b", "a", "b"),
        ("--model-path b --model ./a", "./a", None),
        ("--model-path b --model qwen-image", "qwen-image", "b"),
        ("--model qwen-image --model-path b", "qwen-image", "b"),
        ("--model x --model y", "y", None),
    ],
)
def test_the_last_of_model_and_model_path_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, model: str, path: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    options = resolved("cache", *words.split())[0]
    assert (options.model, options.model_path) == (model, path)


def test_a_stated_model_wins_over_the_files_weights(folder: Path) -> None:
    (folder / "dsplit.toml").write_text('[model]\nmodel = "qwen-image"\nmodel_path = "./here"\n')
    options = resolved("cache", "--model", "./mine")[0]
    assert (options.model, options.model_path) == ("./mine", None)
    options = resolved("cache", "--model-path", "./mine")[0]
    assert (options.model, options.model_path) == ("qwen-image", "./mine")


def test_a_stated_size_replaces_the_files_size(folder: Path) -> None:
    (folder / "dsplit.toml").write_text('[data]\nresolution = "64x64"\n')
    data = resolved("cache", "--width", "32", "--height", "48")[1]
    assert (data.resolution, data.width, data.height) == (None, 32, 48)
    (folder / "dsplit.toml").write_text("[data]\nwidth = 32\nheight = 32\n")
    data = resolved("cache", "--resolution", "64x48")[1]
    assert (data.resolution, data.width, data.height) == ("64x48", None, None)


@pytest.mark.parametrize(
    ("toml", "words", "expected"),
    [
        ("[train]\nmax_steps = 500", "--epochs 1", {"epochs": 1, "max_steps": None}),
        ("[train]\nepochs = 2", "--max-steps 9", {"epochs": 2, "max_steps": 9}),
        ("[train]\nepochs = 2\nmax_steps = 5", "", {"epochs": 2, "max_steps": 5}),
        ("[data]\nresolution = '64x64'", "--max-pixels 4096", {"resolution": None, "max_pixels": 4096}),
        ("[data]\nwidth = 64\nheight = 64", "--max-pixels 4096", {"width": None, "height": None}),
        ("[data]\nresolution = '64x64'\n[train]\nwidth = 32\nheight = 32", "", {"resolution": None, "width": 32}),
        ("[data]\nresolution = '64x64'\nmax_pixels = 4096", "", {"resolution": "64x64", "max_pixels": 4096}),
        ("[model]\nmodel_path = './a'\n[train]\nmodel = './b'", "", {"model": "./b", "model_path": None}),
        ("[model]\nmodel_path = './a'\n[train]\nmodel = 'qwen-image'", "", {"model_path": "./a"}),
        ("[model]\nmodel_paths = '[1]'", "--model ./b", {"model": "./b", "model_paths": None}),
        ("[model]\nmodel_paths = '[1]'", "--model-path b", {"model_path": "b", "model_paths": None}),
        ("[model]\nmodel_paths = '[1]'", "--model qwen-image", {"model": "qwen-image", "model_paths": "[1]"}),
        (
            "[model]\nmodel_paths = '[1]'",
            "--model-id-with-origin-paths a:vae/x",
            {"model_paths": None, "model_id_with_origin_paths": "a:vae/x"},
        ),
        ("[train]\nfrom_cache = 'a'", "--dataset_base_path b", {"from_cache": "b", "data": None}),
    ],
)
def test_the_more_specific_of_two_that_exclude_each_other_wins(
    folder: Path, toml: str, words: str, expected: dict[str, object]
) -> None:
    (folder / "dsplit.toml").write_text(toml)
    values = {k: v for group in resolved("train", *words.split()) for k, v in vars(group).items()}
    assert {k: values[k] for k in expected} == expected


@pytest.mark.parametrize(
    ("words", "from_cache", "data"),
    [
        ("--dataset_base_path d", None, "d"),
        ("--task sft --dataset_base_path d", None, "d"),
        ("--task sft:train --dataset_base_path c", "c", None),
        ("--task direct_distill:train", "cache", None),
        ("--from-cache --dataset_base_path c", "c", None),
        ("--from-cache c --dataset_base_path c", "c", None),
        ("--from-cache c --data d", "c", "d"),
    ],
)
def test_the_references_data_path_is_the_cache_in_stage_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, from_cache: str | None, data: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    _, rows, train = resolved("train", *words.split())
    assert (train.from_cache, rows.data) == (from_cache, data)


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("cache", "--task sft:train", "`dsplit train --from-cache --task sft`"),
        ("train", "--task direct_distill:data_process", "`dsplit cache --task direct_distill`"),
        ("train", "--task sft:trian", "sft, sft:data_process or sft:train"),
        ("train", "--from-cache a --dataset_base_path b", "both name the cache"),
        ("train", "--from-cache=", "--from-cache: an empty name"),
    ],
)
def test_contradictions_are_usage_errors(command: str, words: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolved(command, *words.split())
    assert says in str(caught.value)


def test_every_stage_of_a_task_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for task in ("sft", "direct_distill"):
        assert resolved("cache", "--task", task)[0].task == task
        assert resolved("cache", "--task", f"{task}:data_process")[0].task == task
        assert resolved("train", "--task", task)[0].task == task
        assert resolved("train", "--task", f"{task}:train")[0].task == task
        assert resolved("validate", "--task", f"{task}:train")[0].task == task


def test_a_task_that_nobody_states_is_nobodys_choice(folder: Path) -> None:
    assert resolved("cache")[0].task is None
    (folder / "dsplit.toml").write_text("[model]\ntask = 'direct_distill'\n")
    assert resolved("train", "--from-cache")[0].task == "direct_distill"
    (folder / "dsplit.toml").write_text("[model]\ntask = 3\n")
    with pytest.raises(UsageError, match=r"--task: 3 in dsplit\.toml should be str"):
        resolved("train")


def test_flags_can_be_taken_back(folder: Path) -> None:
    (folder / "dsplit.toml").write_text("[train]\ngradient_checkpointing = true\n")
    assert resolved("train")[2].gradient_checkpointing is True
    assert resolved("train", "--no-gradient-checkpointing")[2].gradient_checkpointing is False
    assert given("train", ["--no_gradient_checkpointing"]) == {"gradient_checkpointing": False}
