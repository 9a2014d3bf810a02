"""The Qwen-Image units equal diffusers' own pipeline, and are shaped as they declare."""

import inspect
from types import SimpleNamespace

import dsplit_qwen_image as plugin
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import QwenImageEditPipeline

from dsplit import shapes
from dsplit.models import one_frame
from tests import tiny

CAPTIONS = ["a large red circle on a blue background", "a small star", ""]
CONFIG = {"vae.z_dim": 16, "text_encoder.text_config.hidden_size": 64}


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    torch.set_num_threads(1)
    pipeline = QwenImagePipeline.from_pretrained(tiny.QWEN_IMAGE, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def embeds_of(pipeline, prompts):
    components = {"text_encoder": pipeline.text_encoder, "tokenizer": pipeline.tokenizer}
    with torch.no_grad():
        return plugin.encode_prompt({"prompt": prompts}, components)


@pytest.mark.parametrize("prompts", [[c] for c in CAPTIONS] + [CAPTIONS])
def test_prompt_embeds_equal_the_pipelines_exactly(pipeline, prompts):
    values = embeds_of(pipeline, prompts)
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(prompts, max_sequence_length=512)
    assert torch.equal(values["prompt_embeds"], embeds)
    assert values["prompt_mask"].dtype == torch.bool
    if mask is None:
        assert values["prompt_mask"].all()
    else:
        assert torch.equal(values["prompt_mask"], mask.bool())


def test_a_caption_is_cut_at_512_tokens_as_the_pipeline_cuts_it(pipeline):
    prompt = "red circle " * 600
    values = embeds_of(pipeline, [prompt])
    with torch.no_grad():
        embeds, _ = pipeline.encode_prompt([prompt], max_sequence_length=512)
    assert values["prompt_embeds"].shape == (1, 512, 64)
    assert torch.equal(values["prompt_embeds"], embeds)
    assert plugin.count_tokens(prompt, {"tokenizer": pipeline.tokenizer}) > 512


@pytest.mark.parametrize("prompt", CAPTIONS)
def test_token_count_is_the_length_of_the_embeds(pipeline, prompt):
    count = plugin.count_tokens(prompt, {"tokenizer": pipeline.tokenizer})
    assert embeds_of(pipeline, [prompt])["prompt_embeds"].shape[1] == count


def test_the_file_that_holds_the_template_enters_the_key(pipeline):
    (source,) = plugin.encode_prompt.sources
    assert inspect.getsourcefile(type(pipeline)).endswith(source)
    assert pipeline.prompt_template_encode.split("\n")[0] in inspect.getsource(type(pipeline)).replace("\\n", "\n")


def test_sigma_stays_fp32_in_a_bf16_transformer():
    from diffusers import QwenImageTransformer2DModel

    folder = tiny.QWEN_IMAGE / "transformer"
    transformer = QwenImageTransformer2DModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    seen = []
    project = transformer.time_text_embed.time_proj
    project.register_forward_hook(lambda module, arguments, result: seen.append((arguments[0], result)))
    values = {
        "noisy_latents": torch.randn(2, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
        "sigma": torch.tensor([0.5001, 0.5012]),  # one number in bf16
        "prompt_embeds": torch.zeros(2, 3, 64, dtype=torch.bfloat16),
        "prompt_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    values["noisy_latents"][1] = values["noisy_latents"][0]
    with torch.no_grad():
        velocity = plugin.denoise(values, {"transformer": transformer})["velocity"]
    ((sigma, embedded),) = seen
    assert torch.equal(sigma, values["sigma"])
    assert torch.equal(embedded, project(values["sigma"]))
    assert not torch.equal(velocity[0], velocity[1])
    with torch.no_grad():  # the hook is gone: the model rounds again
        transformer.time_text_embed(values["sigma"].bfloat16(), values["prompt_embeds"])
    assert seen[-1][0].dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (32, 112)])
def test_latents_equal_the_edit_pipelines_encoding(pipeline, size):
    pixels = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        reference = SimpleNamespace(vae=pipeline.vae, latent_channels=16)
        expected = QwenImageEditPipeline._encode_vae_image(reference, pixels.unsqueeze(2), torch.Generator())
        fast = one_frame(AutoencoderKLQwenImage.from_pretrained(tiny.QWEN_IMAGE / "vae", dtype=torch.float32).eval())
        latents = plugin.encode_image({"pixels": pixels}, {"vae": fast})["latents"]
    assert latents.shape == (2, 16, 1, size[0] // 8, size[1] // 8)
    assert (latents - expected).abs().max() < 1e-5
    assert expected.abs().max() > 0.5


def test_the_one_frame_path_replaces_every_convolution_and_clips_stay_equal(pipeline):
    vae = AutoencoderKLQwenImage.from_pretrained(tiny.QWEN_IMAGE / "vae", dtype=torch.float32).eval()
    clip = torch.rand(1, 3, 5, 32, 32, generator=torch.Generator().manual_seed(2)) * 2 - 1
    with torch.no_grad():
        expected_clip = vae.encode(clip).latent_dist.mode()
        expected_frame = vae.encode(clip[:, :, :1]).latent_dist.mode()
        one_frame(vae)
        assert (
            vae.encode(clip).latent_dist.mode() - expected_clip
        ).abs().max() < 1e-5  # its first frame is one frame too
        frame = vae.encode(clip[:, :, :1]).latent_dist.mode()
    assert (frame - expected_frame).abs().max() < 1e-5
    causal = [m for m in vae.encoder.modules() if type(m).__name__ == "QwenImageCausalConv3d" and m.stride[0] == 1]
    assert len(causal) > 10
    assert all("forward" in vars(m) for m in causal)


@pytest.mark.parametrize("height", [64, 96])
@pytest.mark.parametrize("prompts", [CAPTIONS[:1], CAPTIONS])
def test_velocity_equals_the_pipelines_transformer_call(pipeline, monkeypatch, height, prompts):
    calls = []
    forward = pipeline.transformer.forward

    def record(*args, **kwargs):
        calls.append((kwargs, forward(*args, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(pipeline.transformer, "forward", record)
    generator = torch.Generator().manual_seed(0)
    pipeline(
        prompt=prompts, height=height, width=64, num_inference_steps=2, true_cfg_scale=1.0, generator=generator
    )  # fmt: skip
    monkeypatch.undo()
    assert len(calls) == 2
    values = embeds_of(pipeline, prompts)
    for call, (expected,) in calls:
        noisy = QwenImagePipeline._unpack_latents(call["hidden_states"], height // 8, 8, 1)
        given = {"noisy_latents": noisy, "sigma": call["timestep"], **values}
        with torch.no_grad():
            velocity = plugin.denoise(given, {"transformer": pipeline.transformer})["velocity"]
        packed = QwenImagePipeline._pack_latents(velocity, len(prompts), 16, height // 8, 8)
        assert torch.equal(packed, expected)


def test_guidance_equals_the_pipelines(pipeline, monkeypatch):
    """Two steps with true CFG: the pipeline's latents, made again from our units, guide and step."""
    seen = []
    kwargs = {"num_inference_steps": 2, "true_cfg_scale": 3.0, "height": 64, "width": 96, "output_type": "latent"}
    result = pipeline(
        prompt=CAPTIONS[0],
        negative_prompt="blurry",
        generator=torch.Generator().manual_seed(7),
        callback_on_step_end=lambda p, i, t, k: seen.append(k["latents"]) or {},
        **kwargs,
    ).images
    process = plugin.QWEN_IMAGE.noise.build(dict(pipeline.scheduler.config))
    noise = torch.randn(1, 1, 16, 8, 12, generator=torch.Generator().manual_seed(7)).transpose(1, 2)
    sigmas, sample = process.schedule(noise, 2), noise
    positive, negative = embeds_of(pipeline, CAPTIONS[:1]), embeds_of(pipeline, ["blurry"])
    for k in range(2):
        given = {"noisy_latents": sample, "sigma": sigmas[k].expand(1)}
        with torch.no_grad():
            velocities = [
                plugin.denoise({**given, **text}, {"transformer": pipeline.transformer})["velocity"]
                for text in (positive, negative)
            ]
        sample = process.step(sample, plugin.guide(*velocities, 3.0), sigmas[k], sigmas[k + 1])
    packed = QwenImagePipeline._pack_latents(sample, 1, 16, 8, 12)
    assert (packed - result).abs().max() < 1e-5
    assert len(seen) == 2


@pytest.mark.parametrize("prompt", CAPTIONS)
def test_declared_shapes_are_those_of_real_values(pipeline, prompt):
    values = embeds_of(pipeline, [prompt])
    pixels = torch.zeros(1, 3, 64, 96)
    with torch.no_grad():
        values |= plugin.encode_image({"pixels": pixels}, {"vae": pipeline.vae})
    names = {**CONFIG, "H": 64, "W": 96, "F": 1, "L": values["prompt_embeds"].shape[1]}
    for unit in (plugin.encode_image, plugin.encode_prompt):
        assert set(unit.shapes) == set(unit.outputs)
        for output in unit.outputs:
            assert shapes.evaluate(unit.shapes[output], names) == tuple(values[output].shape[1:])
