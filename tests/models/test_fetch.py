"""Fetching with the real clients of both hubs, against a stub on 127.0.0.1."""

import os
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants
import modelscope_hub._download
import pytest

from dsplit.errors import ModelError, UsageError
from dsplit.models.fetch import fetch_dataset, fetch_model
from dsplit.models.locate import locate
from dsplit.recipe import ModelOptions
from dsplit.training.job import _located
from tests import tiny
from tests.hub_stub import Hub

REPO = "Qwen/Qwen-Image"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
STAGE_2 = ("transformer", "scheduler")
STAGE_2_FILES = {"model_index.json", "transformer/config.json", WEIGHTS, "scheduler/scheduler_config.json"}
FILES = {p.relative_to(tiny.QWEN_IMAGE).as_posix(): p.read_bytes() for p in tiny.QWEN_IMAGE.rglob("*") if p.is_file()}
CUT = 3_000_000

both_hubs = pytest.mark.parametrize("name", ["modelscope", "huggingface"])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stub with the tiny model, both clients pointed at it, and an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / ".modelscope"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / ".huggingface"))
    monkeypatch.setattr(modelscope_hub._download, "DOWNLOAD_RETRY_TIMES", 1)
    monkeypatch.setattr(modelscope_hub._download, "DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.01)
    with Hub({REPO: FILES | {"transformer/diffusion_pytorch_model.bin": b"pickle"}}) as stub:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", stub.endpoint)
        monkeypatch.setenv("HF_ENDPOINT", stub.endpoint)
        yield stub


def files(folder: Path) -> set[str]:
    """The visible files below `folder`, each of which must equal the hub's."""
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    found = {name: path for name, path in found.items() if not name.startswith(".")}
    assert all(path.read_bytes() == FILES[name] for name, path in found.items())
    return set(found)


def spoil(path: Path) -> None:
    """Other bytes in the middle of a file, its size and time kept."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@both_hubs
def test_only_the_components_of_a_stage_are_fetched(hub, name):
    folder = fetch_model("qwen-image", hub=name, components=STAGE_2)
    assert folder == Path("models", REPO)
    assert files(folder) == STAGE_2_FILES
    assert {line.split()[1] for line in hub.asked("")} == STAGE_2_FILES
    assert hub.asked("text_encoder") == hub.asked("vae") == hub.asked(".bin") == []


@both_hubs
def test_a_whole_model_into_a_folder_and_then_nothing_again(hub, name, tmp_path):
    folder = fetch_model(REPO, hub=name, local_dir=tmp_path / "here")
    assert files(folder) == set(FILES)
    hub.log.clear()
    fetch_model(REPO, hub=name, local_dir=tmp_path / "here")
    assert hub.asked("") == []


@both_hubs
def test_a_download_cut_half_way_resumes(hub, name):
    hub.faults[WEIGHTS] = [CUT]
    assert files(fetch_model(REPO, hub=name, components=STAGE_2)) == STAGE_2_FILES
    [first, second] = hub.asked(WEIGHTS)
    assert first == f"FILE {WEIGHTS}"
    start = int(second.rpartition("bytes=")[2].rstrip("-"))
    assert CUT - (1 << 20) < start <= CUT


def test_modelscope_resumes_in_the_next_run(hub, monkeypatch):
    monkeypatch.setattr(modelscope_hub._download, "DOWNLOAD_RETRY_TIMES", 0)
    hub.faults[WEIGHTS] = [CUT]
    with pytest.raises(ModelError, match=f"1 file.* could not be fetched .*run the same command again.*\n *{WEIGHTS}"):
        fetch_model(REPO, components=STAGE_2)
    assert not Path("models", REPO, WEIGHTS).exists()
    assert files(fetch_model(REPO, components=STAGE_2)) == STAGE_2_FILES
    assert hub.asked(WEIGHTS)[1:] == [f"FILE {WEIGHTS} bytes={CUT}-"]


@both_hubs
@pytest.mark.parametrize("hashes", [True, False])
def test_wrong_bytes_are_fetched_again(hub, name, hashes):
    hub.hashes = hashes  # without them the header tells
    hub.faults[WEIGHTS] = ["wrong"]
    assert files(fetch_model(REPO, hub=name, components=STAGE_2)) == STAGE_2_FILES
    assert len(hub.asked(WEIGHTS)) == 2


@both_hubs
def test_a_short_file_is_fetched_again(hub, name):
    hub.faults[WEIGHTS] = ["short"]
    try:
        fetch_model(REPO, hub=name, components=STAGE_2)
    except ModelError:  # huggingface_hub gives up on a size it did not expect; the next run fetches it
        assert not Path("models", REPO, WEIGHTS).exists()
        fetch_model(REPO, hub=name, components=STAGE_2)
    assert files(Path("models", REPO)) == STAGE_2_FILES


@both_hubs
@pytest.mark.parametrize("harm", [spoil, lambda path: os.truncate(path, 1000)])
def test_a_file_of_wrong_hash_or_size_here_is_fetched_again_and_no_other(hub, name, harm):
    folder = fetch_model(REPO, hub=name, components=STAGE_2)
    hub.log.clear()
    harm(folder / WEIGHTS)
    assert files(fetch_model(REPO, hub=name, components=STAGE_2)) == STAGE_2_FILES
    assert hub.asked("") == [f"FILE {WEIGHTS}"]


@both_hubs
def test_a_file_that_stays_wrong_is_an_error_and_does_not_stay(hub, name):
    hub.always[WEIGHTS] = "wrong"
    with pytest.raises(ModelError, match=WEIGHTS):
        fetch_model(REPO, hub=name, components=STAGE_2)
    assert not Path("models", REPO, WEIGHTS).exists()
    assert len(hub.asked(WEIGHTS)) <= 3


@both_hubs
@pytest.mark.parametrize("status", ["404", "500"])
def test_a_file_that_fails_is_an_error_and_the_next_run_fetches_only_it(hub, name, status):
    hub.always[WEIGHTS] = status
    with pytest.raises(ModelError) as caught:
        fetch_model(REPO, hub=name, components=STAGE_2)
    assert WEIGHTS in str(caught.value)
    assert status in str(caught.value)
    assert "Request:" not in str(caught.value)
    hub.always.clear()
    hub.log.clear()
    assert files(fetch_model(REPO, hub=name, components=STAGE_2)) == STAGE_2_FILES
    assert WEIGHTS in hub.asked("")[-1]
    assert hub.asked("vae") == []


@both_hubs
def test_an_unknown_repo(hub, name):
    with pytest.raises(ModelError, match=f"{name} has no repo 'No/Such' \\(HTTP 404\\): check the id"):
        fetch_model("No/Such", hub=name)
    Path("models/No/Such").mkdir(parents=True, exist_ok=True)
    Path("models/No/Such/mine.txt").write_text("a folder that is there is no answer")
    with pytest.raises(ModelError, match="has no repo 'No/Such'"):
        fetch_model("No/Such", hub=name, components=["vae"])


@both_hubs
def test_a_component_that_the_repo_lacks_or_has_only_pickled(hub, name):
    with pytest.raises(ModelError, match=r"has no safetensors weights in image_encoder/"):
        fetch_model(REPO, hub=name, components=["image_encoder"])
    hub.repos["Org/Pickled"] = {k: v for k, v in hub.repos[REPO].items() if k != WEIGHTS}
    with pytest.raises(ModelError, match=r"has no safetensors weights in transformer/"):
        fetch_model("Org/Pickled", hub=name, components=["transformer"])


def test_names_that_are_no_repo():
    with pytest.raises(UsageError, match=r"'qwen' is no family and no repo id \(ORG/NAME\)"):
        fetch_model("qwen")
    with pytest.raises(UsageError, match="unknown hub 'hf'; use modelscope or huggingface"):
        fetch_model(REPO, hub="hf")


def test_a_listing_that_points_out_of_the_folder_is_refused(hub):
    hub.repos["Bad/Data"] = {"../outside.png": b"x"}
    with pytest.raises(ModelError, match=r"lists '\.\./outside\.png', which lies outside the folder; nothing fetched"):
        fetch_dataset("Bad/Data", local_dir=Path("data"))
    assert hub.asked("outside") == []
    assert not Path("outside.png").exists()


@both_hubs
def test_only_the_matching_files_of_a_data_set(hub, name, tmp_path):
    picture = tiny.picture(tmp_path / "x.png").read_bytes()
    hub.repos["Org/Sets"] = {
        "ink/metadata.csv": b"image,prompt\n",
        "ink/a.png": picture,
        "paint/b.png": picture,
        "README.md": b"#",
    }
    folder = fetch_dataset("Org/Sets", hub=name, include=["ink/*"], local_dir=tmp_path / "data")
    visible = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and ".cache" not in p.parts}
    assert visible == {"ink/metadata.csv", "ink/a.png"}
    assert hub.asked("paint") == hub.asked("README") == []
    assert (folder / "ink" / "a.png").read_bytes() == picture
    assert fetch_dataset("Org/Sets", hub=name) == Path("data/Sets")
    assert Path("data/Sets/paint/b.png").read_bytes() == picture
    with pytest.raises(ModelError, match=r"Org/Sets on .* has no file that matches nope/\*"):
        fetch_dataset("Org/Sets", hub=name, include=["nope/"], local_dir=tmp_path / "data")


@both_hubs
def test_no_network_is_said_in_seconds(hub, name, monkeypatch):
    for variable in ("MODELSCOPE_ENDPOINT", "HF_ENDPOINT"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(
        ModelError, match=rf"cannot reach {name} at http://127\.0\.0\.1:9 .*check the network, try --hub"
    ):
        fetch_model("qwen-image", hub=name, components=["vae"])
    assert time.monotonic() - started < 6


def test_locate_fetches_what_is_missing_or_visibly_damaged(hub):
    options = ModelOptions(model="qwen-image")
    found = locate(options, fetch=["transformer"])
    assert set(found.parts) == {"transformer"}
    found.check(["transformer"])
    hub.log.clear()
    locate(options, fetch=["transformer"])
    assert hub.log == []  # whole: the hub is not even asked
    os.truncate(found.part("transformer").files[0], 1000)
    found = locate(options, fetch=["transformer", "vae"])
    found.check(["transformer", "vae"])
    assert set(found.parts) == {"transformer", "vae"}
    assert [line.split()[1] for line in hub.asked("transformer")] == [WEIGHTS]


def test_a_list_of_repos_is_fetched(hub):
    options = ModelOptions(model_id_with_origin_paths=f"{REPO}:vae/*.safetensors,{REPO}:dit/*.safetensors")
    found = locate(options, fetch=["vae", "tokenizer", "text_encoder"])
    assert set(found.parts) == {"vae", "tokenizer"}  # text_encoder is not listed, transformer not needed
    assert hub.asked("text_encoder") == hub.asked("transformer") == []


def test_training_fetches_the_schedule_it_draws_sigma_from(hub):
    found = _located(ModelOptions(model="qwen-image"), {"transformer": "denoise"})
    assert set(found.parts) == {"transformer", "scheduler"}
    assert found.config("scheduler")["max_shift"] == 0.9
    assert hub.asked("text_encoder") == hub.asked("vae") == []


@both_hubs
def test_no_bars_in_a_log_even_where_the_clients_were_imported_before(hub, name):
    code = (
        "import huggingface_hub, tqdm.auto; from pathlib import Path; from dsplit.models.hubs import download; "
        f"download('{name}', '{REPO}', 'model', ['transformer/*'], ['*.bin'], Path('here'))"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert files(Path("here")) == {"transformer/config.json", WEIGHTS}


def dsplit(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MODELSCOPE_DOWNLOAD_MAX_RETRIES": "0", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "dsplit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@both_hubs
def test_prepare_fetches_for_stage_2_and_fails_with_words(hub, name):
    hub.always[WEIGHTS] = "404"
    result = dsplit("prepare", "--model", "qwen-image", "--hub", name, "--stage", "2")
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
    assert WEIGHTS in result.stderr
    hub.always.clear()
    result = dsplit("prepare", "--model", "qwen-image", "--hub", name, "--stage", "2")
    assert result.returncode == 0, result.stderr
    assert hub.asked("text_encoder/model") == hub.asked("vae/diffusion") == []
    assert WEIGHTS in files(Path("models", REPO))
