"""A small checkpoint as a folder, for the tests of loading and saving."""

from __future__ import annotations

from pathlib import Path

import pytest
from checks import shapes_of
from random_weights import write_checkpoint
from tiny import CONFIGS

from jaxtune.models.hf import from_pretrained, save_pretrained


@pytest.fixture
def folder(tmp_path) -> Path:
    """A whole untied checkpoint, fp32, one file."""
    write_checkpoint(tmp_path / "model", CONFIGS["mistral"], shapes_of(CONFIGS["mistral"]))
    return tmp_path / "model"


@pytest.fixture
def sharded(folder, tmp_path) -> Path:
    """The same in several shards."""
    save_pretrained(from_pretrained(folder, dtype="float32")[0], tmp_path / "sharded", max_shard_bytes=100_000)
    return tmp_path / "sharded"
