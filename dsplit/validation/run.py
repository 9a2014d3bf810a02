"""`dsplit validate`: pictures with and without the LoRA, the grid and the report, and the parity check."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsplit.console import Progress, counted, say
from dsplit.errors import UsageError
from dsplit.recipe import DataOptions, ModelOptions, ValidateOptions, stated

if TYPE_CHECKING:
    import torch

    from dsplit.models.model import Model
    from dsplit.validation.pictures import Pair

PROMPT = "a dog"  # as in the reference
RUN = Path("runs/lora")  # as `dsplit train` has it


def run_validate(model: ModelOptions, data: DataOptions, validate: ValidateOptions, run: Path = RUN) -> dict[str, Any]:
    """The `--json` object of `dsplit validate`; a failed parity check is told by `["parity"]["ok"]`, not raised.

    run: the folder of the training run, whose newest LoRA is used where none is named; without any, --parity is done
    alone. Raises UsageError, ModelError or CacheError before anything is drawn where the LoRA is missing or does not
    fit, or the folder of the results cannot be written.
    """
    from dsplit.cache.files import claimed
    from dsplit.models.load import pick_device, pick_dtype, set_threads
    from dsplit.models.locate import find_family, locate
    from dsplit.validation.pictures import save

    lora = find_lora(validate.lora, run, needed=not validate.parity)
    out = Path(validate.out) if validate.out else (lora.parent if lora else run) / "validate"
    with claimed(out):
        set_threads(model.threads)
        device = pick_device(model.device)
        dtype = pick_dtype(model.dtype, device)
        located = locate(model, fetch=[c.name for c in find_family(model).components], hub=model.hub)
    parity = None
    if validate.parity:  # first: it finds faults of the data, and takes less time than pictures
        from dsplit.validation.parity import check_parity

        parity = check_parity(model, data, validate)
    pairs = draw_pairs(located, lora, out, validate, dtype, device) if lora else []
    groups = {"model": stated(model), "data": stated(data), "validate": stated(validate)}
    recipe = {"command": "validate", **groups}
    save((json.dumps(recipe, indent=2, ensure_ascii=False) + "\n").encode(), out / "recipe.json")
    machine = {"Device": str(device), "Dtype": str(dtype).removeprefix("torch.")}
    return write_results(out, located, lora, pairs, parity, settings(validate, located, lora) | machine)


def settings(options: ValidateOptions, model: Model, lora: Path | None) -> dict[str, str]:
    """What the report's table says."""
    from dsplit.validation.pipeline import picture_size

    if lora is None:
        return {"Model": model.name, "Seed": str(options.seed)}
    width, height = picture_size(options.size, model.family)
    return {
        "Model": model.name,
        "LoRA": str(lora),
        "LoRA scale": f"{options.lora_scale:g}",
        "Size": f"{width}x{height}",
        "Steps": str(options.steps),
        "CFG": f"{options.cfg:g}",
        "Seed": str(options.seed),
    }


def find_lora(stated_path: str | None, run: Path, *, needed: bool) -> Path | None:
    """The LoRA file that is named, or the newest in the folder that is named, or the newest of `run`.

    None where nothing is named, there is none, and none is `needed`; otherwise raises UsageError.
    """
    place = Path(stated_path) if stated_path else run
    if place.is_file():
        return place
    found = [p for p in place.glob("*.safetensors") if not p.name.startswith(".")] if place.is_dir() else []
    if found:
        return max(found, key=lambda p: (p.stat().st_mtime_ns, p.name))
    if not stated_path and not needed:
        return None
    what = "no LoRA file (*.safetensors) in it" if place.is_dir() else "no such file or folder"
    raise UsageError(f"--lora: {place}: {what}; name one with --lora FILE, or train one first")


def draw_pairs(
    model: Model, lora: Path, out: Path, options: ValidateOptions, dtype: torch.dtype, device: torch.device
) -> list[Pair]:
    """Draws every prompt without the LoRA, then with it; each picture is saved below `out` as soon as it is there."""
    from dsplit.validation.adapter import LoraFile
    from dsplit.validation.pictures import Pair, save_png
    from dsplit.validation.pipeline import check_steps, draw, load_pipeline, picture_size

    prompts = options.prompt or [PROMPT]
    size = picture_size(options.size, model.family)
    adapter = LoraFile.read(lora)
    say(
        f"{counted(len(prompts), 'prompt')} without and with {lora}: {size[0]}x{size[1]}, "
        f"{counted(options.steps, 'step')}, seed {options.seed}, on {device} in {str(dtype).removeprefix('torch.')}"
    )
    pipeline = load_pipeline(model, dtype, device, cpu_offload=options.cpu_offload)
    check_steps(options.steps, pipeline.scheduler)
    adapter.check(pipeline, model.family.trainable)
    folder = out / "images"
    pairs = []
    for k, prompt in enumerate(prompts, 1):
        stem = f"{k:02}-{slug(prompt)}"
        pairs.append(Pair(prompt, options.seed, folder / f"{stem}-base.png", folder / f"{stem}-lora.png"))
    with Progress("draw", 2 * len(pairs), "pictures") as progress:
        for pair in pairs:
            save_png(draw(pipeline, pair.prompt, size, options), pair.base)
            progress.advance()
        patched = adapter.attach(pipeline, options.lora_scale)
        keys = len(adapter.state)
        say(
            f"{lora}: {keys} of {keys} keys loaded, 0 unmatched, {counted(patched, 'module')} patched, "
            f"scale {options.lora_scale:g}"
        )
        for pair in pairs:
            save_png(draw(pipeline, pair.prompt, size, options), pair.lora)
            progress.advance()
    return pairs


def slug(prompt: str) -> str:
    """The prompt's first words as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:48].strip("-") or "prompt"


def write_results(
    out: Path,
    model: Model,
    lora: Path | None,
    pairs: Sequence[Pair],
    parity: dict[str, Any] | None,
    settings: dict[str, str],
) -> dict[str, Any]:
    """Writes grid and report into `out`; the `--json` object."""
    from dsplit.validation import pictures, report

    title = f"{model.family.title} with {lora.name}" if lora else f"{model.family.title}, split against unsplit"
    shown = ("Size", "Steps", "CFG", "LoRA scale", "Seed")
    subtitle = " · ".join(f"{name} {settings[name]}" for name in shown if name in settings)
    grid = None
    if pairs:
        grid = out / "grid.png"
        pictures.save_png(pictures.grid(pairs, title, subtitle), grid)
    curve = lora.parent / "loss.png" if lora else None
    page = report.page(
        title, subtitle, pairs, settings, loss_curve=curve if curve and curve.is_file() else None, parity=parity
    )
    pictures.save(page.encode(), out / "report.html")
    return {
        "images": [{"prompt": p.prompt, "seed": p.seed, "base": str(p.base), "lora": str(p.lora)} for p in pairs],
        "grid": str(grid) if grid else None,
        "report": str(out / "report.html"),
        "parity": parity,
    }
