"""A family of models is its declaration: a toy is read, checked, written, saved and loaded by nothing else."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models import registry, values
from jaxtune.models.config import PRE_AND_POST_NORM, RopeConfig
from jaxtune.models.families.common import Conversion, Family, Key, LayerType, LayerTypes, Record
from jaxtune.models.families.common.layers import SLIDING, alternating
from jaxtune.models.families.common.names import GEMMA_NORMS
from jaxtune.models.families.common.table import MLP_BIAS, local_experts
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.layers.attention import AttentionShape
from jaxtune.models.registry import config_from_hf, family

WIDE = Record(
    AttentionShape,
    (
        Key("num_global_key_value_heads", "num_kv_heads", values.whole, lambda hf: hf["num_key_value_heads"]),
        Key("global_head_dim", "head_dim", values.whole, 32),
    ),
    {"attention_scale": 0.25},
)
# Sliding layers with rotary positions, and layers with heads of another width without.
TOY = Family(
    "toy",
    "ToyForCausalLM",
    (
        MLP_BIAS,
        Key("norm_epsilon", "norm_eps", values.positive, 1e-5),
        Key(
            "shrink",
            "logit_scale",
            values.positive,
            2.0,
            conversion=Conversion(lambda by: 1 / by, lambda ours: 1 / ours),
        ),
        Key("cap", "final_soft_cap", values.positive, 20.0, null=None),
        LayerTypes(alternating, (LayerType("full_attention", rotary=None, mixer=WIDE), SLIDING)),
    ),
    defaults={"sliding_window": 8, "num_key_value_heads": 2, "rope_theta": 5000.0},
    fields={"embedding_scale": lambda hf: hf["hidden_size"] ** 0.5},
    written={"toy_version": 1},
    refused=("upside_down",),
    stages=PRE_AND_POST_NORM,
    norms=GEMMA_NORMS,
    text_of=("toy_with_pictures",),
)
HF = {
    "model_type": "toy",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "toy", TOY)


def test_defaults_conversions_and_null():
    config = config_from_hf(HF)
    assert (config.norm_eps, config.logit_scale, config.final_soft_cap) == (1e-5, 0.5, 20.0)
    assert (config.num_kv_heads, config.head_dim, config.attention_scale) == (2, 8, 8**-0.5)
    assert config.rotary == (RopeConfig(theta=5000.0),)
    assert config.embedding_scale == 32**0.5
    assert [layer.window for layer in config.layers] == [8, None]
    assert [layer.config_of("mixer") for layer in config.layers] == [
        None,
        AttentionShape(num_kv_heads=2, head_dim=32, attention_scale=0.25),
    ]
    assert config_from_hf({**HF, "cap": None}).final_soft_cap is None
    # For a key of which null means nothing of its own, it means the default.
    assert config_from_hf({**HF, "norm_epsilon": None, "mlp_bias": None}) == config
    # The common key of the same field is replaced, and says nothing here.
    assert config_from_hf({**HF, "rms_norm_eps": 0.5}) == config


def test_what_is_written_reads_back():
    config = config_from_hf({**HF, "shrink": 4.0, "global_head_dim": 16, "layer_types": ["full_attention"] * 2})
    hf = family("toy").to_hf(config)
    assert {
        "shrink": 4.0,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "toy_version": 1,
    }.items() <= hf.items()
    assert hf["layer_types"] == ["full_attention"] * 2 and hf["sliding_window"] == 64
    assert hf["architectures"] == ["ToyForCausalLM"] and "rms_norm_eps" not in hf
    assert config_from_hf(hf) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shrink": 0}, "config.json: shrink = 0: must be a finite number above 0"),
        ({"global_head_dim": 2.0}, r"config.json: global_head_dim = 2\.0: must be an integer of at least 1"),
        ({"upside_down": True}, "upside_down = True is not supported .model_type 'toy'"),
        ({"num_experts": 4}, "num_experts = 4 is not supported"),
        ({"vocab_size": None}, "config.json of a 'toy' model lacks 'vocab_size'"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types 'linear_attention' is not supported"),
        ({"sliding_window": None}, "layers have a window, but sliding_window is None: it must be at least 1"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf({**HF, **change})


def test_layers_that_no_config_json_can_describe_are_not_written():
    config = config_from_hf({**HF, "num_hidden_layers": 4})
    sliding, full, *_ = config.layers
    windows = (sliding, full, dataclasses.replace(sliding, window=5), full)
    with pytest.raises(ValueError, match="layers have the windows .5, 8.: config.json of a toy model can have one"):
        TOY.to_hf(dataclasses.replace(config, layers=windows))
    neither = (sliding, dataclasses.replace(full, window=8))
    with pytest.raises(ValueError, match="layer 1 is of no type that config.json of a toy model has"):
        TOY.to_hf(dataclasses.replace(config, layers=neither))
    mixers = (full, full.replaced(mixer=AttentionShape(num_kv_heads=1, head_dim=32, attention_scale=0.25)))
    with pytest.raises(ValueError, match="layers of type full_attention have different mixers"):
        TOY.to_hf(dataclasses.replace(config, layers=mixers))


def test_the_text_part_of_a_model_with_more_to_it():
    whole = {"model_type": "toy_with_pictures", "text_config": HF | {"cap": 5.0}}
    assert config_from_hf(whole) == config_from_hf({**HF, "cap": 5.0})


def test_experts(monkeypatch):
    """Those as wide as the MLP read intermediate_size, which a common entry reads too."""
    monkeypatch.setitem(registry.FAMILIES, "toy", dataclasses.replace(TOY, keys=(local_experts(),), text_of=()))
    config = config_from_hf({**HF, "num_local_experts": 4, "num_experts_per_tok": 2})
    assert config.moe is not None and (config.moe.num_experts, config.moe.expert_size) == (4, 24)
    assert config_from_hf(family("toy").to_hf(config)) == config


def test_a_saved_model_loads(tmp_path):
    model = model_from_config(HF, jax.random.key(0), "float32")
    save_pretrained(model, tmp_path / "toy")
    again, _ = from_pretrained(tmp_path / "toy", dtype="float32")
    assert again.config == model.config
    tokens = jnp.asarray([[3, 5, 7, 9, 11, 2, 4, 6, 8, 10]])
    np.testing.assert_array_equal(again(tokens), model(tokens))
