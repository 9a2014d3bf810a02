"""The recipe: every option of every command, declared once, with its help text.

An option is a field of one of the groups below; the commands, `dsplit.toml`, the saved recipe and the command
reference are all made from these declarations. `None` means "not stated": the family or the place that uses it decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OUT = "runs/lora"  # the run folder where nobody names one


def option(
    default: Any,
    help: str,
    *,
    hidden: bool = False,
    shown: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    default_factory: Any = None,
) -> Any:
    """A dataclass field that is a command-line option.

    shown: how the help describes an unstated default. choices: the allowed texts. minimum: the smallest number allowed.
    """
    metadata = {"help": help, "hidden": hidden, "shown": shown, "choices": choices, "minimum": minimum}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and on what it runs."""

    model: str | None = option(None, "Family name, model folder, or repo id.")
    model_path: str | None = option(None, "Folder or repo id of the weights, when --model names a family.")
    task: str | None = option(None, "sft, direct_distill ... (see `dsplit tasks`).", shown="sft")
    trainable: str | None = option(None, "Components to train, comma-separated.", shown="the family's")
    dtype: str | None = option(
        None,
        "float32, bfloat16 or float16.",
        shown="bfloat16 on CUDA, else float32",
        choices=("float32", "bfloat16", "float16"),
    )
    posterior: str | None = option(
        None,
        "Latents from the VAE: its posterior's mean, or a sample drawn anew at each visit.",
        shown="mean",
        choices=("mean", "sample"),
    )
    device: str | None = option(None, "cpu, cuda, cuda:1, mps ...", shown="the best there is")
    threads: int | None = option(
        None, "CPU threads of torch; results are bit-equal at equal threads only.", shown="torch's", minimum=1
    )
    hub: str = option("modelscope", "Where missing weights come from.", choices=("modelscope", "huggingface"))
    model_id_with_origin_paths: str | None = option(
        None, "REPO_OR_FOLDER:COMPONENT/PATTERN, comma-separated.", hidden=True
    )
    model_paths: str | None = option(None, "JSON list of weight files.", hidden=True)
    offload_models: str | None = option(None, "Components that this stage must not load.", hidden=True)


@dataclass(frozen=True)
class DataOptions:
    """Which rows, and how large."""

    data: str | None = option(None, "Folder of the data set; paths in the metadata start here.")
    metadata: str | None = option(
        None,
        "CSV, JSON, JSONL or Parquet file, or a tar shard.",
        shown="metadata.* in --data, else its tar shards, its Parquet files, or name.txt captions",
    )
    columns: str | None = option(None, "Rename columns: image=file_name,prompt=text.")
    max_pixels: int | None = option(1048576, "Larger pictures are scaled down to this area.", minimum=1)
    resolution: str | None = option(None, "WxH: every picture is scaled and cropped to this size.")
    width: int | None = option(None, "Same as --resolution, with --height.", minimum=1)
    height: int | None = option(None, "Same as --resolution, with --width.", minimum=1)
    flip: bool = option(False, "Each picture also mirrored; one of the two is drawn at each visit.")
    crops: int = option(
        1, "Up to this many windows of each picture along its longer side; one is drawn at each visit.", minimum=1
    )
    max_image_pixels: int = option(178956970, "Refuse pictures with more pixels than this.", minimum=1)
    skip_bad: bool = option(False, "Leave out rows with faults instead of stopping.")
    rand_device: str | None = option(
        None, "rand_device of rows that state none (direct_distill).", choices=("cpu", "cuda")
    )


@dataclass(frozen=True)
class CacheOptions:
    """Stage 1."""

    out: str | None = option(None, "Folder of the cache.", shown="cache")
    name: str = option("default", "Name of this set of rows within the cache.")
    workers: int = option(2, "Threads that decode pictures ahead of the encoder.", minimum=0)
    encode_batch: int = option(
        1, "Rows of one size per forward pass of an encoder: faster, other values in the last bits.", minimum=1
    )
    dry_run: bool = option(False, "Only print the plan: load no weights, write nothing.")
    why: bool = option(False, "The plan, and what changed in the key of each value to encode.")
    probe: bool = option(False, "The plan, and a time from encoding three rows; nothing is kept.")
    status: bool = option(False, "Only show what --out holds, and what is missing and why.")
    verify: bool = option(False, "Only read all of --out, and name every damaged or missing value with its rows.")
    gc: bool = option(False, "Only list the values in --out that no data set of it needs; with --yes, remove them.")
    yes: bool = option(False, "With --gc: remove, instead of a dry run.")


@dataclass(frozen=True)
class TrainOptions:
    """Stage 2."""

    from_cache: str | None = option(None, "Train from this cache; encoders are never loaded.")
    name: str = option("default", "Name of the set of rows within the cache.")
    out: str | None = option(None, "Folder of the LoRA files, metrics and recipe.", shown=OUT)
    full: bool = option(False, "Train all weights of the trained components, in fp32, instead of a LoRA.")
    rank: int | None = option(None, "LoRA rank.", shown="32", minimum=1)
    alpha: float | None = option(None, "LoRA alpha.", shown="the rank")
    lora_dropout: float = option(0.0, "Share of LoRA's inputs left out in training, below 1.", minimum=0)
    targets: str | None = option(
        None,
        "LoRA targets: modules, comma-separated; re:PATTERN; or auto, all linear layers of the blocks.",
        shown="the family's",
    )
    init_lora: str | None = option(None, "LoRA file to start from, in any of the three formats.")
    lora_format: str = option(
        "diffusers", "diffusers, comfyui or diffsynth.", choices=("diffusers", "comfyui", "diffsynth")
    )
    lr: float | None = option(None, "Learning rate.", shown="1e-4", minimum=0)
    lr_scheduler: str = option("constant", "A schedule of diffusers: constant, cosine, linear ...")
    lr_warmup_steps: int = option(0, "Optimiser steps of warm-up.", minimum=0)
    weight_decay: float = option(0.01, "The optimiser's weight decay.", minimum=0)
    optimizer: str = option("adamw", "adamw, adamw8bit, adafactor, prodigy, muon, or a class by its dotted path.")
    optimizer_args: str | None = option(None, "Its further arguments: name=value, comma-separated.")
    repeat: int = option(1, "Visits of each row in an epoch.", minimum=1)
    epochs: int = option(1, "Passes over the data.", minimum=1)
    max_steps: int | None = option(None, "Optimiser steps; overrides --epochs.", minimum=1)
    save_steps: int | None = option(None, "Save every N optimiser steps instead of every epoch.", minimum=1)
    batch_size: int = option(1, "Rows of one size per forward pass.", minimum=1)
    gradient_accumulation_steps: int = option(1, "Batches per optimiser step.", minimum=1)
    gradient_checkpointing: bool = option(False, "Less memory, more time.")
    max_grad_norm: float = option(1.0, "Larger gradients are scaled down to this norm; 0: never.", minimum=0)
    mixed_precision: str | None = option(
        None, "no, bf16 or fp16, by accelerate.", shown="the launcher's, else no", choices=("no", "bf16", "fp16")
    )
    num_processes: int | None = option(None, "Processes to start on this machine.", shown="1", minimum=1)
    resume: str | None = option(None, "Go on with the run in --out: latest, or the folder of a run or a state.")
    keep: int | None = option(
        None, "Keep the newest N checkpoints and states.", shown="all checkpoints, the newest state", minimum=1
    )
    weighting: str = option(
        "none", "Loss weighting over sigma: none, sigma_sqrt, cosmap.", choices=("none", "sigma_sqrt", "cosmap")
    )
    sigma_density: str = option(
        "uniform",
        "Density of sigma before the shift: uniform, logit_normal, mode.",
        choices=("uniform", "logit_normal", "mode"),
    )
    prompt_dropout: float = option(0.0, "Share of visits, 0 to 1, whose prompt is left empty.", minimum=0)
    fixed_noise: bool = option(False, "direct_distill without a seed column: the same noise at each visit of a row.")
    seed: int = option(0, "Seed of noise, sigma, order and LoRA initialisation.")
    workers: int = option(0, "Processes that read batches ahead.", minimum=0)
    overwrite: bool = option(False, "Replace the files of an earlier run in --out.")


@dataclass(frozen=True)
class ValidateOptions:
    """Pictures with and without the LoRA, and the parity check."""

    lora: str | None = option(None, "LoRA file.", shown="the newest of the run")
    lora_scale: float = option(1.0, "Strength of the LoRA.")
    prompt: list[str] = option(None, "Prompt; may be given several times.", default_factory=list, shown="a dog")
    seed: int = option(0, "Seed of the pictures.")
    steps: int = option(30, "Inference steps.", minimum=1)
    cfg: float = option(1.0, "True CFG scale; above 1 uses the negative prompt ' '.")
    size: str | None = option(None, "WxH of the pictures.", shown="the family's")
    cpu_offload: bool = option(False, "Keep one component at a time on the GPU.")
    out: str | None = option(None, "Folder of the pictures and the report.", shown="validate beside the LoRA")
    parity: bool = option(False, "Compare cached and uncached values, loss and gradient on the user's rows.")
    parity_rows: int = option(4, "Rows of --parity.", minimum=1)
    tolerance: float = option(0.0, "Largest difference that --parity accepts.", minimum=0)
    from_cache: str | None = option(None, "The cache that --parity compares with.")
    name: str = option("default", "Name of the set of rows within the cache.")


@dataclass(frozen=True)
class PrepareOptions:
    """A run folder, its data and its weights."""

    out: str | None = option(None, "The run folder, where dsplit.toml is written.", shown="here")
    check: bool = option(False, "Only check the data set: write nothing, fetch nothing.")
    fetch: bool = option(True, "Fetch the weights that are missing.")
    stage: int | None = option(None, "Fetch only what stage 1 or stage 2 loads.", shown="both", minimum=1)
    dataset: str | None = option(None, "Fetch this data set of the hub.")
    include: list[str] = option(
        None, "Fetch only its files that match; may be given several times.", default_factory=list, shown="all"
    )
    local_dir: str | None = option(
        None, "Folder to fetch into.", shown="data/<name> for a data set, models/<repo> for weights"
    )
    verify: str | None = option(None, "Only check every weight file of this model folder, without loading it.")
    demo: str | None = option(None, "Only write the demo (model, data, dsplit.toml) into this new folder.")
    overwrite: bool = option(False, "Replace a dsplit.toml that is there.")


def listed(text: str | None) -> tuple[str, ...]:
    """`a, b` -> `("a", "b")`: the value of an option that takes several names."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def stated(options: Any) -> dict[str, Any]:
    """The options of a group as plain values, for `recipe.json` and manifests."""
    return {k: v for k, v in vars(options).items() if v not in (None, [])}
