"""Loading a component: the real class, frozen, in the asked dtype; and nothing half-loaded."""

import diffusers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dsplit.errors import ModelError, UsageError
from dsplit.models.load import load_component, pick_device, pick_dtype, set_threads
from dsplit.models.locate import locate
from dsplit.recipe import ModelOptions
from tests import tiny

CPU = torch.device("cpu")
CLASSES = {
    "transformer": diffusers.QwenImageTransformer2DModel,
    "vae": diffusers.AutoencoderKLQwenImage,
    "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration,
    "tokenizer": transformers.Qwen2Tokenizer,
    "scheduler": diffusers.FlowMatchEulerDiscreteScheduler,
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_component_is_its_real_class_frozen_and_in_the_dtype(name):
    model = locate(ModelOptions(model=str(tiny.QWEN_IMAGE)))
    loaded = load_component(model, name, torch.float32, CPU)
    assert type(loaded) is CLASSES[name]
    if model.family.component(name).weights:
        assert {p.dtype for p in loaded.parameters()} == {torch.float32}
        assert not any(p.requires_grad for p in loaded.parameters())
        assert not loaded.training


def test_the_weights_are_those_of_the_file():
    model = locate(ModelOptions(model=str(tiny.QWEN_IMAGE)))
    stored = load_file(model.part("transformer").files[0])
    loaded = load_component(model, "transformer", torch.bfloat16, CPU).state_dict()
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[k], loaded[k]) for k in stored)


def test_a_variant_is_loaded_where_it_is_the_only_one(tmp_path):
    model = tiny.qwen_image(tmp_path / "m")
    for name in ("transformer/diffusion_pytorch_model", "text_encoder/model"):
        (model / f"{name}.safetensors").rename(model / f"{name}.fp16.safetensors")
    found = locate(ModelOptions(model=str(model)))
    assert found.part("transformer").variant == "fp16"
    for name in ("transformer", "text_encoder"):
        assert type(load_component(found, name, torch.float32, CPU)) is CLASSES[name]


def test_missing_tensors_are_refused_not_drawn_at_random(tmp_path):
    model = tiny.qwen_image(tmp_path / "m")
    path = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    del tensors["img_in.weight"], tensors["proj_out.bias"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 2 tensors of QwenImageTransformer2DModel, e\.g\. 'img_in\.weight'"):
        load_component(locate(ModelOptions(model=str(model))), "transformer", torch.float32, CPU)


def test_a_damaged_file_is_said_in_words(tmp_path):
    model = tiny.qwen_image(tmp_path / "m")
    path = model / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"diffusion_pytorch_model\.safetensors: truncated: \d+ of \d+ bytes"):
        load_component(locate(ModelOptions(model=str(model))), "vae", torch.float32, CPU)


def test_a_pickle_is_never_loaded(tmp_path):
    model = tiny.qwen_image(tmp_path / "m")
    path = model / "vae" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()
    with pytest.raises(ModelError, match="only as a pickle"):
        load_component(locate(ModelOptions(model=str(model))), "vae", torch.float32, CPU)


def test_picking_device_and_dtype():
    cuda = torch.device("cuda")
    assert pick_device("cpu") == CPU
    assert pick_dtype(None, CPU) is torch.float32
    assert pick_dtype(None, cuda) is torch.bfloat16
    assert pick_dtype("bf16", CPU) is torch.bfloat16
    assert pick_dtype("float16", CPU) is torch.float16
    with pytest.raises(UsageError, match="unknown dtype 'float8'; use float32, bfloat16 or float16"):
        pick_dtype("float8", CPU)
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        pick_device("gpu")
    with pytest.raises(UsageError, match="device 'cuda:99' is not here: torch sees"):
        pick_device("cuda:99")


def test_threads():
    before = torch.get_num_threads()
    try:
        set_threads(1)
        assert torch.get_num_threads() == 1
        set_threads(None)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(UsageError, match="--threads 0: at least 1 is needed"):
        set_threads(0)
