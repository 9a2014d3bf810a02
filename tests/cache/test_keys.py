"""Keys change with everything that makes a value, and with nothing else."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsplit.cache import keys
from dsplit.cache.files import claim_folder, remove_leftovers, write_file
from dsplit.cache.keys import Digests, call_key, content_digest, key_of, output_key, text_key
from dsplit.errors import UnitError
from dsplit.units import unit
from tests.cache.runs import child


@unit(outputs="embeds mask", components="encoder", version=1)
def encode_prompt(prompt: list[str], encoder: object) -> tuple[int, int]:
    return 1, 2


INPUTS, COMPONENTS = {"prompt": text_key("a dog")}, {"encoder": "digest"}
KEY = call_key(encode_prompt, INPUTS, COMPONENTS, "float32")


def test_a_key_is_stable() -> None:
    assert KEY == "8db3b1e345468aae92dd113d1ae75285"  # a change here makes every cache stale: do it knowingly


@pytest.mark.parametrize(
    ("changed", "inputs", "components", "dtype"),
    [
        (replace(encode_prompt, version=2), INPUTS, COMPONENTS, "float32"),
        (replace(encode_prompt, name="encode_text"), INPUTS, COMPONENTS, "float32"),
        (encode_prompt, {"prompt": text_key("a cat")}, COMPONENTS, "float32"),
        (encode_prompt, INPUTS, {"encoder": "other"}, "float32"),
        (encode_prompt, INPUTS, COMPONENTS, "bfloat16"),
        (replace(encode_prompt, sources=("dsplit/units.py",)), INPUTS, COMPONENTS, "float32"),
        (replace(encode_prompt, function=text_key), INPUTS, COMPONENTS, "float32"),  # of another module
    ],
)
def test_each_part_of_a_key_counts(changed: object, inputs: dict, components: dict, dtype: str) -> None:
    assert call_key(changed, inputs, components, dtype) != KEY  # type: ignore[arg-type]


def test_the_bytes_of_a_source_count_and_it_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "some_library" / "prompts" / "template.py"
    source.parent.mkdir(parents=True)
    (tmp_path / "some_library" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    templated = replace(encode_prompt, sources=("some_library/prompts/template.py",))
    made = []
    for template in ("describe: {}", "draw: {}"):
        source.write_text(template)
        keys._source_digest.cache_clear()
        made.append(call_key(templated, INPUTS, COMPONENTS, "float32"))
    assert len({KEY, *made}) == 3
    with pytest.raises(UnitError, match=r"'some_library/gone\.py', which is not installed"):
        call_key(replace(encode_prompt, sources=("some_library/gone.py",)), INPUTS, COMPONENTS, "float32")


def test_another_use_of_a_unit_shares_its_values() -> None:
    negative = encode_prompt.renamed("encode_negative", prompt="negative_prompt", embeds="negative_embeds")
    key = call_key(negative, {"negative_prompt": text_key("a dog")}, COMPONENTS, "float32")
    assert key == KEY
    assert output_key(key, negative, "negative_embeds") == output_key(KEY, encode_prompt, "embeds")
    assert output_key(key, negative, "mask") != output_key(key, negative, "negative_embeds")


def test_typed_values_have_keys_of_their_own() -> None:
    assert len({text_key(v) for v in ("7", 7, 7.0, None, "None", "", (7, 8), (8, 7))}) == 8


def test_parts_do_not_run_together() -> None:
    assert key_of("ab", "c") != key_of("a", "bc")


def test_the_content_digest_is_a_hash_over_everything() -> None:
    entries = [("r1", "latents", "k1", 5), ("r2", "latents", "k2", 6)]
    assert content_digest(iter(entries)) == key_of("r1", "latents", "k1", "5", "r2", "latents", "k2", "6")
    assert content_digest(entries) != content_digest([("r1", "latents", "k1", 6), ("r2", "latents", "k2", 6)])


def old(path: Path, text: str) -> Path:
    path.write_text(text)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time has passed since the files of the test were made."""
    now = time.time_ns
    monkeypatch.setattr(keys.time, "time_ns", lambda: now() + 10_000_000_000)


@pytest.mark.usefixtures("settled")
def test_digests_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = old(tmp_path / "picture.png", "one")
    digests = Digests(tmp_path)
    first = digests.of([path])[path]
    digests.save()
    monkeypatch.setattr(keys, "file_digest", lambda _: "hashed again")
    assert Digests(tmp_path).of([path])[path] == first


@pytest.mark.usefixtures("settled")
def test_a_file_with_its_mtime_set_back_is_hashed_again(tmp_path: Path) -> None:
    path = old(tmp_path / "picture.png", "one")
    digests = Digests(tmp_path)
    first = digests.of([path])[path]
    digests.save()
    time.sleep(0.02)  # more than a tick of the file system's clock
    old(path, "two")
    assert Digests(tmp_path).of([path])[path] != first


def test_a_file_that_may_still_change_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("one")
    digests = Digests(tmp_path)
    digests.of([path])
    digests.save()
    assert not (tmp_path / keys.MEMORY).exists()


def test_a_damaged_memory_is_forgotten(tmp_path: Path) -> None:
    path = old(tmp_path / "picture.png", "one")
    for text in ("", "[1]", "{", json.dumps({str(path): 3})):
        (tmp_path / keys.MEMORY).write_text(text)
        assert Digests(tmp_path).of([path])[path] == keys.file_digest(path)


def test_leftovers_of_dead_runs_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    import socket

    host, nobody, shard = socket.gethostname(), 2**22 + 1, f"shards/encode_image/.{'a' * 32}.safetensors"
    dead = [f".digests.json.{host}.{nobody}.tmp", f".dsplit.{host}.{nobody}.tmp"]
    dead += [f"manifests/.my set.jsonl.{host}.{nobody}.tmp", f"{shard}.{host}.{nobody}.tmp"]
    forgotten = [f"{shard}.another.host.1.tmp"]
    staying = [f"{shard}.{host}.{os.getppid()}.tmp", "manifests/.default.jsonl.another.host.1.tmp"]
    foreign = [f".report.{host}.{nobody}.tmp", ".x.tmp", ".dsplit.tmp", f"logs/.digests.json.{host}.{nobody}.tmp"]
    foreign += [f"shards/.{'a' * 32}.safetensors.{host}.{nobody}.tmp", f"shards/a/.b.safetensors.{host}.{nobody}.tmp"]
    for name in (*dead, *forgotten, *staying, *foreign):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in (*forgotten, *foreign):
        os.utime(tmp_path / name, (1_000_000_000, 1_000_000_000))
    assert remove_leftovers(tmp_path) == 5
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert left == sorted([*staying, *foreign])


def test_what_a_dead_write_leaves_is_recognised(tmp_path: Path) -> None:
    """The names that write_file and claim_folder make, by a process that dies before it can tidy up."""

    def die(*args: object) -> None:
        os._exit(0)

    def work(write: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            os.replace = die  # type: ignore[assignment]
            Path.unlink = die  # type: ignore[assignment]
            write()

        return run

    names = ("digests.json", "manifests/default.jsonl", f"shards/encode_image/{'0' * 32}.safetensors")
    for name in names:
        assert child(work(lambda name=name: write_file(tmp_path / name, [b"x"]))) == 0  # type: ignore[misc]
    assert child(work(lambda: claim_folder(tmp_path))) == 0
    assert len(list(tmp_path.rglob(".*.tmp"))) == 4
    assert remove_leftovers(tmp_path) == 4
