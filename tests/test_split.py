"""The split: its properties over random graphs, where the cut lies for what is trained, and graphs that have none."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsplit.errors import UnitError
from dsplit.units import Split, Unit, split

COLUMNS = ("image", "prompt", "seed")
DRAWN = ("noisy_latents", "sigma")
COMPONENTS = ("vae", "text_encoder", "transformer")


@dataclass(frozen=True)
class Graph:
    """Units in the order in which they are declared, and what is asked of them."""

    units: tuple[Unit, ...]
    wanted: tuple[str, ...]
    trainable: tuple[str, ...]

    def makers(self) -> dict[str, Unit]:
        return {o: u for u in self.units for o in u.outputs}

    def needed(self) -> set[str]:
        """Names of the units that `wanted` depends on."""
        makers, found, open_ = self.makers(), set(), list(self.wanted)
        while open_:
            u = makers.get(open_.pop())
            if u is not None and u.name not in found:
                found.add(u.name)
                open_ += u.inputs
        return found

    def late(self, u: Unit) -> bool:
        """The definition, followed literally from `u` up to the columns."""
        makers = self.makers()
        return (
            u.random
            or bool(set(u.components) & set(self.trainable))
            or any(i in DRAWN or (i in makers and self.late(makers[i])) for i in u.inputs)
        )

    def split(self) -> Split:
        return split(self.units, columns=COLUMNS, wanted=self.wanted, drawn=DRAWN, trainable=self.trainable)


def mix(*things: object) -> int:
    return zlib.crc32(repr(things).encode())


def made_up(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], **more: object) -> Unit:
    """A unit whose outputs depend on everything that it is given."""

    def function(**arguments: object) -> tuple[int, ...]:
        return tuple(mix(name, o, sorted(arguments.items())) for o in outputs)

    return Unit(name, function, inputs, outputs, **more)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    units: list[Unit] = []
    values = [*COLUMNS, *DRAWN]
    for k in range(draw(st.integers(1, 9))):
        outputs = tuple(f"value{k}{suffix}" for suffix in "abc"[: draw(st.integers(1, 3))])
        inputs = draw(st.lists(st.sampled_from(values), unique=True, max_size=3))
        called = draw(st.lists(st.sampled_from(COMPONENTS), unique=True, max_size=2))
        random = draw(st.integers(0, 5)) == 0
        # a random unit gets its draws through a component of its own, so that a test can replay them
        components = (*called, *([f"draws of unit{k}"] if random else []))
        units.append(made_up(f"unit{k}", tuple(inputs), outputs, components=components, random=random))
        values += outputs
    wanted = tuple(draw(st.lists(st.sampled_from(values), unique=True, min_size=1, max_size=4)))
    graph = Graph(tuple(draw(st.permutations(units))), wanted, ())
    called_by_needed = {c for u in units if u.name in graph.needed() for c in u.components if c in COMPONENTS}
    trainable = draw(st.sets(st.sampled_from(sorted(called_by_needed)))) if called_by_needed else set()
    return replace(graph, trainable=tuple(sorted(trainable)))


def run(units: tuple[Unit, ...], values: dict[str, int], components: dict[str, int]) -> dict[str, int]:
    values = dict(values)
    for u in units:
        values |= u(values, components)
    return values


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_stage_2_is_what_is_random_or_trained_or_downstream_of_it(graph: Graph) -> None:
    result = graph.split()
    late = {u.name for u in graph.units if graph.late(u)} & graph.needed()
    assert {u.name for u in result.stage2} == late
    assert not {u.name for u in result.stage1} & {u.name for u in graph.units if graph.late(u)}
    assert not any(u.random or set(u.components) & set(graph.trainable) for u in result.stage1)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_exactly_what_stage_2_reads_crosses(graph: Graph) -> None:
    result = graph.split()
    made_late = {o for u in result.stage2 for o in u.outputs}
    read = {*(i for u in result.stage2 for i in u.inputs), *graph.wanted} - made_late - set(DRAWN)
    assert {*result.boundary, *result.columns} == read
    assert set(result.columns) == read & set(COLUMNS)
    assert len({*result.boundary, *result.columns}) == len(result.boundary) + len(result.columns)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_every_unit_is_needed_and_runs_after_those_it_reads(graph: Graph) -> None:
    result = graph.split()
    used1 = {*result.boundary, *(i for u in result.stage1 for i in u.inputs)}
    used2 = {*graph.wanted, *(i for u in result.stage2 for i in u.inputs)}
    assert all(used1 & set(u.outputs) for u in result.stage1)
    assert all(used2 & set(u.outputs) for u in result.stage2)
    known = {*COLUMNS, *DRAWN}
    for u in (*result.stage1, *result.stage2):
        assert set(u.inputs) <= known, f"{u.name} runs before what it reads"
        assert not set(u.outputs) & known
        known |= set(u.outputs)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_stage_1_then_stage_2_gives_what_running_all_gives(graph: Graph) -> None:
    """Stage 1 runs before training: with other weights in the trainable components, other draws, other noise."""
    result = graph.split()
    columns = {c: mix("column", c) for c in COLUMNS}
    everything = {c for u in graph.units for c in u.components}
    now = {c: mix("weights", c) for c in everything}
    before = {c: mix("before", c) if c in graph.trainable or c not in COMPONENTS else w for c, w in now.items()}
    drawn = {d: mix("drawn", d) for d in DRAWN}

    stage1 = run(result.stage1, {c: columns[c] for c in result.stage1_columns}, before)
    crossing = {v: stage1[v] for v in result.boundary} | {c: columns[c] for c in result.columns}
    stage2 = run(result.stage2, crossing | drawn, {c: now[c] for c in result.stage2_components})
    order = {u.name: k for k, u in enumerate((*result.stage1, *result.stage2))}
    needed = sorted((u for u in graph.units if u.name in order), key=lambda u: order[u.name])
    whole = run(tuple(needed), columns | drawn, now)

    assert {v: stage2[v] for v in graph.wanted} == {v: whole[v] for v in graph.wanted}


def chain() -> tuple[Unit, ...]:
    """The units of an ordinary image family."""
    return (
        made_up("load_image", ("image",), ("pixels",)),
        made_up("encode_image", ("pixels",), ("latents",), components=("vae",)),
        made_up("encode_prompt", ("prompt",), ("prompt_embeds", "prompt_mask"), components=("text_encoder",)),
        made_up("denoise", (*DRAWN, "prompt_embeds", "prompt_mask"), ("velocity",), components=("transformer",)),
    )


def names(units: tuple[Unit, ...]) -> list[str]:
    return [u.name for u in units]


@pytest.mark.parametrize(
    ("trainable", "stage1", "stage2", "boundary", "columns"),
    [
        (
            "transformer",
            ["load_image", "encode_image", "encode_prompt"],
            ["denoise"],
            ("latents", "prompt_embeds", "prompt_mask"),
            (),
        ),
        (
            "text_encoder transformer",
            ["load_image", "encode_image"],
            ["encode_prompt", "denoise"],
            ("latents",),
            ("prompt",),
        ),
        (
            "vae transformer",
            ["load_image", "encode_prompt"],
            ["encode_image", "denoise"],
            ("pixels", "prompt_embeds", "prompt_mask"),
            (),
        ),
    ],
)
def test_what_is_trained_moves_the_cut(trainable, stage1, stage2, boundary, columns) -> None:
    result = split(chain(), columns=COLUMNS, wanted=("latents", "velocity"), drawn=DRAWN, trainable=trainable.split())
    assert names(result.stage1) == stage1
    assert names(result.stage2) == stage2
    assert result.boundary == boundary
    assert result.columns == columns
    assert result.maker("latents").name == "encode_image"


def test_components_and_columns_per_stage() -> None:
    result = split(chain(), columns=COLUMNS, wanted=("latents", "velocity"), drawn=DRAWN, trainable=["transformer"])
    assert result.stage1_columns == ("image", "prompt")
    assert result.stage1_components == ("vae", "text_encoder")
    assert result.stage2_components == ("transformer",)


def test_units_keep_the_declared_order_where_it_is_possible() -> None:
    first, second, third = (made_up(f"u{k}", ("image",), (f"v{k}",)) for k in range(3))
    for units in itertools.permutations((first, second, third)):
        assert split(units, columns=COLUMNS, wanted=("v0", "v1", "v2")).stage1 == units


def test_a_column_that_only_the_loss_reads_crosses() -> None:
    result = split(chain(), columns=COLUMNS, wanted=("latents", "seed"), trainable=["vae"])
    assert result.columns == ("seed",)
    assert result.boundary == ("pixels",)


def test_the_randomness_of_a_random_unit_is_there_and_never_crosses() -> None:
    units = (
        made_up("encode", ("image",), ("mean",), components=("vae",)),
        made_up("draw", ("mean", "rng"), ("latents",), random=True),
    )
    result = split(units, columns=COLUMNS, wanted=("latents",))
    assert (names(result.stage1), names(result.stage2)) == (["encode"], ["draw"])
    assert (result.boundary, result.columns, result.stage1_columns) == (("mean",), (), ("image",))


def fails(units, text, *, wanted=("out",), **more) -> None:
    with pytest.raises(UnitError) as caught:
        split(units, columns=COLUMNS, wanted=wanted, drawn=DRAWN, **more)
    assert text in str(caught.value)


def test_two_writers_are_named() -> None:
    units = (made_up("encode", ("image",), ("out",)), made_up("encode_again", ("image",), ("out",)))
    fails(units, "the value 'out' has two writers: 'encode' and 'encode_again'")


@pytest.mark.parametrize("value", ["prompt", "sigma", "rng"])
def test_a_unit_cannot_make_what_is_given(value: str) -> None:
    fails((made_up("guess", ("image",), (value, "out")),), f"the value '{value}' comes from the data set or the task")


def test_a_circle_is_named_without_what_leads_to_it() -> None:
    units = (
        made_up("last", ("b",), ("out",)),
        made_up("one", ("b",), ("a",)),
        made_up("two", ("a",), ("b",)),
    )
    fails(units, "in a circle: two -> one -> two")
    fails((made_up("selfish", ("out",), ("out",)),), "in a circle: selfish -> selfish")


def test_an_input_that_nobody_makes_is_named_with_its_reader() -> None:
    fails((made_up("encode", ("picture",), ("out",)),), "unit 'encode' reads 'picture', which no unit makes")
    fails((), "the task reads 'out', which no unit makes")


def test_an_input_of_a_unit_that_nobody_needs_may_be_missing() -> None:
    units = (*chain(), made_up("encode_audio", ("audio",), ("audio_latents",)))
    assert names(split(units, columns=COLUMNS, wanted=("latents",)).stage1) == ["load_image", "encode_image"]


def test_a_trainable_component_that_nothing_needed_calls_is_named() -> None:
    fails(chain(), "trainable component text_encoder", wanted=("latents",), trainable=["text_encoder", "vae"])


def test_two_units_of_one_name() -> None:
    fails((made_up("encode", ("image",), ("out",)), made_up("encode", ("image",), ("b",))), "called 'encode'")
