"""Order, buckets, padding: every row is seen, once per repeat, whatever its bucket."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsplit.errors import CacheError, TrainingError
from dsplit.models.registry import registry
from dsplit.training.batches import Order, Reader, buckets, describe, ragged_axes, stack


def order_of(buckets, *args, ids=None, **options):
    """The order of rows in `buckets`."""
    return Order(ids or [f"row{i}" for i in range(len(buckets))], buckets, *args, **options)


class Few:
    """Rows in memory, with one ragged value."""

    def __init__(self, lengths, sizes=None):
        self.lengths, self.sizes = lengths, sizes or [(64, 64)] * len(lengths)
        self.ids = [f"row{i}" for i in range(len(lengths))]

    def place(self, i):
        return f"metadata.csv:{i + 2}"

    def group(self, i):
        return self.sizes[i]

    def variants(self, i):
        return {}

    def columns(self, i, choice=None):
        return {"steps": 2 + i % 2}

    def values(self, i, choice=None):
        n = self.lengths[i]
        return {
            "latents": torch.full((2, 2), float(i)),
            "embeds": torch.arange(1.0, n + 1).repeat(3, 1).T,
            "mask": torch.ones(n, dtype=torch.bool),
        }


@given(
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    batch=st.integers(1, 13),
    repeat=st.integers(1, 3),
    accumulation=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_every_row_is_visited_repeat_times_per_epoch(rows, batch, repeat, accumulation, seed):
    order = order_of(rows, batch, repeat, accumulation, seed)
    steps = list(order.steps(2 * order.steps_per_epoch))
    assert [s.ends_epoch for s in steps].count(True) == 2
    for epoch in (0, 1):
        mine = [s for s in steps if s.epoch == epoch]
        assert len(mine) == order.steps_per_epoch
        assert mine[-1].ends_epoch
        batches = [b for s in mine for b in s.batches]
        assert all(1 <= len(b) <= batch for b in batches)
        assert all(len({rows[i] for i, _ in b}) == 1 for b in batches)
        visits = Counter(v for b in batches for v in b)
        expected = {(i, epoch * repeat + r) for i in range(len(rows)) for r in range(repeat)}
        assert visits == Counter(expected)
        assert Counter(map(len, (s.batches for s in mine[:-1]))).keys() <= {accumulation}
        assert sum(n for _, n in order.counts().values()) == len(batches)


def test_equal_global_batches_have_equal_rows():
    """Batch 4, and 4 times batch 1, see the same rows in the same steps."""
    for step, other in zip(order_of([0] * 10, 4).steps(6), order_of([0] * 10, 1, accumulation=4).steps(6), strict=True):
        assert [v for b in step.batches for v in b] == [v for b in other.batches for v in b]


def test_case_t02_one_two_and_five_rows_make_four_batches():
    order = order_of([(64, 64)] + [(64, 96)] * 2 + [(96, 64)] * 5, batch_size=4)
    assert order.counts() == {(64, 64): (1, 1), (64, 96): (2, 1), (96, 64): (5, 2)}
    assert order.steps_per_epoch == 4
    assert sorted(sum(len(b) for b in s.batches) for s in order.steps(4)) == [1, 1, 2, 4]
    assert order_of([0] * 8, batch_size=9).steps_per_epoch == 1


def test_epochs_differ_in_order_and_seeds_too():
    order = order_of([0] * 20)
    assert order.batches(0) != order.batches(1)
    assert [v[0] for b in order.batches(0) for v in b] != [v[0] for b in order.batches(1) for v in b]
    assert order_of([0] * 20, seed=1).batches(0) != order.batches(0)


def test_a_row_more_leaves_the_order_of_the_others():
    def visited(ids):
        order = order_of([0] * len(ids), repeat=2, seed=3, ids=ids)
        return [(ids[i], visit) for epoch in (0, 1) for ((i, visit),) in order.batches(epoch)]

    ids = [f"row{i}" for i in range(12)]
    assert visited(ids[::-1]) == visited(ids)  # nor does the place of a row in the data set count
    more = visited(["first", *ids, "last"])
    assert [v for v in more if v[0] in ids] == visited(ids)
    assert visited(ids) != [(i, visit) for visit in range(4) for i in ids]


def test_buckets_are_size_and_the_tasks_columns():
    rows = Few([1, 1, 1], [(64, 96), (64, 96), (96, 64)])
    assert buckets(rows, ()) == [((64, 96),), ((64, 96),), ((96, 64),)]
    assert buckets(rows, ("steps",)) == [((64, 96), 2), ((64, 96), 3), ((96, 64), 2)]
    one, _, other = buckets(Few([1, 1, 1]), ("steps",))
    assert one is other  # a million rows hold no million tuples
    assert describe(((64, 96), 3), ("steps",)) == "64x96 steps=3"


def test_a_batch_pads_the_ragged_axis_with_zeros_and_false():
    batch = Reader(Few([2, 4, 1]), {"embeds": 0, "mask": 0})[[(0, 5), (1, 6), (2, 7)]]
    assert batch.ids == ["row0", "row1", "row2"]
    assert batch.visits == [5, 6, 7]
    assert batch.places == ["metadata.csv:2", "metadata.csv:3", "metadata.csv:4"]
    assert batch["steps"] == [2, 3, 2]
    assert batch["mask"].tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert batch["embeds"].shape == (3, 4, 3)
    assert batch["embeds"][:, :, 0].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0]]
    assert batch["latents"][:, 0, 0].tolist() == [0, 1, 2]
    assert len(batch) == 3


def test_a_second_axis_can_be_ragged():
    padded = stack("x", [torch.ones(2, 1), torch.ones(2, 3)], 1, ["a", "b"])
    assert padded[0].tolist() == [[1, 0, 0], [1, 0, 0]]


def test_shapes_that_differ_elsewhere_are_an_error_that_names_rows():
    with pytest.raises(TrainingError, match=r"'x' of different shapes \(m.csv:2: \(1, 2\); m.csv:3: \(1, 3\)\)"):
        stack("x", [torch.ones(1, 2), torch.ones(1, 3)], 0, ["m.csv:2", "m.csv:3"])


def test_an_unreadable_row_comes_back_as_the_error_it_is():
    class Broken(Few):
        def values(self, i, choice=None):
            raise CacheError("damaged")

    error = Reader(Broken([1]), {})[[(0, 0)]]
    assert isinstance(error, CacheError)
    assert str(error) == "damaged"


def test_ragged_axes_come_from_the_units_formulas():
    family, task = registry().family("qwen-image"), registry().task("direct_distill")
    axes = ragged_axes(family.split(task, negative=True))
    assert axes == {
        "prompt_embeds": 0, "prompt_mask": 0, "negative_prompt_embeds": 0, "negative_prompt_mask": 0
    }  # fmt: skip
