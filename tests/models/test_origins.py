"""The reference's lists: REPO_OR_FOLDER:COMPONENT/PATTERN, JSON lists of files, components to offload."""

import json
import shutil
from pathlib import Path

import pytest

from dsplit.errors import UsageError
from dsplit.models.locate import locate
from dsplit.recipe import ModelOptions
from tests import tiny
from tests.models.conftest import ALL, refusal

pytestmark = pytest.mark.usefixtures("elsewhere")


def reference(root: Path | str) -> str:
    """The list of the reference's commands, with `root` for its repo."""
    return (
        f"{root}:text_encoder/model*.safetensors,{root}:vae/diffusion_pytorch_model.safetensors,"
        f"{root}:transformer/diffusion_pytorch_model*.safetensors"
    )


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


def test_a_component_that_is_here_but_not_in_the_list(model):
    vae = f"{model}:vae/*.safetensors"
    for options in (
        {"model_id_with_origin_paths": vae},
        {"model_paths": json.dumps([str(model / "vae" / "diffusion_pytorch_model.safetensors")])},
    ):
        found = locate(ModelOptions(model="qwen-image", **options))
        with pytest.raises(UsageError) as caught:
            found.require(["vae", "text_encoder"], {"text_encoder": "encode_prompt", "vae": "encode_image"})
        assert str(caught.value) == (
            "the unit 'encode_prompt' needs the component 'text_encoder', but the list does not name it; "
            f"add '{model}:text_encoder/*.safetensors' to it"
        )


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
