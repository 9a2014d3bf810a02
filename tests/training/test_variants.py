"""Variants and prompt dropout: what is drawn at each visit, and what that leaves as it was."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dsplit.training.batches import Reader
from dsplit.training.rng import chance, variant
from tests.training.conftest import losses, make, model
from tests.training.test_batches import Few

ROWS = [f"{k:032x}" for k in range(500)]


class Varied(Few):
    """Rows in memory with variants; the last of 3 rows has none. Their columns say what was chosen."""

    def variants(self, i):
        return [{"prompt": 3, "view": 2}, {"view": 2}, {}][i]

    def columns(self, i, choice=None):
        return {"chosen": dict(choice or {})}


def drawn(rows: Varied, visits: int, **options) -> list[list[dict]]:
    """The choices of each row at its visits."""
    reader = Reader(rows, {"embeds": 0, "mask": 0}, **options)
    return [[reader[[(i, v)]]["chosen"][0] for v in range(visits)] for i in range(len(rows.ids))]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_every_variant_is_drawn_once_in_each_cycle(count):
    """Over 12 visits each of 3 captions is drawn 4 times, whatever the row."""
    for row in ROWS[:50]:
        visits = [variant(0, row, v, "prompt", count) for v in range(4 * count)]
        for start in range(0, len(visits), count):
            assert sorted(visits[start : start + count]) == list(range(count))
        assert set(Counter(visits).values()) == {4}


def test_all_orders_of_a_cycle_occur_equally_often():
    """The 6 orders of 3 captions over 3,000 cycles: 500 each, give or take 4 standard deviations."""
    orders = Counter(
        tuple(variant(0, row, 3 * cycle + k, "prompt", 3) for k in range(3)) for row in ROWS for cycle in range(6)
    )
    assert len(orders) == 6
    assert all(abs(n - 500) < 4 * (3000 * 1 / 6 * 5 / 6) ** 0.5 for n in orders.values()), orders


def test_a_draw_depends_on_seed_row_cycle_and_axis():
    def sequence(seed=0, row="a", axis="prompt", start=0):
        return [variant(seed, row, start + v, axis, 4) for v in range(16)]

    draws = [sequence(), sequence(seed=1), sequence(row="b"), sequence(axis="view"), sequence(start=16)]
    assert len(set(map(tuple, draws))) == 5
    assert sequence() == draws[0]


def test_two_axes_are_drawn_independently():
    """3 captions by 2 views over 500 rows and 6 visits: chi-square of the table, 2 degrees of freedom."""
    pairs = Counter((variant(0, r, v, "prompt", 3), variant(0, r, v, "view", 2)) for r in ROWS for v in range(6))
    assert sum(pairs.values()) == 3000
    assert len(pairs) == 6
    assert sum((n - 500) ** 2 / 500 for n in pairs.values()) < 13.8  # p = 0.001
    equal = Counter(variant(0, r, v, "prompt", 2) == variant(0, r, v, "view", 2) for r in ROWS for v in (0, 1))
    assert abs(equal[True] - 500) < 4 * 22.4  # a cycle of two is in step with another one or not: 500 coins, twice


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_share_of_dropped_visits_is_the_one_asked_for(share):
    visits = [(row, v) for row in ROWS for v in range(20)]
    dropped = sum(chance(0, row, v, "prompt dropout") < share for row, v in visits)
    assert abs(dropped - share * 10_000) <= 4 * (10_000 * share * (1 - share)) ** 0.5
    by_visit = Counter(v for row, v in visits if chance(0, row, v, "prompt dropout") < share)
    assert all(abs(by_visit[v] - share * 500) <= 4.5 * (500 * share * (1 - share)) ** 0.5 for v in range(20))


def test_more_dropout_drops_what_less_dropped_and_more():
    few, many = ({(r, v) for r in ROWS for v in range(4) if chance(3, r, v, "x") < p} for p in (0.1, 0.3))
    assert few < many


def test_a_reader_draws_a_variant_of_each_axis_for_each_visit():
    both, view, none = drawn(Varied([1, 1, 1]), 12)
    assert Counter(c["prompt"] for c in both) == {0: 4, 1: 4, 2: 4}
    assert Counter(c["view"] for c in both) == {0: 6, 1: 6}
    assert Counter(c["view"] for c in view) == {0: 6, 1: 6}
    assert [set(c) for c in view] == [{"view"}] * 12
    assert none == [{}] * 12
    assert both == [
        {"prompt": variant(0, "row0", v, "prompt", 3), "view": variant(0, "row0", v, "view", 2)} for v in range(12)
    ]
    assert drawn(Varied([1, 1, 1]), 12, seed=1)[0] != both


def test_dropout_empties_the_prompt_of_rows_with_and_without_variants_and_moves_no_other_draw():
    plain, dropped = drawn(Varied([1, 1, 1]), 40), drawn(Varied([1, 1, 1]), 40, prompt_dropout=0.4)
    for before, after in zip(plain, dropped, strict=True):
        gone = [c.get("prompt", 0) is None for c in after]
        assert 6 <= sum(gone) <= 26
        for was, now, is_gone in zip(before, after, gone, strict=True):
            assert now == ({**was, "prompt": None} if is_gone else was)
    assert all(c["prompt"] is None for row in drawn(Varied([1, 1, 1]), 5, prompt_dropout=1.0) for c in row)


def test_a_draw_does_not_depend_on_the_batch_or_the_reader():
    rows = Varied([1, 1, 1])
    reader = Reader(rows, {"embeds": 0, "mask": 0}, seed=2, prompt_dropout=0.5)
    visits = [(i, v) for v in range(6) for i in (2, 0, 1)]
    alone = [reader[[visit]]["chosen"][0] for visit in visits]
    assert reader[visits]["chosen"] == alone
    assert Reader(rows, {"embeds": 0, "mask": 0}, seed=2, prompt_dropout=0.5)[visits]["chosen"] == alone


def test_one_caption_and_no_dropout_give_the_losses_of_before_there_were_variants(three, distill, tmp_path: Path):
    """Recorded before; other processors may differ in the last bits."""
    three.train(tmp_path / "sft", max_steps=6, lr=1e-3, repeat=2, batch_size=2)
    sft = [3.6811883449554443, 3.166356086730957, 4.2730488777160645]
    sft += [3.3267316818237305, 3.2104291915893555, 3.0288169384002686]
    assert losses(tmp_path / "sft") == pytest.approx(sft, rel=1e-5)
    distill.train(tmp_path / "distill", max_steps=4, lr=1e-3, batch_size=2)
    expected = [2.094536066055298, 1.3238470554351807, 1.162078619003296, 1.879385232925415]
    assert losses(tmp_path / "distill") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("trained", ["transformer", "text_encoder"])
def test_dropout_split_and_unsplit_are_equal(three, tmp_path: Path, trained: str):
    made = three if trained == "transformer" else make(tmp_path, 3, model(trainable=trained))
    options = {"max_steps": 6, "lr": 1e-3, "batch_size": 2, "repeat": 2}
    made.train(tmp_path / "split", prompt_dropout=0.4, **options)
    made.train(tmp_path / "unsplit", prompt_dropout=0.4, split=False, **options)
    made.train(tmp_path / "none", **options)
    assert losses(tmp_path / "split") == losses(tmp_path / "unsplit")
    assert losses(tmp_path / "split") != losses(tmp_path / "none")
    recipe = json.loads((tmp_path / "split" / "recipe.json").read_text())
    assert recipe["train"]["prompt_dropout"] == 0.4
