"""Values that layers take from outside: an earlier layer's keys and values, and the decoder's embeddings of each layer.

Whatever becomes of the residuals, loss and gradients are those of JAX's own differentiation, and a sampler gives what
whole rows give."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIGS

import jaxtune
from jaxtune.models.components import stored_as
from jaxtune.models.decoder import Decoder
from jaxtune.models.hf import model_from_config, save_pretrained
from jaxtune.models.layers.block import LAYER_INPUT, LAYER_OUTPUT
from jaxtune.models.layers.segment import Context
from jaxtune.models.lora import matrices
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan, ResidualPlan
from jaxtune.models.stack.stack import run_stack
from jaxtune.pallas.formats import FourBit

HF = CONFIGS["gemma4_shared"]
SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] + [2] * 8 + [0] * 3], np.int32)
MIXED = (
    LayerPlan(query="recompute", key="offload", value="offload", mid="recompute"),
    LayerPlan("recompute", layer_input="offload", attention_out="keep", lse="keep"),
    LayerPlan(per_layer_gate="recompute", up="offload"),
    LayerPlan("recompute"),
)
PLANS = {
    "keep": ResidualPlan.uniform(KEEP, 4),
    "recompute, in tiles": ResidualPlan.uniform(RECOMPUTE, 4, tile_tokens=6),
    "a layer each": ResidualPlan(MIXED),
}


@pytest.fixture(scope="module")
def model():
    return model_from_config(HF, jax.random.key(0), "float32")


def run_plainly(model, x, layout, given):
    """The layers under JAX's own differentiation: no plan, no hand-written backward of the stack."""
    shared = {}
    for block, spec, own in zip(model.layers, model.config.layers, given, strict=True):
        values = {LAYER_INPUT: x, **own, **{name: shared[name] for name in block.takes if name not in own}}
        for segment in block.segments():
            outputs = segment.run(block, Context(spec, layout), *map(values.get, segment.reads))
            values |= zip(segment.outputs, outputs, strict=True)
        shared |= {name: values[residual] for residual, name in block.gives.items()}
        x = values[LAYER_OUTPUT]
    return x


def loss_and_gradients(model, plan):
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 128, SEGMENTS.shape), jnp.int32)
    probe = jax.random.normal(jax.random.key(1), (*SEGMENTS.shape, model.config.hidden_size)) / 8

    def total(trainable):
        model = nnx.merge(graph, trainable, frozen)
        layout, x = model.layout(SEGMENTS.shape, jnp.asarray(SEGMENTS)), model.embed(tokens)
        given = model.per_layer_inputs(tokens, x)
        assert given is not None
        if plan is None:
            out = run_plainly(model, x, layout, given)
        else:
            out = run_stack(model.layers, model.config.layers, x, layout, plan, layer_inputs=given)[0]
        return (out * probe * (SEGMENTS > 0)[..., None]).sum()

    return jax.jit(jax.value_and_grad(total))(trainable)


@pytest.mark.full
def test_gradients_under_every_plan(model):
    """Of the table, the keys and values that two layers read, and all else; every one is there."""
    want = loss_and_gradients(model, None)
    for name, plan in PLANS.items():
        got = loss_and_gradients(model, plan)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            where = f"{name}: {jax.tree_util.keystr(path)}"
            unused = "norm" in where and "layers" not in where and "per_layer" not in where
            assert unused or np.abs(b).max() > 0, where
            np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()), rtol=0, err_msg=where)


def test_who_shares_with_whom():
    """The last layer of each type before the shared ones gives; these have no weights for keys and values."""
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = config_from_hf(HF | {"num_hidden_layers": 6, "layer_types": [*types, "full_attention"]})
    shapes = [layer.config_of("mixer") for layer in config.layers]
    assert [shape and shape.gives_keys for shape in shapes[:4]] == [None, None, *types[:2]]
    assert [shape.takes_keys for shape in shapes[4:]] == types[:2]
    assert [layer.config_of("mlp") is not None for layer in config.layers] == [False] * 4 + [True] * 2
    with pytest.raises(ValueError, match="num_kv_shared_layers = 3: layer 1 shares .* of a full_attention layer"):
        config_from_hf(HF | {"num_kv_shared_layers": 3})


def test_a_layer_that_takes_what_nothing_gives_is_refused(model):
    layout, x = model.layout((1, 4)), jnp.zeros((1, 4, 64))
    given = model.per_layer_inputs(jnp.ones((1, 4), jnp.int32), x)
    with pytest.raises(ValueError, match="layer 0 takes full_attention_key.*which no earlier layer gives"):
        run_stack(list(model.layers)[3:], model.config.layers[3:], x, layout, layer_inputs=given[3:])
    with pytest.raises(ValueError, match="layer 0 takes per_layer_input, which no earlier layer gives"):
        run_stack(list(model.layers)[:1], model.config.layers[:1], x, layout)


@pytest.mark.full
def test_sampled_in_chunks_and_slots(model):
    """Prompts of several chunks, longer than the window; caches of the layers that have keys alone."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 128, size).tolist() for size in (3, 21, 9)]
    sampler = jaxtune.Sampler(model, slots=2, length=48, prefill_tokens=8, tokens_per_round=2)
    rows = [row.ids for row in sampler.run(prompts, max_new_tokens=5, eos_token_ids=())]
    for prompt, new in zip(prompts, rows, strict=True):
        row = jnp.asarray([[*prompt, *new]])
        assert new == model(row)[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    caches = [len(jax.tree.leaves(state)) for state in sampler._caches.states]
    assert caches == [2, 2, 0, 0]


def test_every_linear_takes_an_adapter(model):
    """PEFT's all-linear: the projection to the embeddings of each layer is one, beside the layers."""
    names = [name for name, _ in matrices(model)]
    assert "model.per_layer_model_projection" in names and "model.layers.3.per_layer_input_gate" in names
    assert "model.layers.3.self_attn.q_proj" in names and "model.layers.3.self_attn.k_proj" not in names
    adapted = jaxtune.get_peft_model(model, r=2)
    assert all(matrix.lora is not None for _, matrix in matrices(adapted))


@pytest.mark.full
def test_every_linear_of_the_model_is_quantised_on_loading(model, tmp_path):
    """As bitsandbytes does, and as the plan counts it: the projection beside the layers, too."""
    save_pretrained(model, tmp_path / "whole")
    loaded, _ = jaxtune.from_pretrained(tmp_path / "whole", load_in="nf4")
    planned = nnx.eval_shape(lambda: stored_as(Decoder(config_from_hf(HF), jax.random.key(0)), {}, "nf4"))
    for one in (loaded, planned):
        stored = {name: isinstance(matrix.stored_weight, FourBit) for name, matrix in matrices(one)}
        assert all(stored.values()) and "model.per_layer_model_projection" in stored, stored


def test_a_layer_gives_or_takes():
    config = config_from_hf(HF)
    shape = config.layers[3].config_of("mixer")
    with pytest.raises(ValueError, match="takes_keys: such an attention has no fused qkv_proj, and gives no keys"):
        dataclasses.replace(shape, gives_keys="x").make(config, jax.random.key(0), "float32")
