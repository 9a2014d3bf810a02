"""LoRA: targets, seeded fp32 weights, and files in three formats proven with their real readers."""

import json

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load, load_file, save_file

from dsplit.errors import TrainingError, UsageError
from dsplit.models.load import load_component
from dsplit.models.locate import locate
from dsplit.training import lora_files
from dsplit.training.batches import Step
from dsplit.training.checkpoints import RunFolder
from dsplit.training.lora import adapters, entries, inject, skeleton, state
from dsplit.training.saving import LoraFiles
from tests import tiny
from tests.training.conftest import model

TARGETS = "to_q,to_out.0,img_mlp.net.2"


@pytest.fixture(scope="module")
def found():
    return locate(model())


@pytest.fixture
def transformer(found):
    return load_component(found, "transformer", torch.float32, "cpu")


def adapted(transformer, rank=4, alpha=2.0, seed=0, targets=TARGETS):
    """The transformer with a LoRA whose B is not zero."""
    components = {"transformer": transformer}
    weights = inject(components, adapters(components, targets, (), ("transformer",)), rank, alpha, seed)
    generator = torch.Generator().manual_seed(1)
    for weight in weights:
        if weight.abs().max() == 0:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    return components


def test_initialisation_depends_on_the_seed_alone(found):
    def fresh(seed):
        components = {"transformer": load_component(found, "transformer", torch.float32, "cpu")}
        return inject(components, adapters(components, TARGETS, (), ("transformer",)), 4, 4.0, seed)

    torch.manual_seed(1)
    first = fresh(5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert all(torch.equal(a, b) for a, b in zip(first, fresh(5), strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert any(not torch.equal(a, b) for a, b in zip(first, fresh(6), strict=True))


def test_weights_are_fp32_on_a_bf16_base(found):
    components = {"transformer": load_component(found, "transformer", torch.bfloat16, "cpu")}
    weights = inject(components, adapters(components, TARGETS, (), ("transformer",)), 4, 4.0, 0)
    assert {w.dtype for w in weights} == {torch.float32}
    frozen = {p.dtype for p in components["transformer"].parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}


def test_a_skeleton_has_the_modules_of_the_model_and_no_weights(found, transformer):
    bare = skeleton(found, "transformer")
    assert [n for n, _ in bare.named_modules()] == [n for n, _ in transformer.named_modules()]
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    text = skeleton(found, "text_encoder")
    assert {p.device.type for p in text.parameters()} == {"meta"}
    with pytest.raises(UsageError, match="tokenizer: it has no weights to train"):
        skeleton(found, "tokenizer")


def test_entries_are_trimmed_and_counted_once():
    assert entries(" to_q, to_k ,,to_q", ()) == ("to_q", "to_k")
    assert entries(None, ("to_v",)) == ("to_v",)


@pytest.mark.parametrize("entry", ["q", "_q", "to_", "attn", "transformer_blocks.0"])
def test_an_entry_matches_whole_names_of_layers_only(found, entry):
    with pytest.raises(UsageError, match=f"nothing matches '{entry}'"):
        adapters({"transformer": skeleton(found, "transformer")}, f"to_q,{entry}", (), ("transformer",))


def test_a_component_without_default_targets_is_named(found):
    with pytest.raises(UsageError, match=r"--targets: there are no targets for vae by default; name some.*\n.* conv1"):
        adapters({"vae": skeleton(found, "vae")}, None, ("to_q", "to_k"), ("transformer",))
    plan = adapters({"vae": skeleton(found, "vae")}, "quant_conv", ("to_q",), ("transformer",))
    assert "quant_conv" in plan["vae"].modules


def test_a_text_encoder_has_targets_of_its_own(found):
    parts = {"transformer": skeleton(found, "transformer"), "text_encoder": skeleton(found, "text_encoder")}
    plan = adapters(parts, None, ("to_q", "to_k"), ("transformer",))
    assert plan["transformer"].targets == ("to_q", "to_k")
    assert set(plan["text_encoder"].targets) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(m.rpartition(".")[2] in plan["text_encoder"].targets for m in plan["text_encoder"].modules)
    plan = adapters(parts, "to_q,q_proj", ("to_q",), ("transformer",))
    assert (plan["transformer"].targets, plan["text_encoder"].targets) == (("to_q",), ("q_proj",))
    with pytest.raises(UsageError, match="no entry matches a module of text_encoder"):
        adapters(parts, "to_q", ("to_q",), ("transformer",))


@pytest.mark.parametrize("lora_format", lora_files.FORMATS)
@pytest.mark.parametrize("alpha", [2.0, 4.0])
def test_every_format_moves_the_pipelines_weights_by_scaled_b_times_a(transformer, tmp_path, lora_format, alpha):
    """Read by `QwenImagePipeline.load_lora_weights`: every module patched, alpha kept."""
    components = adapted(transformer, alpha=alpha)
    own, _ = state(components, ["transformer"], "diffusers")
    tensors, metadata = state(components, ["transformer"], lora_format)
    (tmp_path / "lora.safetensors").write_bytes(lora_files.serialised(tensors, metadata))
    plain = QwenImageTransformer2DModel.from_pretrained(tiny.QWEN_IMAGE / "transformer", dtype=torch.float32)
    pipeline = QwenImagePipeline(None, None, None, None, plain)
    before = {k: v.clone() for k, v in plain.state_dict().items()}
    pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    after = plain.state_dict()
    modules = {k.removeprefix("transformer.").split(".lora_")[0] for k in own}
    assert len(modules) == 12
    moved = {k.removesuffix(".weight") for k in before if not torch.equal(before[k], after[k])}
    assert moved == modules
    for m in modules:
        up, down = own[f"transformer.{m}.lora_B.weight"], own[f"transformer.{m}.lora_A.weight"]
        assert torch.allclose(after[f"{m}.weight"] - before[f"{m}.weight"], alpha / 4 * up @ down, atol=1e-6)


def test_diffusers_form_is_what_its_own_pipeline_writes(transformer, tmp_path):
    from diffusers.training_utils import _collate_lora_metadata
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    components = adapted(transformer)
    QwenImagePipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(components["transformer"]),
        **_collate_lora_metadata(components),
    )
    theirs = tmp_path / "pytorch_lora_weights.safetensors"
    tensors, metadata = state(components, ["transformer"], "diffusers")
    expected = load_file(theirs)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[k], expected[k]) for k in expected)
    with safe_open(theirs, "pt") as file:
        written = json.loads(file.metadata()["lora_adapter_metadata"])
    ours = json.loads(metadata["lora_adapter_metadata"])
    unordered = {k: sorted(v) if isinstance(v, list) else v for k, v in written.items()}
    assert ours == unordered


def test_case_l01_keys_of_each_format(transformer):
    components = adapted(transformer)
    by_format = {f: state(components, ["transformer"], f)[0] for f in lora_files.FORMATS}
    assert all(k.startswith("transformer.") for k in by_format["diffusers"])
    assert all(k.startswith("diffusion_model.") and ".default." not in k for k in by_format["comfyui"])
    assert all(k.startswith("transformer_blocks.") for k in by_format["diffsynth"])
    for name, tensors in by_format.items():
        down = [k for k in tensors if ".lora_A." in k]
        assert len(down) == 12
        assert all(k.replace(".lora_A.", ".lora_B.") in tensors for k in down)
        assert lora_files.detect(tensors) == name
        scalars = [v for k, v in tensors.items() if k.endswith(".alpha")]
        assert len(scalars) == (0 if name == "diffusers" else 12)
        assert all(v.ndim == 0 and v.item() == 2.0 and v.dtype == torch.float32 for v in scalars)


@pytest.mark.parametrize("first", lora_files.FORMATS)
@pytest.mark.parametrize("second", lora_files.FORMATS)
def test_case_l01_there_and_back_is_bit_identical(transformer, tmp_path, first, second):
    original = state(adapted(transformer), ["transformer"], first)
    there = lora_files.convert(*original, first, second)
    back = lora_files.convert(*there, second, first)
    assert lora_files.serialised(*back) == lora_files.serialised(*original)
    path = tmp_path / "lora.safetensors"
    path.write_bytes(lora_files.serialised(*there))
    assert lora_files.serialised(*lora_files.read(path)) == lora_files.serialised(
        *lora_files.convert(*original, first, "diffusers")
    )


def test_a_foreign_file_tells_ranks_and_alphas_by_its_tensors(tmp_path):
    tensors = {}
    for name, rank, alpha in (("blocks.0.a", 4, 8.0), ("blocks.1.a", 4, 8.0), ("blocks.1.b", 2, 1.0)):
        tensors[f"diffusion_model.{name}.lora_A.weight"] = torch.ones(rank, 6)
        tensors[f"diffusion_model.{name}.lora_B.weight"] = torch.ones(5, rank)
        tensors[f"diffusion_model.{name}.alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "x.safetensors")
    converted, metadata = lora_files.read(tmp_path / "x.safetensors")
    config = json.loads(metadata["lora_adapter_metadata"])
    assert config["transformer.r"] == 4
    assert config["transformer.lora_alpha"] == 8.0
    assert config["transformer.rank_pattern"] == {"blocks.1.b": 2}
    assert config["transformer.alpha_pattern"] == {"blocks.1.b": 1.0}
    assert lora_files.alphas(converted, metadata)["transformer.blocks.1.b"] == 1.0
    back, _ = lora_files.convert(converted, metadata, "diffusers", "comfyui")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[k], tensors[k]) for k in tensors)


def test_a_file_without_metadata_has_alpha_equal_to_rank():
    assert lora_files.alphas({"transformer.x.lora_A.weight": torch.ones(3, 2)}, {}) == {"transformer.x": 3.0}


def test_files_that_hold_no_lora_are_refused(tmp_path):
    save_file({"other.block.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(TrainingError, match=r"none of its 1 keys names lora_A, e.g. 'other.block.weight'"):
        lora_files.read(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(TrainingError, match="not readable as a safetensors file"):
        lora_files.read(tmp_path / "b.safetensors")


PAIR = {f"transformer.x.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
BAD_FILES = {
    "alpha": ({"diffusion_model.x.lora_A.weight": torch.ones(2, 2), "diffusion_model.x.alpha": torch.ones(3)}, None),
    "number": ({"transformer.x.lora_A.weight": torch.tensor(1.0)}, None),
    "text": (PAIR, "not json"),
    "deep": (PAIR, "[" * 100_000),
    "list": (PAIR, "[1]"),
    "field": (PAIR, '{"transformer.r": 2, "transformer.colour": 1}'),
    "no component": (PAIR, '{"r": 2}'),
    "rank": (PAIR, '{"transformer.r": "2"}'),
    "pattern": (PAIR, '{"transformer.alpha_pattern": {"x": [1]}}'),
    "patterns": (PAIR, '{"transformer.rank_pattern": [1]}'),
}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alpha", r"'diffusion_model.x.alpha' has the shape \(3,\), where an alpha is one number"),
        ("number", r"'transformer.x.lora_A.weight' has the shape \(\), where a matrix is expected"),
        ("text", r"none that peft knows \(Expecting value.*; save the LoRA again"),
        ("deep", r"none that peft knows \(nested too deeply\)"),
        ("list", r"none that peft knows \(a list, where an object is expected\)"),
        ("field", "none that peft knows .*'colour'"),
        ("no component", "none that peft knows"),
        ("rank", "none that peft knows"),
        ("pattern", r"none that peft knows .*lora_alpha: \[1\] is no number above 0"),
        ("patterns", "none that peft knows"),
    ],
)
def test_broken_alphas_and_settings_are_refused_in_words(tmp_path, name, said):
    tensors, text = BAD_FILES[name]
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"lora_adapter_metadata": text} if text else None)
    with pytest.raises(TrainingError, match=rf"x\.safetensors: .*{said}"):
        lora_files.read(path)


def test_only_diffusers_files_hold_other_components():
    lora_files.refuse_format("diffusers", ["transformer", "text_encoder"])
    with pytest.raises(UsageError, match="--lora-format comfyui cannot hold a LoRA of text_encoder"):
        lora_files.refuse_format("comfyui", ["transformer", "text_encoder"])


def run_folder(tmp_path, components):
    return RunFolder(tmp_path, LoraFiles(components, ["transformer"], "diffusers"), total=3, save_steps=1)


def test_weights_that_are_not_finite_are_never_saved(transformer, tmp_path):
    components = adapted(transformer)
    run = run_folder(tmp_path, components)
    run.after(1, Step([], 0, False))
    weight = next(p for p in transformer.parameters() if p.requires_grad)
    weight.data[0, 0] = torch.inf
    with pytest.raises(TrainingError, match=r"step 2: 1 of 24 LoRA tensors .*'step-2.safetensors' was not"):
        run.after(2, Step([], 0, False))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1.safetensors"]
    assert run.saved == [tmp_path / "step-1.safetensors"]


def test_a_checkpoint_is_whole_or_absent(transformer, tmp_path, monkeypatch):
    """The disk is full when the second is renamed into place: the first is untouched, no temporary file is left."""
    components = adapted(transformer)
    run = run_folder(tmp_path, components)
    run.after(1, Step([], 0, False))
    first = (tmp_path / "step-1.safetensors").read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(TrainingError, match=r"step-2.safetensors: cannot write it: No space left on device"):
        run.after(2, Step([], 0, False))
    assert [p.name for p in tmp_path.iterdir()] == ["step-1.safetensors"]
    assert len(load(first)) == 24
