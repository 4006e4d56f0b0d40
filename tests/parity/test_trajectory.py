"""The stored trajectory, which ours follows in tests/train, is what transformers, PEFT and torch compute today."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import reference
import trajectory_reference
from tiny import CONFIGS

import jaxtune
from benchmarks.train import trajectory
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


@pytest.mark.parametrize("name", ["nf4", "experts"])
def test_the_benchmark_compares_the_two_sides(name, tmp_path, monkeypatch):
    """What benchmarks/train/trajectory.py runs, in small: bitsandbytes' weights, and PEFT's adapters on experts."""
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "cache"))
    case = trajectory.CASES[name]
    small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, head_dim=32)
    small |= dict(num_experts=4, moe_intermediate_size=64) if case.experts else {}
    case = dataclasses.replace(case, pretrain=(1, 2, 64), tune=(3, 2, 64), small=case.small | small)
    rows = str(QUICKSTART / "train.jsonl")
    options = argparse.Namespace(tokenizer=QUICKSTART / "base", pretrain=[rows], rows=rows)
    ours = trajectory.our_side(case, options, tmp_path)
    trajectory.torch_side(tmp_path, case)
    found = trajectory.compared(case, ours, json.loads((tmp_path / "torch.json").read_text()))
    assert len(found["ours"]) == 3 and found["ours"][0] != found["ours"][2]
    # bitsandbytes' kernel for CPUs rounds some blocks' scales, near the middle of two codes, to the farther one.
    loss, norm = (5e-5, 1e-3) if name == "nf4" else (1e-5, 1e-3)
    np.testing.assert_allclose(found["ours"], found["torch_peft"], atol=loss, rtol=0)
    np.testing.assert_allclose(found["ours_grad_norm"], found["torch_peft_grad_norm"], rtol=norm)
    assert found["frozen_weights"].get("matrices", 0) == (7 if name == "nf4" else 0)
