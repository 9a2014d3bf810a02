"""Units, and the split of a graph of units into what can be cached and what must run in training. No torch here.

A unit is a function with declared outputs and components; its inputs are its remaining parameters. `split` draws the
line: a unit runs in stage 2 if it is random, calls a trainable component, or reads a value of stage 2; everything else
that the loss needs runs in stage 1, and the values that cross the line are the boundary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsplit.errors import UnitError

RNG = "rng"  # the counted randomness of a batch: a random unit that takes it draws the same for a row, split or not


@dataclass(frozen=True)
class Unit:
    """A function with declared inputs, outputs and components.

    inputs, outputs: names of values. components: names of the model parts it calls (also parameters of the function).
    version: part of every cache key made from it; raise it when the result changes.
    random: its result differs from call to call, so it can never be cached. Only such a unit may take a parameter
    `rng`, from which it draws (`rng.normal("purpose", like)`): training gives it, no unit makes it.
    shapes: per output, the shape of one row's value as a formula over H, W, F, L and component-config fields, for
    instance `"vae.z_dim, 1, H/8, W/8"`; a dimension with L is ragged: rows are padded with zeros along it in a batch.
    dtypes: per output, `float` (the run's dtype) unless stated, e.g. `bool`.
    sources: installed library files whose code or text the results depend on beside the components, as a pipeline's
    prompt template (`diffusers/pipelines/qwenimage/pipeline_qwenimage.py`); their bytes enter the keys.
    origin: the unit whose results these are, if this is another use of it (`encode_prompt` of a negative prompt).
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    components: tuple[str, ...] = ()
    version: int = 1
    random: bool = False
    shapes: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    origin: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)  # value name -> parameter name, where they differ
    results: Mapping[str, str] = field(default_factory=dict)  # output name -> the origin's output name

    @property
    def identity(self) -> str:
        """The name that enters cache keys: equal for all uses of one unit."""
        return self.origin or self.name

    def stored_name(self, output: str) -> str:
        """The name of `output` in cache keys: the origin's, so that equal inputs share one value."""
        return self.results.get(output, output)

    def __call__(self, values: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name, computed from `values` (by input name) and `components` (by component name).

        Raises UnitError if the function does not give back exactly the declared outputs; None is no value.
        """
        arguments = {self.parameters.get(name, name): values[name] for name in self.inputs}
        result = self.function(**arguments, **{name: components[name] for name in self.components})
        results = result if isinstance(result, tuple) else (result,)
        if len(results) != len(self.outputs):
            raise UnitError(
                f"unit '{self.name}' returned {len(results)} values, but declares {len(self.outputs)}: "
                f"{', '.join(self.outputs)}"
            )
        absent = [name for name, value in zip(self.outputs, results, strict=True) if value is None]
        if absent:
            raise UnitError(f"unit '{self.name}' returned None for {', '.join(absent)}")
        return dict(zip(self.outputs, results, strict=True))

    def renamed(self, name: str, **values: str) -> Unit:
        """The same unit under another name, with input and output values renamed; its cache keys stay the same.

        `encode_prompt.renamed("encode_negative_prompt", prompt="negative_prompt", prompt_embeds="negative_embeds")`.
        """
        unknown = set(values) - {*self.inputs, *self.outputs}
        if unknown:
            raise UnitError(f"unit '{self.name}' has no value named {', '.join(sorted(unknown))}")

        def new(value: str) -> str:
            return values.get(value, value)

        return replace(
            self,
            name=name,
            origin=self.identity,
            inputs=tuple(map(new, self.inputs)),
            outputs=tuple(map(new, self.outputs)),
            shapes={new(k): v for k, v in self.shapes.items()},
            dtypes={new(k): v for k, v in self.dtypes.items()},
            parameters={new(k): self.parameters.get(k, k) for k in self.inputs},
            results={new(k): self.stored_name(k) for k in self.outputs},
        )


def unit(
    outputs: str,
    components: str = "",
    *,
    version: int = 1,
    random: bool = False,
    sources: str = "",
    shapes: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Any]], Unit]:
    """A decorator that makes a Unit of a function: `@unit(outputs="latents", components="vae")`.

    `outputs`, `components` and `sources` are names separated by spaces; every other parameter of the function is an
    input value.
    Raises UnitError where the declaration and the function's signature disagree.
    """

    def make(function: Callable[..., Any]) -> Unit:
        name = function.__name__
        made, called = tuple(outputs.split()), tuple(components.split())
        parameters = inspect.signature(function).parameters
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in parameters.values()):
            raise UnitError(f"unit '{name}': *args, **kwargs and / hide what it reads; name every value")
        if not made:
            raise UnitError(f"unit '{name}' declares no output")
        if len(set(made)) < len(made) or set(made) & set(parameters):
            raise UnitError(f"unit '{name}': a value is written once, by a unit that does not read it")
        if RNG in parameters and not random:
            raise UnitError(f"unit '{name}' draws from {RNG}; declare it random=True, since it cannot be cached")
        missing = [c for c in called if c not in parameters]
        if missing:
            raise UnitError(f"unit '{name}' declares the components {', '.join(missing)}, but takes no such parameter")
        described = {*(shapes or {}), *(dtypes or {})} - set(made)
        if described:
            raise UnitError(f"unit '{name}' describes {', '.join(sorted(described))}, which it does not make")
        inputs = tuple(p for p in parameters if p not in called)
        return Unit(
            name,
            function,
            inputs,
            made,
            called,
            version,
            random,
            dict(shapes or {}),
            dict(dtypes or {}),
            sources=tuple(sources.split()),
        )

    return make


@dataclass(frozen=True)
class Split:
    """Where each unit runs, and what crosses from stage 1 to stage 2.

    stage1, stage2: units in the order in which they can run. boundary: the values that cross, made by stage 1.
    columns: the values that cross and come straight from the data set.
    """

    stage1: tuple[Unit, ...]
    stage2: tuple[Unit, ...]
    boundary: tuple[str, ...]
    columns: tuple[str, ...]

    def maker(self, value: str) -> Unit:
        """The unit that makes `value`."""
        return next(u for u in (*self.stage1, *self.stage2) if value in u.outputs)

    @property
    def stage1_columns(self) -> tuple[str, ...]:
        """The values that stage 1 reads from the data set."""
        made = {o for u in self.stage1 for o in u.outputs}
        return _distinct(i for u in self.stage1 for i in u.inputs if i not in made)

    @property
    def stage1_components(self) -> tuple[str, ...]:
        return _distinct(c for u in self.stage1 for c in u.components)

    @property
    def stage2_components(self) -> tuple[str, ...]:
        return _distinct(c for u in self.stage2 for c in u.components)


def split(
    units: Sequence[Unit],
    *,
    columns: Iterable[str],
    wanted: Iterable[str],
    drawn: Iterable[str] = (),
    trainable: Iterable[str] = (),
) -> Split:
    """The smallest stage 1 and stage 2 that make `wanted`.

    columns: values that the data set gives. drawn: values that the task draws anew at each visit (`noisy_latents`,
    `sigma`); `rng` is always there in stage 2. trainable: components whose weights change. Raises UnitError for a value
    with two writers, a cycle, an input that nobody makes, or a trainable component that no needed unit calls.
    """
    columns, drawn, wanted, trainable = set(columns), {*drawn, RNG}, tuple(wanted), set(trainable)
    makers = _makers(units, columns | drawn)
    needed = _order(units, makers, wanted, columns | drawn)
    unused = trainable - {c for u in needed for c in u.components}
    if unused:
        raise UnitError(f"no unit that the loss needs calls the trainable component {', '.join(sorted(unused))}")
    late_values = set(drawn)
    early: list[Unit] = []
    late: list[Unit] = []
    for u in needed:
        is_late = u.random or bool(trainable & set(u.components)) or bool(late_values & set(u.inputs))
        (late if is_late else early).append(u)
        if is_late:
            late_values |= set(u.outputs)
    read_late = _distinct([*(i for u in late for i in u.inputs), *wanted])
    crossing = [v for v in read_late if v not in late_values]
    return Split(
        stage1=tuple(early),
        stage2=tuple(late),
        boundary=tuple(v for u in early for v in u.outputs if v in crossing),
        columns=tuple(v for v in crossing if v in columns),
    )


def _makers(units: Sequence[Unit], given: set[str]) -> dict[str, Unit]:
    makers: dict[str, Unit] = {}
    names: set[str] = set()
    for u in units:
        if u.name in names:
            raise UnitError(f"two units are called '{u.name}'")
        names.add(u.name)
        for output in u.outputs:
            if output in makers:
                raise UnitError(f"the value '{output}' has two writers: '{makers[output].name}' and '{u.name}'")
            if output in given:
                raise UnitError(
                    f"the value '{output}' comes from the data set or the task, but '{u.name}' makes it too"
                )
            makers[output] = u
    return makers


def _order(units: Sequence[Unit], makers: Mapping[str, Unit], wanted: Iterable[str], given: set[str]) -> list[Unit]:
    """The units that `wanted` needs, each after the units it reads from, otherwise in declared order."""
    done: list[Unit] = []
    open_: list[Unit] = []

    def need(value: str, reader: str) -> None:
        if value in given:
            return
        if value not in makers:
            raise UnitError(f"{reader} reads '{value}', which no unit makes and no column gives")
        u = makers[value]
        if u in done:
            return
        if u in open_:
            circle = [*open_[open_.index(u) :], u]
            raise UnitError("units read each other in a circle: " + " -> ".join(x.name for x in circle))
        open_.append(u)
        for i in u.inputs:
            need(i, f"unit '{u.name}'")
        open_.pop()
        done.append(u)

    positions = {u.name: k for k, u in enumerate(units)}
    known = [w for w in wanted if w in makers]
    for value in sorted(known, key=lambda v: positions.get(makers[v].name, len(positions))):
        need(value, "the task")
    for value in wanted:
        need(value, "the task")
    return done


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
