"""Finding a model: what --model and its companions mean, and what is said when nothing is found."""

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from dsplit.errors import ModelError, UsageError
from dsplit.models import places
from dsplit.models.locate import locate
from dsplit.models.registry import Registry, registry
from dsplit.recipe import ModelOptions
from tests import tiny

ALL = {"transformer", "vae", "text_encoder", "tokenizer", "scheduler"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder, and no network at all."""
    monkeypatch.chdir(tmp_path)

    def connect(self, address):
        raise AssertionError(f"asked the network: {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def model(tmp_path):
    return tiny.qwen_image(tmp_path / "a b" / "m:1")


def refusal(**options: str) -> str:
    with pytest.raises(ModelError) as caught:
        locate(ModelOptions(**options))
    return str(caught.value)


def reference(root: Path | str) -> str:
    """The list of the reference's commands, with `root` for its repo."""
    return (
        f"{root}:text_encoder/model*.safetensors,{root}:vae/diffusion_pytorch_model.safetensors,"
        f"{root}:transformer/diffusion_pytorch_model*.safetensors"
    )


def test_a_folder_with_its_files_configs_and_family(model):
    found = locate(ModelOptions(model=str(model)))
    assert found.family.name == "qwen-image"
    assert set(found.parts) == ALL
    assert found.part("vae").files == (model / "vae" / "diffusion_pytorch_model.safetensors",)
    assert [p.name for p in found.files("transformer")] == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert [p.name for p in found.files("tokenizer")] == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert found.config("scheduler")["shift_terminal"] == 0.02
    names = found.names()
    assert names["vae.z_dim"] == 16
    assert names["text_encoder.text_config.hidden_size"] == 64  # of this model, not the family's 3584
    found.check(ALL)


def test_files_leave_out_what_loading_does_not_read(model):
    transformer = model / "transformer"
    for name in ("README.md", ".hidden", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.safetensors"):
        shutil.copy(transformer / "diffusion_pytorch_model.safetensors", transformer / name)
    found = locate(ModelOptions(model=str(model)))
    assert [p.name for p in found.files("transformer")] == ["config.json", "diffusion_pytorch_model.safetensors"]
    assert found.part("transformer").variant is None


def test_the_last_of_model_and_model_path_gives_the_weights(model, tmp_path):
    other = tiny.qwen_image(tmp_path / "other")
    found = locate(ModelOptions(model="qwen-image", model_path=str(model)))
    assert found.part("vae").folder == model / "vae"
    found = locate(ModelOptions(model=str(other), model_path=str(model)))
    assert found.part("vae").folder == model / "vae"
    found = locate(ModelOptions(model_path=str(other)))
    assert (found.family.name, found.part("vae").folder) == ("qwen-image", other / "vae")


def test_a_repo_and_a_family_lie_in_models(model):
    shutil.copytree(model, "models/Qwen/Qwen-Image")
    assert locate(ModelOptions(model="qwen-image")).part("vae").folder == Path("models/Qwen/Qwen-Image/vae")
    found = locate(ModelOptions(model="Qwen/Qwen-Image"), fetch=sorted(ALL))  # all there: nothing is fetched
    assert set(found.parts) == ALL


def test_a_family_without_a_model_index_is_read_from_the_classes(model):
    (model / "model_index.json").unlink()
    shutil.rmtree(model / "text_encoder")
    found = locate(ModelOptions(model=str(model)))
    assert found.family.name == "qwen-image"
    assert not found.has("text_encoder")


def test_no_model_is_named():
    with pytest.raises(UsageError, match="no model is named; give --model"):
        locate(ModelOptions())


def test_a_path_that_does_not_exist_names_the_nearest(model, tmp_path):
    (tmp_path / "qwen-tiny").mkdir()
    message = refusal(model=str(tmp_path / "qwen-tinny" / "m"))
    assert message == (
        f"'{tmp_path}/qwen-tinny/m' not found: there is no 'qwen-tinny' in '{tmp_path}' (nearest: qwen-tiny)"
    )
    assert "there is no 'm:2' in" in refusal(model=str(model.parent / "m:2"))
    assert "(nearest: m:1)" in refusal(model=str(model.parent / "m:2"))
    assert refusal(model="./nope").startswith("'nope' not found: there is no 'nope' in '.'")
    # 'a b' exists here, so this is no repo id
    Path("runs").mkdir()
    assert refusal(model="runs/nope").startswith("'runs/nope' not found: there is no 'nope' in 'runs'")


def test_a_name_that_is_nothing():
    message = refusal(model="qwen-imgae")
    assert message.startswith("'qwen-imgae' is no model family (nearest: qwen-image), no repo id (ORG/NAME), and no")


def test_a_repo_that_is_not_here_says_how_to_get_it():
    assert refusal(model="Qwen/Qwen-Image") == (
        "the weights of 'Qwen/Qwen-Image' are not in 'models/Qwen/Qwen-Image'; "
        "fetch it: `dsplit prepare --model Qwen/Qwen-Image`, or give a folder with --model-path"
    )
    assert "`dsplit prepare --model qwen-image`" in refusal(model="qwen-image")


def test_offline_is_obeyed(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        locate(ModelOptions(model="qwen-image"), fetch=["vae"])


def test_a_folder_without_model_files(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "model_index.jsn").write_text("{}")
    message = refusal(model="pictures")
    assert message == "no model files in 'pictures': looked for model_index.json (nearest: model_index.jsn)"
    message = refusal(model="qwen-image", model_path="pictures")
    assert message.startswith("no model files in 'pictures': looked for transformer/, vae/, text_encoder/")


def test_a_part_of_a_model_and_a_file_are_no_model(model):
    assert f"is a part of a model; name the model's folder, its parent '{model}'" in refusal(model=str(model / "vae"))
    assert "is a file; name the model's folder" in refusal(model=str(model / "model_index.json"))


def test_a_pipeline_that_no_family_has(model):
    index = model / "model_index.json"
    index.write_text(json.dumps({"_class_name": "OtherPipeline"}))
    message = refusal(model=str(model))
    assert "(OtherPipeline) is of no registered family (qwen-image" in message
    assert f"--model FAMILY --model-path '{model}'" in message
    assert set(locate(ModelOptions(model="qwen-image", model_path=str(model))).parts) == ALL


def test_two_families_of_one_pipeline_must_be_told_apart(model, monkeypatch):
    family = registry().families["qwen-image"]
    both = Registry({"qwen-image": family, "qwen-twin": replace(family, name="qwen-twin")}, registry().tasks, ())
    monkeypatch.setattr(places, "registry", lambda: both)
    assert "fits several families (qwen-image, qwen-twin); name the family" in refusal(model=str(model))


def test_a_component_of_another_class(model):
    config = model / "vae" / "config.json"
    config.write_text(config.read_text().replace("AutoencoderKLQwenImage", "AutoencoderKLWan"))
    message = refusal(model="qwen-image", model_path=str(model))
    assert "is a AutoencoderKLWan, but qwen-image needs a AutoencoderKLQwenImage" in message


def test_a_broken_config_names_the_file(model):
    (model / "vae" / "config.json").write_text("{")
    assert f"{model}/vae/config.json: not readable as JSON" in refusal(model=str(model))


# -- REPO_OR_FOLDER:COMPONENT/PATTERN -----------------------------------------------------------------------------


def test_the_reference_lists(model):
    found = locate(
        ModelOptions(
            model="qwen-image",
            model_id_with_origin_paths=reference(model),
            offload_models=f"{model}:transformer/diffusion_pytorch_model*.safetensors",
        )
    )
    assert set(found.parts) == ALL  # tokenizer and scheduler come from the same folder
    assert found.part("tokenizer").folder == model / "tokenizer"
    assert found.part("transformer").files == (model / "transformer" / "diffusion_pytorch_model.safetensors",)
    assert {c for c in ALL if found.has(c)} == ALL - {"transformer"}


def test_a_list_alone_gives_the_family_and_repos_lie_in_models(model):
    shutil.copytree(model, "models/Qwen/Qwen-Image")
    found = locate(ModelOptions(model_id_with_origin_paths=reference("Qwen/Qwen-Image")))
    assert found.family.name == "qwen-image"
    assert found.part("vae").folder == Path("models/Qwen/Qwen-Image/vae")
    assert found.name == "Qwen/Qwen-Image"


def test_dit_means_transformer(model):
    found = locate(ModelOptions(model_id_with_origin_paths=f"{model}:dit/*.safetensors", offload_models="dit"))
    assert found.part("transformer").folder == model / "transformer"
    assert found.offloaded == {"transformer"}


def test_only_what_is_listed_has_weights(model):
    found = locate(ModelOptions(model="qwen-image", model_id_with_origin_paths=f"{model}:vae/*.safetensors"))
    assert set(found.parts) == {"vae", "tokenizer", "scheduler"}


def test_a_pattern_that_matches_nothing_names_what_is_there(model):
    message = refusal(model="qwen-image", model_id_with_origin_paths=f"{model}:transformer/*.safetensorz")
    assert message == (
        f"'{model}:transformer/*.safetensorz' matches no file in '{model}/transformer' "
        "(it holds: config.json, diffusion_pytorch_model.safetensors)"
    )


def test_an_unknown_component_of_a_pattern(model):
    with pytest.raises(UsageError, match=r"qwen-image has no component 'transfomer' \(it has transformer"):
        locate(ModelOptions(model="qwen-image", model_id_with_origin_paths=f"{model}:transfomer/*"))
    with pytest.raises(UsageError, match="'x:unet/y' names no component of qwen-image"):
        locate(ModelOptions(model=str(model), offload_models="x:unet/y"))


def test_an_entry_that_is_neither_folder_nor_repo(model, tmp_path):
    message = refusal(model="qwen-image", model_id_with_origin_paths=f"{tmp_path}/nope:vae/*")
    assert message.startswith(f"'{tmp_path}/nope' not found: there is no 'nope' in '{tmp_path}'")
    assert message.endswith("it is no repo id (ORG/NAME) either")
    assert "'vae' is not REPO_OR_FOLDER:COMPONENT/PATTERN" in refusal(model_id_with_origin_paths="vae")


def test_a_component_may_be_absent_where_it_is_not_needed(model):
    shutil.rmtree(model / "text_encoder")
    found = locate(ModelOptions(model="qwen-image", model_id_with_origin_paths=reference(model)))
    assert not found.has("text_encoder")
    found.require(["transformer"], {"transformer": "denoise"})
    with pytest.raises(UsageError) as caught:
        found.require(["vae", "text_encoder"], {"text_encoder": "encode_prompt", "vae": "encode_image"})
    assert caught.value.exit_code == 2
    assert "the unit 'encode_prompt' needs the component 'text_encoder'" in str(caught.value)
    assert f"looked in {model}" in str(caught.value)


def test_an_offloaded_component_that_is_needed(model):
    found = locate(ModelOptions(model=str(model), offload_models=reference(model)))
    with pytest.raises(UsageError) as caught:
        found.require(["vae", "text_encoder"], {"text_encoder": "encode_prompt", "vae": "encode_image"})
    assert str(caught.value).splitlines() == [
        f"the unit '{unit}' needs the component '{name}', but --offload-models lists it; "
        "take it off that list for this stage"
        for name, unit in (("vae", "encode_image"), ("text_encoder", "encode_prompt"))
    ]


def test_a_component_from_two_places(model, tmp_path):
    other = tiny.qwen_image(tmp_path / "other")
    with pytest.raises(UsageError, match="'vae' is listed twice"):
        locate(ModelOptions(model_id_with_origin_paths=f"{model}:vae/*.safetensors,{other}:vae/*.safetensors"))


# -- --model-paths -------------------------------------------------------------------------------------------------


def test_model_paths_find_components_by_their_folder(model):
    files = [
        str(model / "vae" / "diffusion_pytorch_model.safetensors"),
        [str(model / "transformer" / "diffusion_pytorch_model.safetensors")],
    ]
    found = locate(ModelOptions(model="qwen-image", model_paths=json.dumps(files)))
    assert set(found.parts) == {"vae", "transformer", "tokenizer", "scheduler"}
    assert found.part("vae").files == (Path(files[0]),)


def test_model_paths_choose_a_variant(model):
    folder = model / "vae"
    shutil.copy(folder / "diffusion_pytorch_model.safetensors", folder / "diffusion_pytorch_model.fp16.safetensors")
    paths = json.dumps([str(folder / "diffusion_pytorch_model.fp16.safetensors")])
    part = locate(ModelOptions(model="qwen-image", model_paths=paths)).part("vae")
    assert (part.variant, [p.name for p in part.files]) == ("fp16", ["diffusion_pytorch_model.fp16.safetensors"])


@pytest.mark.parametrize("text", ["x.safetensors", "[]", "[1]", "{}"])
def test_model_paths_must_be_a_list_of_files(text):
    with pytest.raises(UsageError, match="--model-paths"):
        locate(ModelOptions(model="qwen-image", model_paths=text))


def test_model_paths_that_do_not_exist_are_all_named(model):
    files = [str(model / "vae" / "diffusion_pytorch_model.safetensor"), str(model / "nope" / "x.safetensors")]
    message = refusal(model="qwen-image", model_paths=json.dumps(files))
    assert "there is no 'diffusion_pytorch_model.safetensor' in" in message
    assert "(nearest: diffusion_pytorch_model.safetensors)" in message
    assert "there is no 'nope' in" in message


def test_model_paths_never_take_a_pickle(model):
    pickle = model / "vae" / "diffusion_pytorch_model.bin"
    pickle.write_bytes(b"\x80\x04.")
    message = refusal(model="qwen-image", model_paths=json.dumps([str(pickle)]))
    assert "no safetensors among the listed files (diffusion_pytorch_model.bin)" in message


# -- check -------------------------------------------------------------------------------------------------------


def test_check_names_the_faults_of_the_needed_components_only(model):
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    whole = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: whole // 2])
    (model / "text_encoder" / "model.safetensors").write_bytes(b"")
    found = locate(ModelOptions(model=str(model)))
    found.check(["vae", "tokenizer"])
    with pytest.raises(ModelError) as caught:
        found.check(["vae", "transformer", "text_encoder"])
    assert f"{weights}: truncated: {whole // 2} of {whole} bytes" in str(caught.value)
    assert "model.safetensors: empty file (0 bytes)" in str(caught.value)
    assert caught.value.exit_code == 1


def test_check_refuses_pickles_only_odd_names_and_no_config(model):
    vae, transformer = model / "vae", model / "transformer"
    weights = vae / "diffusion_pytorch_model.safetensors"
    weights.rename(vae / "diffusion_pytorch_model.bin")
    (transformer / "diffusion_pytorch_model.safetensors").rename(transformer / "mine.safetensors")
    (model / "text_encoder" / "config.json").unlink()
    found = locate(ModelOptions(model=str(model)))
    with pytest.raises(ModelError) as caught:
        found.check(ALL)
    assert "weights exist only as a pickle (diffusion_pytorch_model.bin), which dsplit never loads" in str(caught.value)
    assert "from_pretrained finds no 'mine.safetensors'; rename it" in str(caught.value)
    assert f"{model}/text_encoder: config.json missing" in str(caught.value)


def test_check_names_a_missing_shard(model):
    folder = model / "transformer"
    (folder / "diffusion_pytorch_model.safetensors").rename(
        folder / "diffusion_pytorch_model-00001-of-00002.safetensors"
    )
    names = {"a": "diffusion_pytorch_model-00001-of-00002.safetensors"}
    names["b"] = "diffusion_pytorch_model-00002-of-00002.safetensors"
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = locate(ModelOptions(model=str(model)))
    assert [p.name for p in found.files("transformer")][1:] == [
        "diffusion_pytorch_model-00001-of-00002.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
    ]
    with pytest.raises(ModelError, match=r"shard diffusion_pytorch_model-00002-of-00002\.safetensors missing"):
        found.check(["transformer"])
