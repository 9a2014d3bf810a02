"""What a model family and a task declare. No torch here: classes are named by strings and imported when loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsplit.errors import UsageError
from dsplit.units import Split, Unit, split

DRAWN = ("noisy_latents", "sigma")  # what a task draws anew at each visit and hands to the denoiser
IMPLIED = ("size", "view")  # columns that every row has: the target (W, H), and the window of the scaled picture


@dataclass(frozen=True)
class Column:
    """A column of the data set.

    kind: `file` (a path), `text`, `int` or `float`. default: what an absent or empty cell means; a required column has
    no default. choices: the allowed texts, if few. minimum: the smallest number allowed. needed_with: required only in
    rows where this other column has a value.
    """

    name: str
    kind: str = "text"
    required: bool = True
    default: Any = None
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    needed_with: str = ""


NEGATIVE_PROMPT = Column("negative_prompt", "text", required=False, default="")


@dataclass(frozen=True)
class Component:
    """A loadable part of a model: `Component("vae", "diffusers.AutoencoderKLQwenImage")`.

    cls: the class, as module and name. weights: False for parts without weights (tokenizer, processor, scheduler).
    prepare: called with the loaded object, to put faster but equal code in place; when its results change, raise the
    version of the units that call the component.
    """

    name: str
    cls: str
    weights: bool = True
    prepare: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Task:
    """A training objective.

    loss: `loss(denoise, batch, rng, **options) -> (B,)`, the loss of each row; `denoise(noisy_latents, sigma)` is a
    callable over the trained model, never a pipeline. reads: the values that the loss itself reads. columns: data-set
    columns that the loss reads. group_by: columns that must be equal within a batch. options: names of the training
    options that the loss takes. negative: True if a row of this task can need the negative prompt
    (`negative_if(row columns) -> bool` says which rows do).
    """

    name: str
    loss: Callable[..., Any]
    summary: str
    reads: tuple[str, ...] = ("latents",)
    columns: tuple[Column, ...] = ()
    group_by: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    negative_if: Callable[[Mapping[str, Any]], bool] | None = None


def classifier_free_guidance(positive: Any, negative: Any, scale: float) -> Any:
    """The two predictions combined as in Ho & Salimans 2022: `negative + scale * (positive - negative)`."""
    return negative + scale * (positive - negative)


@dataclass(frozen=True)
class ModelFamily:
    """A model family: its parts, its units, its denoiser, and how it is trained.

    pipeline: the diffusers pipeline class that `dsplit validate` draws pictures with. repos: default repo id per hub
    (`modelscope`, `huggingface`). units: everything before the denoiser. denoise: the unit that makes `velocity` (or
    what the noise process asks for) of `noisy_latents` and `sigma`. noise: the noise process. tasks: task name -> True
    if the split of that task is verified by tests. config: config fields of the default weights that shape formulas
    read (`{"vae.z_dim": 16}`). offload: components not loaded per stage, where the split does not say it already.
    defaults: family defaults of training options (`{"lr": 1e-4}`). guide: `guide(positive, negative, scale)`, how the
    family's own pipeline combines the two passes of classifier-free guidance. token_count: `token_count(prompt,
    components)`, the tokens of a caption; those beyond token_limit are cut, which is warned of. posterior: the units
    that stand in for those that make the same values when latents are sampled (`--posterior sample`): one that encodes
    mean and log-variance, and `draw_latents`; without them sampling is refused. variants: what of a picture may be
    varied, of `flip` and `crops`; leave out what would make a picture contradict what else the family reads of its row.
    """

    name: str
    title: str
    pipeline: str
    repos: Mapping[str, str]
    components: tuple[Component, ...]
    columns: tuple[Column, ...]
    units: tuple[Unit, ...]
    denoise: Unit
    noise: Any
    tasks: Mapping[str, bool]
    lora_targets: tuple[str, ...]
    trainable: tuple[str, ...] = ("transformer",)
    size_factor: int = 16
    typical: Mapping[str, int] = field(default_factory=lambda: {"H": 1024, "W": 1024, "F": 1, "L": 100})
    config: Mapping[str, Any] = field(default_factory=dict)
    offload: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    guide: Callable[[Any, Any, float], Any] = classifier_free_guidance
    token_count: Callable[[str, Mapping[str, Any]], int] | None = None
    token_limit: int = 0
    posterior: tuple[Unit, ...] = ()
    variants: tuple[str, ...] = ("flip", "crops")

    def component(self, name: str) -> Component:
        """The component called `name`; raises UsageError naming those that exist."""
        for c in self.components:
            if c.name == name:
                return c
        names = ", ".join(c.name for c in self.components)
        raise UsageError(f"{self.name} has no component '{name}' (it has {names})")

    @property
    def negative_units(self) -> tuple[Unit, ...]:
        """The units that read `prompt`, once more for `negative_prompt`; equal texts share their cached values."""
        return tuple(
            u.renamed(
                u.name.replace("prompt", "negative_prompt"),
                prompt="negative_prompt",
                **{o: f"negative_{o}" for o in u.outputs},
            )
            for u in self.units
            if "prompt" in u.inputs
        )

    def units_for(self, posterior: str) -> tuple[Unit, ...]:
        """`units`, with those of `posterior` in the place of what they stand in for if it is `sample`.

        Raises UsageError if it is, and the family cannot.
        """
        if posterior != "sample":
            return self.units
        made = {o for u in self.posterior for o in u.outputs}
        if not made:
            raise UsageError(f"--posterior sample: {self.name} has no units that sample; leave it out")
        places = [k for k, u in enumerate(self.units) if made & set(u.outputs)]
        first = min(places, default=len(self.units))
        kept = [u for k, u in enumerate(self.units) if k not in places]
        return (*kept[:first], *self.posterior, *kept[first:])

    def split(
        self, task: Task, trainable: tuple[str, ...] = (), *, negative: bool = False, posterior: str = "mean"
    ) -> Split:
        """The split of this family for `task` when `trainable` is trained.

        negative: with the negative prompt. posterior: latents are the `mean` of the VAE's posterior, or a `sample`.
        Raises UsageError for what the family cannot do.
        """
        if task.name not in self.tasks:
            raise UsageError(f"{self.name} does not support the task '{task.name}' (it has {', '.join(self.tasks)})")
        units = (*self.units_for(posterior), *(self.negative_units if negative else ()), self.denoise)
        extra = tuple(o for u in self.negative_units for o in u.outputs) if negative else ()
        columns = [*(c.name for c in self.columns_for(task)), *IMPLIED]
        for name in trainable:
            if not self.component(name).weights:
                raise UsageError(f"--trainable {name}: it has no weights to train")
        wanted = (*task.reads, *self.denoise.outputs, *extra, *(c.name for c in task.columns))
        return split(units, columns=columns, wanted=wanted, drawn=DRAWN, trainable=trainable or self.trainable)

    @property
    def config_only(self) -> tuple[str, ...]:
        """The parts without weights that no unit calls, such as the scheduler: they are read for their config."""
        called = {c for u in (*self.units, *self.posterior, self.denoise) for c in u.components}
        return tuple(c.name for c in self.components if not c.weights and c.name not in called)

    def columns_for(self, task: Task) -> tuple[Column, ...]:
        """The columns that a data set for `task` may have; the family's declaration of a column wins."""
        shared = {c.name: c for c in task.columns}
        read = {i for u in (*self.units, *self.posterior) for i in u.inputs} | set(shared)
        shared |= {c.name: c for c in self.columns if c.name in read}
        if task.negative_if:
            shared[NEGATIVE_PROMPT.name] = NEGATIVE_PROMPT
        return tuple(shared.values())

    def offloaded(self, result: Split, stage: int) -> tuple[str, ...]:
        """The components that stage 1 or 2 does not load."""
        used = result.stage1_components if stage == 1 else result.stage2_components
        stated = self.offload.get(f"stage{stage}", ())
        unused = tuple(c.name for c in self.components if c.weights and c.name not in used)
        return tuple(dict.fromkeys((*unused, *stated)))
