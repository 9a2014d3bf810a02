"""The plan: what runs before what, what is in memory together, and what is decoded ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplit.cache import ahead
from dsplit.cache.ahead import decoded
from dsplit.cache.calls import by_job
from dsplit.cache.hardware import device_and_dtype
from dsplit.cache.keys import stamp_of
from dsplit.cache.plan import Call, Job, groups, jobs_of
from dsplit.cache.stage1 import Stage1
from dsplit.cache.store import Store
from dsplit.dataset import Row
from dsplit.errors import UsageError
from dsplit.models import load_image
from dsplit.models.locate import locate
from dsplit.recipe import ModelOptions
from dsplit.units import Split, split, unit
from tests import tiny


@unit(outputs="pixels")
def load(image: Any) -> Any: ...


@unit(outputs="latents", components="vae")
def encode_image(pixels: Any, vae: Any) -> Any: ...


@unit(outputs="hidden", components="text_encoder")
def read_text(prompt: Any, text_encoder: Any) -> Any: ...


@unit(outputs="embeds", components="connector")
def connect(hidden: Any, connector: Any) -> Any: ...


@unit(outputs="seen", components="vae")
def look(latents: Any, hidden: Any, vae: Any) -> Any: ...


def cut(*wanted: str) -> Split:
    units = (load, encode_image, read_text, connect, look)
    return split(units, columns=("image", "prompt"), wanted=wanted)


def calls(result: Split) -> list[Call]:
    return [Call(job.unit.name, job, None, {}, {}) for job in jobs_of(result)]


def names(found: Sequence[Sequence[Sequence[Call]]]) -> list[list[str]]:
    return [[batch[0].key for batch in group] for group in found]


def test_units_that_nobody_stores_run_before_those_that_need_them() -> None:
    (job,) = jobs_of(cut("latents"))
    assert [u.name for u in job.before] == ["load"]
    assert (job.stored, job.read, job.columns) == (("latents",), (), {"image"})


def test_what_is_stored_is_read_and_not_made_twice() -> None:
    image, text, connected, seen = jobs_of(cut("hidden", "embeds", "latents", "seen"))
    assert [j.unit.name for j in (image, text, connected, seen)] == ["encode_image", "read_text", "connect", "look"]
    assert (connected.before, connected.read, connected.columns) == ((), ("hidden",), frozenset())
    assert (seen.before, seen.read) == ((), ("latents", "hidden"))


def test_components_of_unstored_units_are_in_memory_together() -> None:
    (job,) = jobs_of(cut("embeds"))
    assert job.components == {"text_encoder", "connector"}


def test_captions_come_first_and_groups_are_as_few_as_can_be() -> None:
    found = groups(by_job(calls(cut("latents", "hidden"))[::-1]), ["image"])
    assert names(found) == [["read_text"], ["encode_image"]]
    everything = calls(cut("hidden", "embeds", "latents", "seen"))
    for order in (everything, everything[::-1]):
        found = groups(by_job(order), ["image"])
        assert names(found) == [["read_text"], ["connect"], ["encode_image", "look"]]


@unit(outputs="a", shapes={"a": "L"})
def count(prompt: list[str]) -> torch.Tensor:
    return torch.tensor([[float(len(p))] for p in prompt])


@unit(outputs="b", shapes={"b": "L"})
def double(a: torch.Tensor) -> torch.Tensor:
    return a * 2


def test_a_job_reads_what_an_earlier_one_stored(tmp_path: Path) -> None:
    first, second = jobs_of(split((count, double), columns=("prompt",), wanted=("a", "b")))
    store = Store(tmp_path)
    a, b = "a" * 32, "b" * 32
    made = [Call("1", first, None, {"a": a}, {}), Call("2", second, None, {"b": b}, {"a": a})]
    model = locate(ModelOptions(model=str(tiny.QWEN_IMAGE)))
    plan: Any = None
    outcome = Stage1(plan, model, store, "float32", "cpu", {}, 0).run(made)
    assert outcome.encoded == {"count": 1, "double": 1}
    assert (store.get(a).tolist(), store.get(b).tolist()) == ([0.0], [0.0])


def picture_row(folder: Path, n: int) -> Row:
    path = tiny.picture(folder / f"{n}.png", seed=n)
    return Row(str(n), "metadata.csv", n + 2, {"image": path.name}, {"image": path}, (64, 64), (32, 32))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_come_decoded_in_order(tmp_path: Path, workers: int) -> None:
    rows = [picture_row(tmp_path, n) for n in range(9)]
    rows[4].files["image"].write_bytes(b"no picture")
    stamps = {row.files["image"]: stamp_of(row.files["image"]) for row in rows}
    job = Job(load_image, (), ("pixels",), (), frozenset({"image"}))
    asked = [Call(row.id, job, row, {}, {}) for row in rows]
    got = [one for batch in decoded([asked[:3], asked[3:]], [load_image], stamps, workers) for one in batch]
    assert [call.key for call, _ in got] == [str(n) for n in range(9)]
    assert isinstance(got[4][1], str)
    for n, (_, values) in enumerate(got):
        if n != 4:
            given = {"image": [rows[n].files["image"]], "size": [(32, 32)], "view": [rows[n].view]}
            assert torch.equal(values["pixels"], load_image(given, {})["pixels"])


def test_only_a_few_pictures_are_decoded_ahead(tmp_path: Path) -> None:
    rows = [picture_row(tmp_path, n) for n in range(20)]
    stamps = {row.files["image"]: stamp_of(row.files["image"]) for row in rows}
    started: list[Path] = []

    @unit(outputs="who")
    def whose(image: list[Path]) -> torch.Tensor:
        started.extend(image)
        return torch.tensor([threading.get_ident()])

    job = Job(whose, (), ("who",), (), frozenset({"image"}))
    coming = decoded([[Call(r.id, job, r, {}, {})] for r in rows], [whose], stamps, 2)
    [(_, first)] = next(coming)
    assert first["who"].item() != threading.get_ident()
    time.sleep(0.1)
    assert len(started) <= 2 * ahead.AHEAD
    coming.close()
    assert len(started) <= 2 * ahead.AHEAD + 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cpu"}, ("cpu", "float32")),
        ({"device": "cpu", "dtype": "bf16"}, ("cpu", "bfloat16")),
        ({"device": "cpu", "dtype": "float16"}, ("cpu", "float16")),
    ],
)
def test_device_and_dtype(options: dict[str, str], expected: tuple[str, str]) -> None:
    assert device_and_dtype(ModelOptions(**options)) == expected
    with pytest.raises(UsageError, match="unknown dtype 'half'"):
        device_and_dtype(ModelOptions(device="cpu", dtype="half"))


def test_the_default_is_what_torch_says() -> None:
    from dsplit.models.load import pick_device, pick_dtype

    device = pick_device(None)
    assert device_and_dtype(ModelOptions()) == (str(device), str(pick_dtype(None, device)).removeprefix("torch."))
