"""Runs that learn from rewards with `exact`: the sampler's log-probabilities are those of the training step."""

from __future__ import annotations

import pytest
from tiny_models import adapted_model, tiny_model

from jaxtune.models.config import LayerSpec
from jaxtune.models.files.quant import quantize
from jaxtune.pallas import compat, targets
from jaxtune.train.config import ConfigError, DataConfig, MeshConfig, OptimConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.answer_report import mismatch_lines
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import make_config

pytestmark = pytest.mark.usefixtures("compiled_in_full")
REWARD = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""
LARGEST = "sampling/sampling_logp_difference/max"


def run_of(folder, exact, load_in=None, precision="bf16", mesh=None, noise=None, **objective) -> Trainer:
    tokenizer = make_tokenizer()
    shape = dict(hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, initializer_range=0.2)
    model = tiny_model("bfloat16", vocab_size=len(tokenizer), layers=(LayerSpec(),) * 2, **shape)
    model = adapted_model(quantize(model, load_in) if load_in else model, r=4, lora_alpha=8)
    file = folder / "rewards.py"
    file.write_text(REWARD)
    settings = dict(reward_funcs=(f"{file}:even",), num_generations=4, max_completion_length=12, exact=exact)
    config = make_config(
        folder / "run",
        steps=3,
        precision=precision,
        mesh=mesh,
        neftune_noise_alpha=noise,
        rows_per_step=12,
        optim=OptimConfig(learning_rate=3e-2, weight_decay=0.0),
        objective=ObjectiveConfig("grpo", **(settings | objective)),
        data=DataConfig(train="rows that the test made", length=64),
    )
    rows = [{"prompt": text} for text in ("one", "two of them", "three", "and four", "five")]
    return Trainer(model, tokenizer, config, rows)


@pytest.mark.full
@pytest.mark.parametrize(
    ("load_in", "objective", "mesh"),
    [
        (None, {}, None),
        (None, {}, MeshConfig(data=2)),
        ("nf4", {}, None),
        (None, dict(temperature=0.7, num_iterations=2, beta=0.05), None),
    ],
)
def test_the_measured_mismatch_is_zero(tmp_path, load_in, objective, mesh):
    """In each step, of weights that change, on packed rows; without `exact` it is not."""
    largest = {}
    for exact in (True, None):
        folder = tmp_path / str(exact)
        folder.mkdir()
        trainer = run_of(folder, exact, load_in, mesh=mesh, **objective)
        trainer.train()
        largest[exact] = [line[LARGEST] for line in trainer.history if LARGEST in line]
        ratios = [name for name in trainer.history[-1] if "importance_sampling_ratio" in name]
        assert bool(ratios) == (not exact)
    assert largest[True] == [0.0] * 3
    assert max(largest[None]) > 0


def test_a_mismatch_is_said():
    [line] = mismatch_lines({LARGEST: 2e-7}, Settings(exact=True))
    assert "2e-07" in line and "jaxtune doctor --exact" in line
    assert mismatch_lines({LARGEST: 0.0}, Settings(exact=True)) == mismatch_lines({LARGEST: 1.0}, Settings()) == []


@pytest.mark.parametrize("option", ["importance_sampling_correction", "importance_sampling_clip_max", "rollout_func"])
def test_options_without_effect_are_refused(option):
    value = {"importance_sampling_correction": True, "importance_sampling_clip_max": 2.0, "rollout_func": "a.py:f"}[
        option
    ]
    with pytest.raises(ConfigError, match="exact"):
        ObjectiveConfig("grpo", reward_funcs=("a.py:f",), exact=True, **{option: value})


def test_a_dtype_in_which_no_answer_is_sampled_is_refused(tmp_path):
    with pytest.raises(ValueError, match="exact: training computes in float32 over weights in bfloat16"):
        run_of(tmp_path, True, precision="fp32").train()


def test_a_device_that_does_not_keep_the_order_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(compat, "_has_jax_triton", lambda: True)
    with (
        targets.compile_for((8, 0)),
        pytest.raises(ValueError, match="objective: exact: this GPU: measured on Hopper"),
    ):
        run_of(tmp_path, True).train()


def test_weights_that_devices_divide_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="mesh.fsdp = 2: objective.exact needs whole weights"):
        run_of(tmp_path, True, mesh=MeshConfig(fsdp=2))


def test_noise_that_the_sampler_lacks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neftune_noise_alpha = 5.0: with objective.exact"):
        run_of(tmp_path, True, noise=5.0)
