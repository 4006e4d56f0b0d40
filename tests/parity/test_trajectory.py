"""The stored trajectory, which ours follows in tests/train, is what transformers, PEFT and torch compute today."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
import trajectory_reference
from tiny import CONFIGS

import jaxtune
from tests.train import trajectory as t
from tests.train.test_trajectory import TOLERANCE, story_dataset, tiny_dataset

QUICKSTART = Path(jaxtune.__file__).parent / "quickstart"


@pytest.fixture
def case(request, tmp_path, monkeypatch):
    """(name, model folder, their rows, our data set)"""
    if request.param == "tiny":
        return "tiny", reference.make_checkpoint(tmp_path / "base", CONFIGS["llama"]), t.tiny_rows(), tiny_dataset()
    test_data = request.getfixturevalue("test_data")
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    rows = trajectory_reference.story_tokens(test_data)
    return request.param, t.stories(test_data)[0], rows, story_dataset(test_data)


@pytest.mark.parametrize("case", ["tiny", "stories260K"], indirect=True)
def test_live(case):
    name, folder, rows, data = case
    assert len(rows) == len(data.documents)
    for index, row in enumerate(rows):
        assert row == data.documents[index].tokens.tolist(), f"document {index} is tokenised differently"
    losses, norms = trajectory_reference.run(folder, rows, t.LENGTHS[name], steps=12)
    golden = np.load(t.GOLDEN)
    np.testing.assert_allclose(losses, golden[f"{name}_loss"][:12], atol=TOLERANCE / 10, rtol=0)
    np.testing.assert_allclose(norms, golden[f"{name}_grad_norm"][:12], rtol=1e-3)
