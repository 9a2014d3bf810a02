"""Finding a model: what --model and its companions mean, and what is said when nothing is found."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dsplit.errors import ModelError, UsageError
from dsplit.models import places
from dsplit.models.locate import find_family, locate
from dsplit.models.registry import Registry, registry
from dsplit.recipe import ModelOptions
from tests import tiny
from tests.models.conftest import ALL, refusal

pytestmark = pytest.mark.usefixtures("elsewhere")


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
    for first in (str(other), "/nope", "nope", "nope/nope"):
        options = ModelOptions(model=first, model_path=str(model))
        assert locate(options).part("vae").folder == model / "vae"
        assert find_family(options).name == "qwen-image"
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
