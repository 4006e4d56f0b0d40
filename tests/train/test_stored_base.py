"""The model itself with its adapter off as a stored teacher: opened as the run opens its base."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtune.train.config import AdapterConfig, ConfigError, DataConfig, EvaluationConfig, ModelConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.precision import Precision
from jaxtune.train.objectives.checkpoints import Checkpoint
from jaxtune.train.spec.loading import loading
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.test_distillation import ROWS, folder_of, of_metric, student_model
from tests.train.tiny_runs import make_config

WIDE = dict(hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2, head_dim=32)
LINEAR = {"rope_type": "linear", "factor": 4.0}
# {key of model: values}, and precision; the others say where files are, or need pictures
SETTINGS = {
    "nothing": ({}, "fp32"),
    "rope_scaling": (dict(rope_scaling=LINEAR), "fp32"),
    "yarn": (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "fp32"),
    "max_position_embeddings": (dict(max_position_embeddings=4096), "fp32"),
    "load_in": (dict(load_in="nf4"), "fp32"),
    "compute": (dict(load_in="fp8", compute="fp8"), "fp32"),
    "tower": (dict(tower="frozen"), "fp32"),
    "precision": ({}, {"*": "fp32", "mlp.*": "int8"}),
    "all": (dict(load_in="nf4", rope_scaling=LINEAR), {"*": "fp32", "self_attn.*": "int8"}),
    "tokenizer": ({}, "fp32"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return folder_of(student_model(vocab_size=len(make_tokenizer()), **WIDE), tmp_path_factory.mktemp("base") / "s")


def trained(output, base: str, cache, settings: dict, precision) -> Trainer:
    """One step; the teacher's values are those of the whole vocabulary."""
    vocab = len(make_tokenizer())
    config = make_config(
        output,
        steps=1,
        model=ModelConfig(path=base, **settings),
        adapter=AdapterConfig(r=2),
        precision=precision,
        data=DataConfig(train="t", length=64, template="chatml", cache_dir=str(cache)),
        evaluation=EvaluationConfig(),
        objective=ObjectiveConfig("distill", teacher="base", teacher_top_k=vocab, on_policy=0.0),
        guards=dataclasses.replace(make_config(output).guards, adapters_without_gradient=True),
    )
    with loading(config) as (weights, tokenizer, model):
        trainer = Trainer(model, tokenizer, config, ROWS, weights=weights)
        trainer.train()
    return trainer


@pytest.mark.parametrize("name", SETTINGS)
def test_a_new_adapter_does_not_diverge_from_its_own_base(name, base, tmp_path):
    """Beside the values of a run with nothing set, which no other run may take for its own."""
    settings, precision = SETTINGS[name]
    if name == "tokenizer":
        settings = dict(tokenizer=base)
    for number, (set_here, word) in enumerate([({}, "fp32"), (settings, precision)]):
        trainer = trained(tmp_path / f"out{number}", base, tmp_path / "cache", set_here, word)
        (loss,) = of_metric(trainer, "loss")
        assert abs(loss) < 2e-6, (number, loss)
    decides = name not in ("nothing", "tower", "tokenizer")
    assert len(list((tmp_path / "cache").glob("teacher_*.npy"))) == 1 + decides


def test_every_key_of_model_that_decides_numbers_is_in_the_name():
    """Also one that is added tomorrow."""
    values: dict[str, Any] = dict(load_in="nf4", compute="fp8", rope_scaling=LINEAR, max_position_embeddings=4096)
    values |= dict(tokenizer="t", pictures=True, tower="all")
    plain = Checkpoint(ModelConfig(path="m"), Precision("bf16"))
    for field in dataclasses.fields(ModelConfig):
        if field.name in ("path", "from_config"):
            continue
        changed = Checkpoint(ModelConfig(path="m", **{field.name: values[field.name]}), Precision("bf16"))
        assert (changed.key == plain.key) == (field.name in ("tokenizer", "pictures", "tower"))
    assert Checkpoint(plain.model, Precision("bf16", {"mlp.*": "int8"})).key != plain.key
    assert plain.key == ("bf16", None)  # as files were named before


def test_random_weights_teach_nothing(tmp_path):
    with pytest.raises(ConfigError, match="random weights"):
        from jaxtune.train.objectives.teachers import of_pass

        of_pass("base", None, Checkpoint(ModelConfig(from_config="c.json", tokenizer="t"), Precision("bf16")))


def test_shapes_are_those_of_what_is_opened(base):
    model = ModelConfig(path=base, load_in="fp8", compute="fp8", rope_scaling=LINEAR)
    checkpoint = Checkpoint(model, Precision("bf16", {"mlp.*": "int8"}))
    shapes, loaded = checkpoint.shapes(), checkpoint.computing(checkpoint.open().load())
    assert shapes.config == loaded.config and checkpoint.shapes(load_in="nf4").config == shapes.config
    ahead, there = (jax.tree.map(lambda a: (a.shape, np.dtype(a.dtype)), nnx.state(each)) for each in (shapes, loaded))
    assert jax.tree.leaves(ahead) == jax.tree.leaves(there)
