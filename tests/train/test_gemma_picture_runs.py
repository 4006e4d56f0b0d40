"""Runs of a tiny Gemma with pictures by the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxtune import cli
from tests.train.gemma_runs import write_model
from tests.train.picture_runs import write_rows

STEPS = 12


def run_of(folder, name="gemma4", **changes):
    """(the base's folder, the run's folder) of a run by the command."""
    base, data = write_model(folder / "model", name), write_rows(folder / "rows", 24, text=6)
    settings = {
        "model": {"path": str(base)},
        "data": {"train": str(data), "length": 192},
        "precision": "fp32",
        "steps": STEPS,
        "rows_per_step": 2,
        "optim": {"learning_rate": 5e-3},
        "schedule": {"name": "constant"},
        "output": str(folder / "out"),
    }
    for key, value in changes.items():
        section = settings.get(key)
        settings[key] = section | value if isinstance(section, dict) and isinstance(value, dict) else value
    (folder / "recipe.yaml").write_text(json.dumps(settings))
    assert cli.main(["train", str(folder / "recipe.yaml")]) == 0
    return base, folder / "out"


def losses(run, name="loss"):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if "loss" in line]


@pytest.mark.parametrize(
    "name", ["gemma4", *(pytest.param(name, marks=pytest.mark.full) for name in ("unified", "gemma3"))]
)
def test_weights_that_devices_divide_have_the_losses_of_whole_ones(tmp_path, name):
    runs = []
    for number, mesh in enumerate((None, {"fsdp": 2})):
        (folder := tmp_path / str(number)).mkdir()
        small = {"learning_rate": 1e-5}  # Adam's first steps are as large for the noise of gradients that are none
        _, run = run_of(folder, name, mesh=mesh, model={"tower": "all"}, steps=3, optim=small, export={"merged": True})
        weights = load_file(next((run / "merged").glob("*.safetensors")))
        made = [losses(run), losses(run, "grad_norm")]
        runs.append((made, {key: value.shape for key, value in weights.items()}))
    (whole, tensors), (divided, others) = runs
    np.testing.assert_allclose(whole, divided, rtol=1e-4)
    assert tensors == others


@pytest.mark.parametrize(
    "changes",
    [
        dict(adapter={"r": 4}, export={"merged": True}),
        dict(model={"tower": "all"}, export={"merged": True}),
    ],
    ids=["adapter", "whole"],
)
def test_a_run_learns_packed_rows_with_pictures(tmp_path, changes, capsys):
    base, run = run_of(tmp_path, **changes)
    assert "pictures: room for" in capsys.readouterr().err
    made = losses(run)
    assert len(made) == STEPS and np.mean(made[-3:]) < 0.7 * made[0]
    before, after = (load_file(next(folder.glob("*.safetensors"))) for folder in (base, run / "merged"))
    assert before.keys() == after.keys()
    changed = {key for key, value in after.items() if (value != before[key]).any()}
    tower = {key for key in changed if "vision" in key}
    assert changed - tower
    assert bool(tower) == ("model" in changes)
    assert not any(key.endswith(("_min", "_max", "std_bias", "std_scale")) for key in changed)


def test_rewards_of_answers_to_pictures(tmp_path):
    """Sampler and trainer give answers the same probabilities."""
    prompts = write_rows(tmp_path / "prompts", 6, text=2, form="prompts")
    (tmp_path / "rewards.py").write_text(
        "def odd(completions, **_):\n    return [len(str(c)) % 2 for c in completions]\n"
    )
    objective = {"name": "grpo", "reward_funcs": [f"{tmp_path}/rewards.py:odd"], "max_completion_length": 6}
    changes = dict(objective={**objective, "num_generations": 2}, data={"train": str(prompts)}, adapter={"r": 2})
    _, run = run_of(tmp_path, **changes, steps=2, rows_per_step=4)
    assert max(losses(run, "sampling/sampling_logp_difference/max")) < 2e-4
