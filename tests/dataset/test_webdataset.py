"""WebDataset shards: what makes a row, and that nothing in a tar is passed over in silence."""

from __future__ import annotations

import io
import json
import os
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsplit.dataset import Dataset, read_dataset, table
from dsplit.dataset.packed import Packed
from dsplit.errors import DataError, UsageError
from dsplit.models.family import Column
from dsplit.recipe import DataOptions
from tests.dataset.make import COLUMNS, DISTILL
from tests.dataset.make import metadata as written
from tests.dataset.packs import picture, shard

EDIT = (*COLUMNS, Column("edit_image", "file"))


def read(folder: Path, kinds: tuple[Column, ...] = COLUMNS, **options: object) -> Dataset:
    return read_dataset(DataOptions(data=str(folder), **options), kinds, 16)  # type: ignore[arg-type]


def problems(folder: Path, kinds: tuple[Column, ...] = COLUMNS, **options: object) -> list[str]:
    with pytest.raises(DataError) as raised:
        read(folder, kinds, **options)
    return [str(problem).removeprefix(f"{folder}/") for problem in raised.value.problems]


@pytest.fixture
def png(tmp_path: Path) -> bytes:
    return picture(tmp_path)


def test_rows_of_several_shards(tmp_path: Path) -> None:
    images = [picture(tmp_path, seed, (64, 32 + 16 * seed)) for seed in range(3)]
    shard(tmp_path / "b.tar", [("x/0003.PNG", images[2]), ("x/0003.caption", "third")])
    members = [("./0001.png", images[0]), ("0002.json", '{"prompt": "second", "seed": 7}')]
    members += [("0001.txt", "first, «ü»\n"), ("._0001.png", b"left by macOS"), ("0002.png", images[1])]
    shard(tmp_path / "a.tar", members)
    data = read(tmp_path, (*COLUMNS, Column("seed", "int", required=False)))
    assert [row.columns for row in data.rows] == [
        {"image": "a.tar/0001.png", "prompt": "first, «ü»", "seed": None},
        {"image": "a.tar/0002.png", "prompt": "second", "seed": 7},
        {"image": "b.tar/x/0003.PNG", "prompt": "third", "seed": None},
    ]
    assert [row.place for row in data.rows] == [
        f"{tmp_path}/{name}" for name in ("a.tar/0001.png", "a.tar/0002.png", "b.tar/x/0003.PNG")
    ]
    assert [row.size for row in data.rows] == [(64, 32), (64, 48), (64, 64)]
    for row, image in zip(data.rows, images, strict=True):
        source = row.files["image"]
        assert isinstance(source, Packed)
        with source.open("rb") as file:
            assert file.read() == image
    assert data.warnings == ()


def test_one_shard_as_metadata_gives_the_same_rows(tmp_path: Path, png: bytes) -> None:
    path = shard(tmp_path / "a.tar", [("1.png", png), ("1.txt", "x")])
    row = read_dataset(DataOptions(metadata=str(path)), COLUMNS, 16).rows[0]
    assert (row.id, row.place) == (read(tmp_path).rows[0].id, f"{path}/1.png")


def test_columns_of_the_object_are_renamed_as_elsewhere(tmp_path: Path, png: bytes) -> None:
    text = json.dumps({"caption": "from the object", "seed": 3, "width": 64})
    shard(tmp_path / "a.tar", [("1.png", png), ("1.json", text)])
    (found,) = problems(tmp_path)
    assert "no column 'prompt'; columns found: image, caption, seed, width" in found
    assert "--columns prompt=caption" in found
    (row,) = read(tmp_path, (*COLUMNS, Column("seed", "int", required=False)), columns="prompt=caption").rows
    assert row.columns == {"image": "a.tar/1.png", "prompt": "from the object", "seed": 3}


def test_further_pictures_and_texts_by_name(tmp_path: Path, png: bytes) -> None:
    other = picture(tmp_path, 1, (32, 32))
    members: list[Any] = [
        ("1.png", png),
        ("1.edit_image.png", other),
        ("1.txt", "x"),
        ("1.negative_prompt.txt", "blurred"),
    ]
    shard(tmp_path / "a.tar", members)
    (row,) = read(tmp_path, (*EDIT, Column("negative_prompt", required=False))).rows
    assert row.columns == {
        "image": "a.tar/1.png",
        "edit_image": "a.tar/1.edit_image.png",
        "prompt": "x",
        "negative_prompt": "blurred",
    }
    with row.files["edit_image"].open("rb") as file:
        assert file.read() == other


def test_what_is_of_no_use_is_told(tmp_path: Path, png: bytes) -> None:
    members = [("1.png", png), ("1.txt", "x"), ("1.cls", "3"), ("2.txt", "alone"), ("3.meta.json", "{}"), ("n", "")]
    shard(tmp_path / "a.tar", members)
    data = read(tmp_path)
    assert len(data.rows) == 1
    assert [str(w).removeprefix(f"{tmp_path}: ") for w in data.warnings] == [
        f"captions without a picture: {tmp_path}/a.tar/2",
        "members of no use here: *.cls (1), *.meta.json (1), *n (1)",
    ]


def test_a_column_that_only_later_rows_have(tmp_path: Path, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LOOKED_AT", 2)
    seeded, alone = ("2.json", '{"seed": 5}'), ("3.txt", "alone")
    shard(tmp_path / "a.tar", [("0.png", b""), ("1.png", b""), ("2.png", png), ("2.txt", "x"), seeded, alone])
    required = (*COLUMNS, Column("seed", "int"))
    for kinds in (required, (*COLUMNS, Column("seed", "int", required=False))):
        data = read(tmp_path, kinds, skip_bad=True)
        assert [row.columns["seed"] for row in data.rows] == [5]
        assert [str(w) for w in data.warnings] == [f"{tmp_path}: captions without a picture: {tmp_path}/a.tar/3"]
    (tmp_path / "a.tar").unlink()
    shard(tmp_path / "a.tar", [(f"{i}.png", b"") for i in range(5)])
    assert len(problems(tmp_path)) == 5


def test_faults_of_members_are_all_found(tmp_path: Path, png: bytes) -> None:
    link, hard, pipe = tarfile.TarInfo(), tarfile.TarInfo(), tarfile.TarInfo()
    link.type, link.linkname = tarfile.SYMTYPE, "01.png"
    hard.type, hard.linkname = tarfile.LNKTYPE, "01.png"
    pipe.type = tarfile.FIFOTYPE
    members: list[tuple[str, Any]] = [("01.png", png), ("01.txt", "fine"), ("02.png", png)]
    members += [("03.png", png), ("03.jpg", png), ("03.txt", "x"), ("04.png", png), ("04.txt", "x"), ("04.png", png)]
    members += [("05.png", png), ("05.txt", "x"), ("05.caption", "y"), ("06.png", png), ("06.txt", b"\xff")]
    members += [("07.png", png), ("07.json", "{"), ("08.png", png), ("08.json", "[1]")]
    members += [("09.png", png), ("09.json", '{"a": 1, "a": 2}'), ("10.png", link), ("10.txt", "x"), ("11.png", hard)]
    members += [("12.png", pipe), ("../13.png", png), ("/14.png", png), ("15.png", b""), ("15.txt", "x")]
    members += [("16.png", png), ("16.txt", "x"), ("16.json", '{"prompt": "y"}'), ("17.png", png[:90]), ("17.txt", "x")]
    shard(tmp_path / "a.tar", members)
    found = problems(tmp_path)
    expected = (
        "a.tar/02.png: no caption 02.txt and no 02.json; add one to the shard; it may be empty",
        "a.tar/03.png: '03.png' and '03.jpg' are both the image of one key",
        "a.tar/04.png: the shard holds '04.png' twice",
        "a.tar/05.png: '05.txt' and '05.caption' differ",
        "a.tar/06.png: '06.txt' is not UTF-8 (byte 0xff at 0)",
        "a.tar/07.png: '07.json' is not JSON",
        "a.tar/08.png: '08.json' holds no object",
        "a.tar/09.png: '09.json' has 'a' more than once",
        "a.tar/10: '10.png' is a link to '01.png'",
        "a.tar/11: '11.png' is a link to '01.png'",
        "a.tar/12: '12.png' is no regular file",
        "a.tar/../13: '../13.png' is a name outside of the tar",
        "a.tar/14: '/14.png' is a name outside of the tar",
        "a.tar/15: '15.png' is empty (0 bytes)",
        "a.tar/16.png: '16.txt' and the 'prompt' in '16.json' differ",
        "a.tar/17.png: image 'a.tar/17.png': ",
    )
    assert [have[: len(want)] for have, want in zip(found, expected, strict=True)] == list(expected)
    assert len(read(tmp_path, skip_bad=True).rows) == 1


def test_the_object_may_repeat_what_the_members_say(tmp_path: Path, png: bytes) -> None:
    text = json.dumps({"image": "1.png", "prompt": "x", "seed": None})
    shard(tmp_path / "a.tar", [("f/1.png", png), ("f/1.txt", "x"), ("f/1.json", text)])
    assert read(tmp_path).rows[0].columns == {"image": "a.tar/f/1.png", "prompt": "x"}


def test_a_sparse_member_is_refused(tmp_path: Path, png: bytes) -> None:
    info = tarfile.TarInfo("1.png")
    info.type = tarfile.GNUTYPE_SPARSE
    shard(tmp_path / "a.tar", [("1.png", info), ("1.txt", "x")])
    (found,) = problems(tmp_path)
    assert found.startswith("a.tar/1: '1.png' is stored as a sparse file; pack it without --sparse")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_compressed_shard_is_refused_whatever_its_name(tmp_path: Path, png: bytes, kind: str) -> None:
    members = [("1.png", png), ("1.txt", "x")]
    for name in (f"a.tar.{kind}", "b.tar"):
        with tarfile.open(tmp_path / name, f"w:{kind}") as tar:
            for member, content in members:
                data = content.encode() if isinstance(content, str) else content
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    shard(tmp_path / "c.tar", members)
    found = problems(tmp_path)
    assert [text.partition(";")[0] for text in found] == [
        f"{name}: compressed with {'gzip' if kind == 'gz' else 'bzip2' if kind == 'bz2' else 'xz'}"
        for name in (f"a.tar.{kind}", "b.tar")
    ]
    assert len(read(tmp_path, skip_bad=True).rows) == 1
    with pytest.raises(DataError, match="compressed with"):
        read_dataset(DataOptions(metadata=str(tmp_path / f"a.tar.{kind}")), COLUMNS, 16)


def test_every_truncation_is_found(tmp_path: Path, png: bytes) -> None:
    whole = shard(tmp_path / "whole/a.tar", [("1.png", png), ("1.txt", "x"), ("2.png", png), ("2.txt", "y")])
    data = whole.read_bytes()
    content = data.rstrip(b"\0")
    mark = -(-len(content) // 512) * 512  # where the end mark begins
    assert len(read(whole.parent).rows) == 2
    for length in [*range(0, mark, 97), mark - 512, mark - 1, mark, mark + 1, mark + 511]:
        whole.write_bytes(data[:length])
        (found,) = problems(whole.parent)
        assert found.startswith("a.tar: truncated: "), (length, found)
    whole.write_bytes(data[: mark + 512])
    assert len(read(whole.parent).rows) == 2


def test_a_tar_appended_to_another_is_not_passed_over(tmp_path: Path, png: bytes) -> None:
    path = shard(tmp_path / "a.tar", [("1.png", png), ("1.txt", "x")])
    path.write_bytes(path.read_bytes() * 2)
    (found,) = problems(tmp_path)
    assert found.startswith("a.tar: more data follow its end mark")


def test_a_damaged_header_is_not_the_end(tmp_path: Path, png: bytes) -> None:
    path = shard(tmp_path / "a.tar", [("1.png", png), ("1.txt", "x"), ("2.png", png), ("2.txt", "y")])
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        at = tar.getmember("2.png").offset
    data[at] ^= 1
    path.write_bytes(data)
    (found,) = problems(tmp_path)
    assert found.startswith(f"a.tar: byte {at}: the header of a member is damaged")


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 4095), value=st.integers(0, 255), length=st.integers(0, 512))
def test_damage_gives_an_error_in_words_or_the_row(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    members = [("1.png", picture(folder, 0, (16, 16))), ("1.txt", "x"), ("1.json", '{"seed": 1}')]
    path = shard(folder / "a.tar", members, format=tarfile.PAX_FORMAT)
    data = bytearray(path.read_bytes())
    data[at : at + length] = bytes([value]) * len(data[at : at + length])
    path.write_bytes(data)
    with suppress(DataError):
        assert [row.columns["image"] for row in read(folder).rows] == ["a.tar/1.png"]
    assert os.listdir(folder) == ["a.tar"]


def test_what_lies_beside_the_shards(tmp_path: Path, png: bytes) -> None:
    shard(tmp_path / "data/a.tar", [("1.png", png), ("1.txt", "x"), ("1.json", '{"edit_image": "more/e.png"}')])
    (tmp_path / "data/README.md").write_text("about")
    (tmp_path / "data/more").mkdir()
    (tmp_path / "data/more/e.png").write_bytes(png)
    with pytest.raises(UsageError, match=r"holds tar shards \(a\.tar\) and pictures \(e\.png\)"):
        read(tmp_path / "data")
    (row,) = read_dataset(DataOptions(metadata=str(tmp_path / "data/a.tar")), EDIT, 16).rows
    assert row.files["edit_image"] == tmp_path / "data/more/e.png"
    written(tmp_path / "data", "image,prompt\nmore/e.png,from the table\n")
    assert [r.columns["prompt"] for r in read(tmp_path / "data").rows] == ["from the table"]


def test_a_shard_whose_rows_need_a_seed(tmp_path: Path, png: bytes) -> None:
    good = '{"seed": 1, "rand_device": "cpu", "num_inference_steps": 4}'
    members = [("1.png", png), ("1.txt", "x"), ("1.json", good), ("2.png", png), ("2.txt", "x"), ("2.json", "{}")]
    shard(tmp_path / "a.tar", members)
    (found,) = problems(tmp_path, DISTILL)
    assert found.startswith("a.tar/2.png: num_inference_steps is absent")


def test_several_captions(tmp_path: Path, png: bytes) -> None:
    shard(tmp_path / "a.tar", [("1.png", png), ("1.json", '{"prompt": ["one", "two"]}')])
    (row,) = read(tmp_path).rows
    assert (row.columns["prompt"], row.variants) == ("one", {"prompt": ("one", "two")})
