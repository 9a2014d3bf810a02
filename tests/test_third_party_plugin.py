"""A stranger's plugin, installed as pip does it, next to a dsplit that has never heard of it: AuraFlow, in one file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open

from tests import tiny
from tests.environments import new_environment, run

PLUGIN = Path(__file__).parent / "third_party_plugin"
PROMPTS = ("a red circle", "a large blue square on a green ground", "a red circle")


def aura_flow():
    """The pipeline with tiny weights and a tokenizer of single characters."""
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, AutoencoderKL, FlowMatchEulerDiscreteScheduler
    from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = T5Tokenizer(vocab=[(piece, -float(rank)) for rank, piece in enumerate(pieces)], extra_ids=0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    text_encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(pieces), relative_attention_num_buckets=8, **sizes))
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=4,
        scaling_factor=0.13025,
    )
    transformer = AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=256,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.73)
    return AuraFlowPipeline(tokenizer, text_encoder.eval(), vae.eval(), transformer.eval(), scheduler)


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dsplit_aura_flow", PLUGIN / "dsplit_aura_flow.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_its_units_equal_the_pipeline(plugin: ModuleType) -> None:
    pipeline = aura_flow()
    parts = pipeline.components
    embeds = plugin.encode_prompt({"prompt": list(PROMPTS)}, parts)["prompt_embeds"]
    theirs, *_ = pipeline.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False, device="cpu")
    assert embeds.shape == (3, len(PROMPTS[1]) + 2, 32)  # a leading space and </s>
    assert torch.equal(embeds, theirs[:, : embeds.shape[1]])
    assert not theirs[:, embeds.shape[1] :].any()

    latents, sigma = torch.randn(3, 4, 8, 8), torch.tensor([0.1, 0.5, 0.9])
    values = {"noisy_latents": latents, "sigma": sigma, "prompt_embeds": embeds}
    velocity = plugin.denoise(values, parts)["velocity"]
    expected = pipeline.transformer(latents, encoder_hidden_states=theirs, timestep=sigma, return_dict=False)[0]
    assert torch.equal(velocity, expected)

    pixels = torch.rand(1, 3, 64, 64) * 2 - 1
    encoded = plugin.encode_image({"pixels": pixels}, parts)["latents"]
    posterior = pipeline.vae.encode(pixels).latent_dist
    assert torch.equal(encoded, posterior.mean * 0.13025)
    values = plugin.encode_posterior({"pixels": pixels}, parts)
    assert torch.equal(values["latents_mean"], encoded)
    assert torch.allclose((values["latents_logvar"] / 2).exp(), posterior.std * 0.13025)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_environment(tmp_path_factory.mktemp("stranger") / "venv", PLUGIN)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger") / "model"
    aura_flow().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_tasks_lists_it(python: Path) -> None:
    listed = json.loads(run([str(python), "-m", "dsplit", "tasks", "--json"]))
    assert listed["broken"] == []
    families = {family["name"]: family for family in listed["families"]}
    assert {"aura-flow", "qwen-image"} <= set(families)
    sft = families["aura-flow"]["tasks"]["sft"]
    assert sft["verified"] is True
    assert sft["stage1"] == ["load_image", "encode_image", "encode_prompt"]
    assert sft["stage2"] == ["denoise"]
    assert [(value["name"], value["dtype"]) for value in sft["boundary"]] == [
        ("latents", "bfloat16"),
        ("prompt_embeds", "bfloat16"),
    ]
    assert set(sft["components"]["stage1"]) == {"vae", "text_encoder", "tokenizer"}
    assert sft["components"]["stage2"] == ["transformer"]
    assert set(sft["offload"]["stage2"]) == {"vae", "text_encoder"}
    assert "direct_distill" not in families["aura-flow"]["tasks"]


@pytest.mark.slow
def test_it_caches_and_trains_and_split_equals_unsplit(python: Path, model: Path, tmp_path: Path) -> None:
    tiny.dataset(tmp_path / "data", prompts=PROMPTS)
    dsplit = [str(python), "-m", "dsplit"]
    which = ["--model", str(model), "--threads", "1"]
    data = ["--data", "data", "--resolution", "64x64"]
    cached = json.loads(run([*dsplit, "cache", *which, *data, "--out", "cache", "--json"], tmp_path))
    assert cached["rows"] == 3
    captions = {*PROMPTS, ""}  # equal ones are encoded once, and the empty one always
    assert cached["encoded"] == {"encode_image": 3, "encode_prompt": len(captions)}

    steps = ["--max-steps", "4", "--rank", "4", "--lr", "1e-3", "--batch-size", "2", "--json"]
    split = json.loads(run([*dsplit, "train", *which, "--from-cache", "cache", "--out", "split", *steps], tmp_path))
    run([*dsplit, "train", *which, *data, "--out", "whole", *steps], tmp_path)
    assert (split["steps"], split["rows"]) == (4, 3)
    assert losses(tmp_path / "split") == losses(tmp_path / "whole")
    assert len(set(losses(tmp_path / "split"))) == 4

    assert [Path(file).name for file in split["checkpoints"]] == ["epoch-0.safetensors", "epoch-1.safetensors"]
    with safe_open(tmp_path / "split" / "epoch-1.safetensors", "pt") as lora:
        keys = set(lora.keys())
        trained = lora.get_tensor("transformer.joint_transformer_blocks.0.attn.to_q.lora_B.weight")
    assert len(keys) == 2 * (8 + 4)  # A and B of eight projections in the joint block and four in the single one
    assert {key.partition(".")[0] for key in keys} == {"transformer"}
    assert trained.dtype == torch.float32
    assert trained.abs().max() > 0
    assert_it_changes_what_the_pipeline_draws(tmp_path / "split" / "epoch-1.safetensors")


def assert_it_changes_what_the_pipeline_draws(lora: Path) -> None:
    from peft.tuners.lora import LoraLayer

    pipeline = aura_flow()
    pipeline.set_progress_bar_config(disable=True)
    small = {"height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "pt"}
    before = pipeline("a red circle", generator=torch.manual_seed(0), **small).images
    pipeline.load_lora_weights(lora.parent, weight_name=lora.name)
    after = pipeline("a red circle", generator=torch.manual_seed(0), **small).images
    assert sum(isinstance(module, LoraLayer) for module in pipeline.transformer.modules()) == 8 + 4
    assert not torch.equal(before, after)


def losses(run_folder: Path) -> list[float]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
