"""The planner: keys of every variant, calls that are kept small and rebuilt, dry runs over many rows."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsplit.cache.calls import Calls, KeySet
from dsplit.cache.draft import Draft
from dsplit.cache.estimate import COUNTED, value_bytes
from dsplit.cache.keys import key_of
from dsplit.cache.manifest import Entry
from dsplit.cache.planner import Plan, Planner
from dsplit.dataset import Row
from dsplit.dataset.rows import View
from dsplit.errors import CacheError, Problem
from dsplit.models.family import ModelFamily
from dsplit.models.registry import registry
from dsplit.units import unit

PICTURES = [Path(f"{k}.png") for k in range(50)]
FILES = {path: key_of(path.name) for path in PICTURES}


@unit(outputs="pixels", shapes={"pixels": "3, H, W"})
def load(image: Any, size: Any, view: Any) -> Any: ...


@unit(outputs="latents", components="vae", shapes={"latents": "4, H/8, W/8"})
def encode_image(pixels: Any, vae: Any) -> Any: ...


@unit(outputs="prompt_embeds", components="text_encoder", shapes={"prompt_embeds": "L, 8"})
def encode_prompt(prompt: Any, text_encoder: Any) -> Any: ...


@unit(outputs="seen", components="text_encoder", shapes={"seen": "L, 8"})
def look(prompt: Any, latents: Any, text_encoder: Any) -> Any: ...


@unit(outputs="velocity", components="transformer")
def denoise(noisy_latents: Any, sigma: Any, prompt_embeds: Any, seen: Any, transformer: Any) -> Any: ...


@pytest.fixture
def family() -> ModelFamily:
    real = registry().families["qwen-image"]
    return replace(real, units=(load, encode_image, encode_prompt, look), denoise=denoise, token_count=None)


def planned(family: ModelFamily, rows: Sequence[Row]) -> Plan:
    planner = Planner(family, registry().task("sft"), ())
    return planner.plan(rows, FILES, {name: key_of(name) for name in planner.components}, "float32")


def row(i: int, caption: str, **variants: Any) -> Row:
    columns = {"image": f"{i % 50}.png", "prompt": caption}
    size = ((64, 64), (96, 64))[i % 2]
    return Row(f"{i:032x}", "m.csv", i + 2, columns, {"image": PICTURES[i % 50]}, (96, 64), size, variants=variants)


VIEWS = (View(0, 0), View(32, 0), View(0, 0, True))
VARIED = replace(row(0, "x", prompt=("x", "y"), view=VIEWS), view=VIEWS[0])


def test_keys_stand_in_the_order_of_the_axes(family: ModelFamily) -> None:
    plan = planned(family, [VARIED])
    entry = plan.entries[0]
    assert {name: len(keys) for name, keys in entry.keys.items()} == {"latents": 3, "prompt_embeds": 2, "seen": 6}
    assert entry.variants == {"prompt": 2, "view": 3}
    for p in range(2):
        for v in range(3):
            alone = replace(VARIED.pick({"prompt": p, "view": v}), variants={})
            (other,) = planned(family, [alone]).entries
            for name, keys in {"latents": [v], "prompt_embeds": [p], "seen": [3 * p + v]}.items():
                assert other.keys[name] == [entry.keys[name][k] for k in keys]


def test_calls_come_back_as_they_are_made(family: ModelFamily) -> None:
    plan = planned(family, [VARIED])
    calls = {(call.job.unit.name, k): call for k, call in enumerate(plan.calls)}
    assert Counter(name for name, _ in calls) == {"encode_image": 3, "encode_prompt": 3, "look": 6}
    looks = [call for call in plan.calls if call.job.unit.name == "look"]
    keys = plan.entries[0].keys
    for k, call in enumerate(looks):
        assert call.row == VARIED.pick({"prompt": k // 3, "view": k % 3})
        assert call.keys == {"seen": keys["seen"][k]}
        assert call.given == {"latents": keys["latents"][k % 3]}
    (empty,) = (call for call in plan.calls if call.row is None)
    assert empty.keys == plan.empty == {"prompt_embeds": empty.keys["prompt_embeds"]}  # none of what reads more
    assert [call.row.view for call in plan.calls if call.job.unit.name == "encode_image" and call.row] == list(VIEWS)


def test_calls_are_parted_and_joined(family: ModelFamily) -> None:
    plan = planned(family, [row(i, f"caption {i // 2}") for i in range(200)])
    calls = plan.calls
    assert calls.counts() == {"encode_image": 50, "encode_prompt": 101, "look": 200}
    assert calls.value_count == len(set(calls.values())) == 351
    shares = [calls.share(rank, 3) for rank in range(3)]
    assert sorted(call.key for share in shares for call in share) == sorted(call.key for call in calls)
    assert min(map(len, shares)) > 90
    parts = calls.by_job()
    assert {name: len(part) for name, part in parts.items()} == {"encode_image": 50, "encode_prompt": 101, "look": 200}
    assert [call.key for call in parts["encode_image"][3:5]] == [parts["encode_image"][k].key for k in (3, 4)]
    assert parts["encode_image"].shapes() == {((64, 64), 0): 25, ((96, 64), 0): 25}
    assert parts["encode_prompt"].shapes() == {((64, 64), 9): 10, ((64, 64), 10): 90, ((0, 0), 0): 1}
    assert len(calls.longer(10)) == 90 + 180
    there = set(parts["encode_image"].values())
    assert calls.without(lambda keys: there & set(keys)).counts() == {"encode_prompt": 101, "look": 200}


def test_faults_are_told_of_every_row_that_needs_the_value(family: ModelFamily) -> None:
    plan = planned(family, [row(i, f"caption {i // 2}") for i in range(6)])
    bad = plan.calls.by_job()["encode_prompt"][1]
    problems = plan.spread({bad.key: [Problem("m.csv:4", "NaN", "mend it")]})
    assert [(p.where, p.what) for p in problems[bad.key]] == [("m.csv:4", "NaN"), ("m.csv:5", "NaN")]
    assert [entry.fault for entry in plan.with_faults(problems)] == ["", "", "NaN", "NaN", "", ""]
    good = plan.without({bad.key})
    assert [entry.place for entry in good.entries] == [f"m.csv:{k}" for k in (2, 3, 6, 7)]
    assert (len(good.calls), good.empty) == (len(plan.calls) - 1, plan.empty)


class Many(Sequence[Row]):
    """Rows that are made when they are asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if i >= self._count:
            raise IndexError
        return row(i, f"caption {i} " + "and on " * (i * 7919 % 40))


def test_a_row_takes_little_memory(family: ModelFamily) -> None:
    rows, simple = (
        Many(20_000),
        replace(family, units=family.units[:3], denoise=replace(denoise, inputs=denoise.inputs[:3])),
    )
    planned(simple, Many(10))
    tracemalloc.start()
    try:
        plan = planned(simple, rows)
        missing = plan.missing(lambda keys: set())
        sizes = value_bytes(missing, {}, "float32")
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert missing.counts() == {"encode_image": 50, "encode_prompt": 20_001}
    assert sizes["encode_image"] == 50 * 4 * 8 * 10 * 4
    assert len(plan.entries) == 20_000
    assert used < 20_000 * 120  # an Entry and a Call of each row would take 3,000 bytes
    assert peak < 20_000 * 200


def test_tokens_are_counted_of_some_captions_and_the_others_are_like_them(family: ModelFamily) -> None:
    count = 3 * COUNTED
    plan = planned(family, Many(count))
    texts = Counter[str]()

    def tokens(text: str) -> int:
        texts[text] += 1
        return min(len(text.split()), 30)  # with a limit, as families have one

    calls = plan.calls.by_job()["encode_prompt"]
    estimate = value_bytes(calls, {}, "float32", tokens)["encode_prompt"]
    assert len(texts) <= COUNTED + 1
    exact = sum(tokens(call.texts[0]) for call in calls) * 8 * 4
    assert estimate == pytest.approx(exact, rel=0.01)
    few = calls[:100]
    assert value_bytes(few, {}, "float32", tokens)["encode_prompt"] == sum(tokens(c.texts[0]) for c in few) * 8 * 4


@given(numbers=st.lists(st.integers(0, 3000)))
def test_a_key_set_is_a_set_in_order(numbers: list[int]) -> None:
    keys, found = KeySet(), dict[str, int]()
    for number in numbers:
        key = key_of(str(number))
        assert keys.find(key) == found.get(key)
        assert keys.add(key) == (key not in found)
        found.setdefault(key, len(found))
    assert len(keys) == len(found)
    assert [keys.key(k) for k in range(len(keys))] == list(found)
    assert all(keys.find(key) == number and key in keys for key, number in found.items())


def test_a_key_set_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeySet()
    names = [random.Random(n % 3000).randbytes(16).hex() for n in range(5000)]
    assert sum(map(keys.add, names)) == len(keys) == 3000
    assert [keys.find(name) for name in names] == [n % 3000 for n in range(5000)]
    assert keys.find("0" * 32) is None
    alike = [f"{'ab' * 6}{n:020x}" for n in range(100)]  # all want one slot
    assert all(map(keys.add, alike))
    assert [keys.find(name) for name in alike] == list(range(3000, 3100))


def entries(count: int) -> Iterator[Entry]:
    ids = [random.Random(n).randbytes(16).hex() for n in range(count)]
    yield from (Entry(name, f"größe.csv:{n}", (64, 64), {"n": n}, {}, {}, {}) for n, name in enumerate(ids))


def test_a_draft_gives_back_its_rows() -> None:
    rows = list(entries(2500))  # more than are written at once
    draft = Draft(rows)
    assert list(draft) == rows
    assert [draft[7], draft[-1], *draft[5:8]] == [rows[7], rows[-1], *rows[5:8]]
    assert list(draft.ids) == [entry.id for entry in rows]
    assert [draft[i].id for i in draft.by_id()] == sorted(entry.id for entry in rows)
    data = b"".join(draft.chunks())
    assert (len(data), data.count(b"\n")) == (draft.size, 2500)
    odd = draft.changed(lambda entry: entry._replace(fault="odd") if entry.columns["n"] % 2 else None)
    assert [entry.columns["n"] for entry in odd] == list(range(1, 2500, 2))
    assert list(draft) == rows
    assert Draft(rows[:3]).digest == Draft(rows[:3]).digest != Draft(rows[:2]).digest


def test_no_room_for_a_draft_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft(entries(10))
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(draft, "_file", full)
        with pytest.raises(CacheError, match=r"cannot write there: No space left on device; set TMPDIR"):
            list(draft)


def test_a_part_of_all_calls_is_no_copy(family: ModelFamily) -> None:
    plan = planned(family, [row(i, "x") for i in range(4)])
    assert isinstance(plan.calls[1:], Calls)
    assert plan.calls[1:].table is plan.calls.table
    with pytest.raises(IndexError):
        plan.calls[len(plan.calls)]
