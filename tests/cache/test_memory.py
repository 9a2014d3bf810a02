"""Stage 1 needs the memory of its largest component, not of all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.cache.runs import cache, shards

WIDTH = 64  # base_dim of a VAE of about 160 MB
RUN = """
import json, sys
from pathlib import Path
import torch, diffusers, transformers
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from transformers import Qwen2_5_VLForConditionalGeneration
from tests.cache.runs import cache

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

bare = peak()
model, metadata, out = map(Path, sys.argv[1:])
encoded = cache(out, metadata, model)["encoded"]
print(json.dumps([peak() - bare, encoded]))
"""


def large(folder: Path) -> Path:
    """The tiny model with a VAE and a text encoder of about 160 MB of random weights each."""
    from diffusers import AutoencoderKLQwenImage
    from transformers import Qwen2_5_VLForConditionalGeneration

    tiny.qwen_image(folder)
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage.from_config({**AutoencoderKLQwenImage.load_config(folder / "vae"), "base_dim": WIDTH})
    vae.save_pretrained(folder / "vae")
    size = sum(p.numel() for p in vae.parameters())
    config = Qwen2_5_VLForConditionalGeneration.config_class.from_pretrained(folder / "text_encoder")
    config.text_config.vocab_size = size // config.text_config.hidden_size // (1 if config.tie_word_embeddings else 2)
    text_encoder = Qwen2_5_VLForConditionalGeneration(config)
    text_encoder.save_pretrained(folder / "text_encoder")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak memory of a process is read from /proc")
def test_two_components_need_little_more_than_one(tmp_path: Path) -> None:
    model, metadata, out = large(tmp_path / "model"), tiny.dataset(tmp_path / "data", 2), tmp_path / "cache"
    memory = cache(out, metadata, model, dry_run=True)["memory"]
    assert memory["vae"] == pytest.approx(memory["text_encoder"], rel=0.03)
    assert memory["vae"] > 100e6

    def peak() -> tuple[int, dict[str, int]]:
        words = [sys.executable, "-c", RUN, str(model), str(metadata), str(out)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        used, encoded = json.loads(done.stdout.splitlines()[-1])
        return used * 1024, encoded

    both, encoded = peak()
    assert encoded == {"encode_image": 2, "encode_prompt": 3}
    alone = {}
    for unit in encoded:
        for path in shards(out):
            if path.parent.name == unit:
                path.unlink()
        alone[unit], again = peak()
        assert again == {name: n if name == unit else 0 for name, n in encoded.items()}
    assert both < 1.15 * max(alone.values())
    assert min(alone.values()) > 0.5 * memory["vae"]  # pages of a mapped file that nobody reads do not count
