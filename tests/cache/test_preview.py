"""`--dry-run` and `--probe`: the plan says beforehand what a run will do, and changes nothing."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from dsplit.cache import estimate, preview, stage1
from dsplit.commands.plan_text import plan_text
from dsplit.errors import ModelError, UsageError
from dsplit.models.load import load_component
from dsplit.models.locate import locate
from dsplit.recipe import ModelOptions
from tests import tiny
from tests.cache.runs import cache, counts

SIZES = ((64, 64), (96, 64), (64, 64))


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prompts = ["a red circle", "ein großer Kreis auf blauem Grund, 漢字", "a red circle", "word " * 600]
    return tiny.dataset(tmp_path_factory.mktemp("plan") / "data", 12, sizes=SIZES, prompts=prompts)


def files(folder: Path) -> dict[Path, int]:
    return {p: p.stat().st_size for p in folder.rglob("*") if p.is_file()}


def test_a_dry_run_writes_nothing_and_loads_no_weights(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(stage1, "load_component", None)
    monkeypatch.setattr(preview, "load_component", lambda m, n, *r: loaded.append(n) or load_component(m, n, *r))
    plan = cache(tmp_path / "cache", metadata, dry_run=True)
    assert loaded == ["tokenizer"]
    assert not (tmp_path / "cache").exists()
    assert plan["rows"] == 12
    assert plan["buckets"] == {"64x64": 8, "96x64": 4}
    assert plan["values"]["encode_image"] == {
        "wanted": 12, "there": 0, "to_encode": 12, "bytes": (8 * 64 + 4 * 96) * 16 * 4
    }  # fmt: skip
    assert {k: v for k, v in plan["values"]["encode_prompt"].items() if k != "bytes"} == {
        "wanted": 4, "there": 0, "to_encode": 4
    }  # fmt: skip
    assert (plan["device"], plan["dtype"], plan["fits"]) == ("cpu", "float32", True)
    assert "why" not in plan
    assert "seconds" not in plan


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_bytes_are_those_then_written(metadata: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "cache"
    plan = cache(out, metadata, dry_run=True, dtype=dtype)
    result = cache(out, metadata, dtype=dtype)
    assert plan["bytes"] == result["bytes"]  # tokens are counted, shapes are formulas
    assert abs(plan["disk"] - sum(files(out).values())) < 0.05 * plan["disk"]


def test_only_what_is_missing_counts(metadata: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"
    cache(out, metadata)
    before = files(out)
    done = cache(out, metadata, dry_run=True)
    assert [(v["there"], v["to_encode"], v["bytes"]) for v in done["values"].values()] == [(12, 0, 0), (4, 0, 0)]
    assert (done["bytes"], done["memory"]) == (0, {"peak": 0})
    other = cache(out, metadata, dry_run=True, resolution="32x32")
    assert other["values"]["encode_image"] == {"wanted": 12, "there": 0, "to_encode": 12, "bytes": 12 * 16 * 16 * 4}
    assert other["values"]["encode_prompt"]["to_encode"] == 0
    assert list(other["memory"]) == ["vae", "peak"]
    assert files(out) == before


@pytest.mark.parametrize(("dtype", "share"), [("float32", 1.0), ("bfloat16", 0.5)])
def test_memory_is_that_of_the_weights(metadata: Path, tmp_path: Path, dtype: str, share: float) -> None:
    import torch

    memory = cache(tmp_path / "cache", metadata, dry_run=True, dtype=dtype)["memory"]
    model = locate(ModelOptions(model=str(tiny.QWEN_IMAGE)))
    for name in ("vae", "text_encoder"):
        loaded = load_component(model, name, torch.float32, "cpu")
        assert memory[name] == share * sum(p.numel() * p.element_size() for p in loaded.parameters())
    assert memory["peak"] == max(memory["vae"], memory["text_encoder"])  # one group at a time
    assert list(memory) == ["text_encoder", "vae", "peak"]  # in the order in which they are loaded


def test_a_disk_that_is_too_small_is_warned_of(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: usage(10_000, 9_000, 1_000))
    plan = cache(tmp_path / "cache", metadata, dry_run=True)
    assert (plan["free"], plan["fits"]) == (1_000, False)
    assert "it does not fit" in plan_text(plan)
    assert "0 MB are free; make room or choose another disk with --out" in capsys.readouterr().err
    cache(tmp_path / "cache", metadata)
    assert "make room" in capsys.readouterr().err


def test_a_probe_adds_a_time_and_keeps_nothing(metadata: Path, tmp_path: Path) -> None:
    out = tmp_path / "cache"
    plan = cache(out, metadata, probe=True)
    assert not out.exists()
    assert list(plan["seconds"]) == ["loading", "encode_prompt", "encode_image", "total"] or list(plan["seconds"]) == [
        "loading", "encode_image", "encode_prompt", "total"
    ]  # fmt: skip
    assert plan["seconds"]["total"] == pytest.approx(sum(list(plan["seconds"].values())[:-1]), abs=0.01)
    assert 0.01 < plan["seconds"]["encode_image"] < 30
    cache(out, metadata)
    assert cache(out, metadata, probe=True)["seconds"] == {"loading": 0.0, "total": 0.0}


def test_a_probe_encodes_three_rows_of_each_unit(
    metadata: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    keep = stage1.Stage1._keep

    def kept(self: Any, calls: Any, *rest: Any) -> None:
        for call in calls:
            seen.append((call.job.unit.name, call.row.place.rpartition(":")[2] if call.row else ""))
        keep(self, calls, *rest)

    monkeypatch.setattr(stage1.Stage1, "_keep", kept)
    cache(tmp_path / "cache", metadata, probe=True)
    assert [row for unit, row in seen if unit == "encode_image"] == ["2", "7", "13"]
    assert len([row for unit, row in seen if unit == "encode_prompt"]) == 3


def test_a_dry_run_tells_of_damaged_weights_and_fetches_nothing(metadata: Path, tmp_path: Path) -> None:
    model = tiny.qwen_image(tmp_path / "model")
    weights = model / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelError, match="truncated"):
        cache(tmp_path / "cache", metadata, model, dry_run=True)
    for path in (model / "vae").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="needs the component 'vae'"):
        cache(tmp_path / "cache", metadata, model, dry_run=True)


def test_the_plan_in_words(metadata: Path, tmp_path: Path) -> None:
    plan = cache(tmp_path / "cache", metadata, why=True)
    lines = plan_text({**plan, "seconds": {"loading": 2.0, "encode_image": 75.0, "total": 77.0}}).splitlines()
    assert lines[0] == "12 rows in 2 buckets: 64x64: 8, 96x64: 4"
    assert lines[1].split() == ["unit", "wanted", "there", "to", "encode", "bytes"]
    assert lines[2].split() == ["encode_image", "12", "0", "12", "57.3", "kB"]
    assert lines[5].startswith("memory: 10.3 MB of weights at most, on cpu in float32 (text_encoder 779 kB, vae 10.3")
    assert lines[6] == "time:   about 1:17 in one process (loading 2.0 s, encode_image 1:15)"
    assert lines[7] == "why:    encode_image 12: first run under this name"
    assert lines[8].endswith("metadata.csv:4 and 9 more")
    assert counts(cache(tmp_path / "cache", metadata))["encode_image"] == (12, 0)


def test_nothing_to_do_needs_no_torch(metadata: Path, tmp_path: Path) -> None:
    import subprocess

    cache(tmp_path / "cache", metadata)
    words = ["--model", str(tiny.QWEN_IMAGE), "--metadata", str(metadata), "--out", str(tmp_path / "cache")]
    code = (
        "import sys; from dsplit.cli import main\n"
        f"sys.argv = ['dsplit', 'cache', '--why', '--device', 'cpu', *{words!r}]\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "nothing is encoded" in done.stdout
