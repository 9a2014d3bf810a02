"""A model in a folder of an awkward name, and no network: for the tests of finding models."""

from __future__ import annotations

import socket

import pytest

from dsplit.errors import ModelError
from dsplit.models.locate import locate
from dsplit.recipe import ModelOptions
from tests import tiny

ALL = {"transformer", "vae", "text_encoder", "tokenizer", "scheduler"}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder, and no network at all."""
    monkeypatch.chdir(tmp_path)

    def connect(self, address):
        raise AssertionError(f"asked the network: {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def model(tmp_path):
    return tiny.qwen_image(tmp_path / "a b" / "m:1")


def refusal(**options: str) -> str:
    with pytest.raises(ModelError) as caught:
        locate(ModelOptions(**options))
    return str(caught.value)
