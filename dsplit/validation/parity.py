"""Split against unsplit on the user's own rows: boundary values, losses and gradients, computed both ways."""

from __future__ import annotations

import gc
import itertools
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsplit.cache.run import run_cache
from dsplit.console import Progress, counted, say
from dsplit.dataset.rows import Choice
from dsplit.errors import CacheError
from dsplit.models.load import load_component, pick_device
from dsplit.recipe import CacheOptions, DataOptions, ModelOptions, TrainOptions, ValidateOptions
from dsplit.training.batches import FIRST, Reader, Rows, ragged_axes
from dsplit.training.job import Job, cached_job, live_job
from dsplit.training.lora import adapters, inject, skeleton
from dsplit.training.objective import Objective

RANK = 4
SPREAD = 0.02  # of the LoRA's weights: with peft's zeros in B, half of the gradients would be zero whatever happens

Values = Mapping[str, torch.Tensor]
Chosen = tuple[int, Choice]  # row number, variants


@dataclass(frozen=True)
class Kept:
    """Some rows of `rows`, each as one of its variants and without others, their values held in memory."""

    rows: Rows
    chosen: Sequence[Chosen]
    held: Sequence[Values]

    @property
    def ids(self) -> Sequence[str]:
        return [self.rows.ids[i] for i, _ in self.chosen]

    def place(self, i: int) -> str:
        return self.rows.place(self.chosen[i][0])

    def group(self, i: int) -> Hashable:
        return self.rows.group(self.chosen[i][0])

    def variants(self, i: int) -> Mapping[str, int]:
        return {}

    def columns(self, i: int, choice: Choice = FIRST) -> dict[str, Any]:
        return self.rows.columns(*self.chosen[i])

    def values(self, i: int, choice: Choice = FIRST) -> dict[str, torch.Tensor]:
        return dict(self.held[i])


def check_parity(model: ModelOptions, data: DataOptions, validate: ValidateOptions) -> dict[str, Any]:
    """`rows`, the largest differences `max_value`, `max_loss` and `max_gradient`, `tolerance`, and whether it is `ok`.

    The first rows of the data set are encoded into a new cache, or read from the one that is given, and encoded anew as
    an unsplit run does, every variant of them; then both go through the training loss with the same noise and the same
    random LoRA. Encoders and the trained component are never in memory together. Raises CacheError for a row that the
    given cache lacks.
    """
    device = pick_device(model.device)
    with tempfile.TemporaryDirectory(prefix="dsplit-parity-") as folder:
        if not validate.from_cache:
            run_cache(model, data, CacheOptions(out=folder, name=validate.name), first=validate.parity_rows)
        train = TrainOptions(from_cache=validate.from_cache or folder, name=validate.name, seed=validate.seed)
        job = cached_job(model, data, train, device)
        dtype = str(job.dtype).removeprefix("torch.")
        same = replace(model, task=job.task.name, trainable=",".join(job.trained), dtype=dtype, posterior=job.posterior)
        live = live_job(same, data, train, device)
        count = min(validate.parity_rows, len(live.rows.ids))
        numbers = _joined(job.rows, live.rows, count, Path(str(train.from_cache)))
        axes = list(job.header["axes"].values())
        chosen = [(i, choice) for i in range(count) for choice in choices(_variants(job, live, numbers[i], i), axes)]
        stored = [(numbers[i], choice) for i, choice in chosen]
        split = Kept(job.rows, stored, [job.rows.values(*one) for one in stored])
    unsplit = Kept(live.rows, chosen, _encoded(live, job, chosen, device))
    say(f"parity: {counted(count, 'row')}, {counted(len(chosen), 'variant')}")
    differences = value_differences(split, unsplit)
    for name, largest_one in differences.items():
        say(f"parity: {name}: largest difference {largest_one:g}")

    objective, weights = _objective(job, train, device)
    losses, gradients = zip(*(_backward(objective, weights, rows, device) for rows in (split, unsplit)), strict=True)
    largest = {
        "max_value": max(differences.values(), default=0.0),
        "max_loss": difference(losses[0], losses[1]),
        "max_gradient": max(difference(a, b) for a, b in zip(*gradients, strict=True)),
    }
    ok = all(d <= validate.tolerance for d in largest.values())
    return {"rows": count, **largest, "tolerance": validate.tolerance, "ok": ok}


def value_differences(split: Rows, unsplit: Rows) -> dict[str, float]:
    """The largest difference per boundary value. Raises CacheError where the two do not even have one shape."""
    largest: dict[str, float] = {}
    for i in range(len(split.ids)):
        stored, fresh = split.values(i), unsplit.values(i)
        for name in dict.fromkeys((*stored, *fresh)):
            shapes = [tuple(v[name].shape) if name in v else None for v in (stored, fresh)]
            if shapes[0] != shapes[1]:
                raise CacheError(
                    f"{unsplit.place(i)}: '{name}' is {shapes[0] or 'absent'} in the cache, {shapes[1] or 'absent'} "
                    "now; the cache was made with other options, so give the same ones here"
                )
            largest[name] = max(largest.get(name, 0.0), difference(stored[name], fresh[name]))
    return largest


def choices(variants: Mapping[str, int], together: Iterable[Sequence[str]]) -> list[Choice]:
    """Choices that show every variant of every value of a row, as few as that takes.

    variants: how many there are per axis. together: per value, the axes that it depends on; only those of which some
    value depends on several are combined with each other.
    """
    if any(len(set(variants) & set(axes)) > 1 for axes in together):
        return [dict(zip(variants, ks, strict=True)) for ks in itertools.product(*map(range, variants.values()))]
    most = max(variants.values(), default=1)
    return [{axis: k % n for axis, n in variants.items()} for k in range(most)]


def _variants(cached: Job, live: Job, stored: int, i: int) -> Mapping[str, int]:
    """The variants of row `i` of the data set, `stored` in the cache. Raises CacheError if the cache has others."""
    before, now = (dict(job.rows.variants(k)) for job, k in ((cached, stored), (live, i)))
    if before != now:
        raise CacheError(
            f"{live.rows.place(i)}: variants are {before or 'none'} in the cache, {now or 'none'} now; the cache was "
            "made with other options, so give the same ones here"
        )
    return now


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference; 0 only if all elements are equal, infinite where one of two is NaN."""
    if torch.equal(a, b):
        return 0.0
    return (a.double() - b.double()).abs().nan_to_num(nan=torch.inf).max().item()


def _joined(cached: Rows, live: Rows, count: int, folder: Path) -> list[int]:
    """The numbers in the cache of the first `count` rows of the data set, joined by id."""
    numbers = {row: i for i, row in enumerate(cached.ids)}
    absent = [live.place(i) for i in range(count) if live.ids[i] not in numbers]
    if absent:
        raise CacheError(
            f"{folder}: {len(absent)} of {count} rows are not in the cache, e.g. {absent[0]}; run `dsplit cache` again"
        )
    return [numbers[live.ids[i]] for i in range(count)]


def _encoded(live: Job, cached: Job, chosen: Sequence[Chosen], device: torch.device) -> list[Values]:
    """The values of the chosen rows and variants, made by the encoders, which are let go afterwards."""
    encoders = [name for name in live.loaded if name not in cached.trained]
    live.components.update({name: load_component(live.model, name, live.dtype, device) for name in encoders})
    with Progress("encode anew", len(chosen)) as progress:
        values: list[Values] = []
        for i, choice in chosen:
            values.append({name: tensor.cpu() for name, tensor in live.rows.values(i, choice).items()})
            progress.advance()
    live.components.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return values


def _objective(job: Job, train: TrainOptions, device: torch.device) -> tuple[Objective, list[torch.nn.Parameter]]:
    """The training loss with a random LoRA on the family's targets, and its weights."""
    plan = adapters(
        {n: skeleton(job.model, n) for n in job.trained}, None, job.family.lora_targets, job.family.trainable
    )
    components = {name: load_component(job.model, name, job.dtype, device) for name in job.loaded}
    weights = inject(components, plan, RANK, RANK, train.seed)
    generator = torch.Generator().manual_seed(train.seed)
    with torch.no_grad():
        for weight in weights:
            weight.copy_(SPREAD * torch.randn(weight.shape, generator=generator))
    for name in job.trained:
        if hasattr(components[name], "enable_gradient_checkpointing"):  # equal bits, and far less memory
            components[name].enable_gradient_checkpointing()
    process = job.noise_process()
    objective = Objective(
        job.family, job.task, components, job.trained, process, train.seed, asdict(train), job.posterior
    )
    return objective, weights


def _backward(
    objective: Objective, weights: Sequence[torch.nn.Parameter], rows: Rows, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of each row, and the gradient of each weight summed over the rows."""
    reader = Reader(rows, ragged_axes(objective.widest))
    for weight in weights:
        weight.grad = None
    losses = []
    with Progress("loss and gradient", len(rows.ids)) as progress:
        for i in range(len(rows.ids)):
            loss = objective(reader.read([(i, 0)]).to(device)).sum()
            loss.backward()
            losses.append(loss.detach().cpu())
            progress.advance()
    # a weight that the model never uses has no gradient
    return torch.stack(losses), [torch.zeros(()) if w.grad is None else w.grad.cpu() for w in weights]
