"""Faults of weight files, found from headers: each kind with its own words, all of a folder at once."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dsplit.models.weights import faults, notes
from tests import tiny

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 1088\n" % (b"0" * 64)


def write(path: Path, **shapes: tuple[int, ...]) -> Path:
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, path)
    return path


def with_header(path: Path, header: str, body: int = 0) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(body))
    return path


def words(path: Path) -> list[tuple[str, str]]:
    """(file name, fault) of each problem."""
    return [(Path(p.where).name, p.what) for p in faults(path)]


def test_a_sound_model_folder_has_no_faults():
    assert faults(tiny.QWEN_IMAGE) == []
    assert notes(tiny.QWEN_IMAGE) == []


def test_truncated_states_both_sizes(tmp_path):
    path = write(tmp_path / "model.safetensors", a=(16, 16))
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[: whole // 2])
    assert words(path) == [("model.safetensors", f"truncated: {whole // 2} of {whole} bytes")]


def test_cut_within_the_header(tmp_path):
    path = write(tmp_path / "model.safetensors", a=(16, 16))
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    path.write_bytes(path.read_bytes()[:20])
    expected = f"truncated: 20 of at least {8 + length} bytes (cut within the header)"
    assert words(path) == [("model.safetensors", expected)]


def test_longer_than_its_header_says(tmp_path):
    path = write(tmp_path / "model.safetensors", a=(2,))
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"more")
    assert words(path) == [("model.safetensors", f"{whole + 4} bytes, but its header describes {whole}")]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "empty file (0 bytes)"),
        (b"abc", "not a safetensors header"),
        (bytes(1024), "not a safetensors header"),
        (b"<html>" + b"x" * 2000, "not a safetensors header"),
        (POINTER, "Git-LFS pointer, not weights"),
        (struct.pack("<Q", 5) + b"{abc}", "not a safetensors header (no JSON)"),
        (struct.pack("<Q", 4) + b"[12]", "not a safetensors header"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path, content, what):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert words(path) == [("model.safetensors", what)]


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ('{"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}', "no finite size"),
        ('{"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}', "NaN is not finite"),
        ('{"dtype": "F32", "shape": [1], "data_offsets": [0, Infinity]}', "Infinity is not finite"),
        ('{"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}', "no finite size"),
        ('{"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}', "disagree"),
        ('{"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}', "disagree"),
        ('{"dtype": "F32", "shape": [1]}', "lacks dtype, shape or data_offsets"),
    ],
)
def test_a_header_without_finite_sizes(tmp_path, entry, part):
    path = with_header(tmp_path / "model.safetensors", f'{{"a": {entry}}}', body=4)
    [(_, what)] = words(path)
    assert what.startswith("not a safetensors header")
    assert part in what


def test_a_missing_shard_is_named(tmp_path):
    write(tmp_path / "model-00001-of-00002.safetensors", a=(2,))
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert words(tmp_path) == [(index.name, "shard model-00002-of-00002.safetensors missing")]
    write(tmp_path / "model-00002-of-00002.safetensors", c=(2,))
    what = "model-00002-of-00002.safetensors lacks 1 tensors that it names, e.g. 'b'"
    assert words(tmp_path) == [(index.name, what)]
    write(tmp_path / "model-00002-of-00002.safetensors", b=(2,))
    assert words(tmp_path) == []
    index.unlink()
    assert words(tmp_path) == [(tmp_path.name, "no index names the shards of model")]


def test_an_index_may_not_point_out_of_its_folder(tmp_path):
    write(tmp_path / "out.safetensors", a=(2,))
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../out.safetensors"}}')
    assert words(folder) == [("model.safetensors.index.json", "names a shard outside its folder: '../out.safetensors'")]


def test_a_broken_index(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert words(tmp_path) == [("model.safetensors.index.json", "not an index of shards (no weight_map)")]


def test_all_faults_of_a_model_at_once_and_sound_files_are_not_named(tmp_path):
    model = tiny.qwen_image(tmp_path / "m")
    vae = model / "vae" / "diffusion_pytorch_model.safetensors"
    whole = vae.stat().st_size
    vae.write_bytes(vae.read_bytes()[:-7])
    (model / "text_encoder" / "model.safetensors").write_bytes(POINTER)
    (model / "tokenizer" / "tokenizer.json").write_bytes(POINTER)
    (model / "transformer" / "model.safetensors.incomplete").write_bytes(b"half")
    found = {(Path(p.where).relative_to(model).as_posix(), p.what) for p in faults(model)}
    assert found == {
        ("vae/diffusion_pytorch_model.safetensors", f"truncated: {whole - 7} of {whole} bytes"),
        ("text_encoder/model.safetensors", "Git-LFS pointer, not weights"),
        ("tokenizer/tokenizer.json", "Git-LFS pointer, not its content"),
        ("transformer/model.safetensors.incomplete", "a download that was not finished"),
    }
    assert all(p.remedy for p in faults(model))


def test_pickles_are_noted_and_never_enough(tmp_path):
    write(tmp_path / "model.safetensors", a=(2,))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert faults(tmp_path) == []
    [note] = notes(tmp_path)
    assert note.where == str(tmp_path / "pytorch_model.bin")
    assert note.what.startswith("not used: a pickle")
    (tmp_path / "model.safetensors").unlink()
    [(_, what)] = words(tmp_path)
    assert what == "weights exist only as a pickle (pytorch_model.bin), which dsplit never loads"


def test_nothing_to_check_is_a_fault(tmp_path):
    assert words(tmp_path) == [(tmp_path.name, "no weight files (*.safetensors) here or below")]
    assert words(tmp_path / "nope") == [("nope", "no such file or folder")]


def test_a_dead_link(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert words(tmp_path) == [("model.safetensors", "a link to a file that is gone")]


def test_hidden_folders_are_left_alone(tmp_path):
    write(tmp_path / "model.safetensors", a=(2,))
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.safetensors").write_bytes(b"")
    assert faults(tmp_path) == []
