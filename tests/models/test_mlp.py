"""The dense MLP's own backward against JAX's of the MLP written out, for every kind of linear."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import adapted_model, tiny_model

from jaxtune.models.config import PRE_AND_POST_NORM, LayerSpec
from jaxtune.models.files.quant import prepare_qat, quantize
from jaxtune.pallas import dispatch, gpu_kernel
from jaxtune.pallas.gated import ACTIVATIONS

SIZES = dict(hidden_size=64, intermediate_size=128, head_dim=32, attention_scale=32**-0.5, layers=(LayerSpec(),))
KEY = jax.random.key(3)
BATCH = (2, 8)


def adapted(model, **settings):
    return adapted_model(model, r=4, target_modules="all-linear", **settings)


# name -> (model, dropout key)
CASES = {
    "full": lambda dtype, sizes: (tiny_model(dtype, mlp_bias=True, stages=PRE_AND_POST_NORM, **sizes), None),
    "lora": lambda dtype, sizes: (adapted(tiny_model(dtype, mlp_bias=True, stages=PRE_AND_POST_NORM, **sizes)), None),
    "fused": lambda dtype, sizes: (adapted(tiny_model(dtype, fused_gate_up=True, **sizes)), None),
    "dropout": lambda dtype, sizes: (adapted(tiny_model(dtype, **sizes), lora_dropout=0.4), KEY),
    "dora": lambda dtype, sizes: (adapted(tiny_model(dtype, **sizes), use_dora=True), None),
    "nf4": lambda dtype, sizes: (adapted(quantize(tiny_model(dtype, **sizes))), None),
    "qat": lambda dtype, sizes: (prepare_qat(tiny_model(dtype, **sizes), "int4", 32), None),
    "qat of an adapter": lambda dtype, sizes: (prepare_qat(adapted(tiny_model(dtype, **sizes)), "int4", 32), None),
}


def gradients(model, key, dtype, written_out: bool):
    """Of a sum over the layer's output by the MLP's trainables, gate, up and mid."""
    block = model.layers[0]
    graph, trainable, frozen = nnx.split(block, nnx.Param, ...)
    mid, probe = (jax.random.normal(jax.random.key(i), (*BATCH, 64)).astype(dtype) for i in range(2))

    def total(trainable, mid):
        block = nnx.merge(graph, trainable, frozen)
        gate, up = block.mlp.gate_up(block.normed("mlp", mid), key)
        if written_out:
            gated = ACTIVATIONS[block.mlp.config.activation](gate) * up
            out = block.added("mlp", mid, block.mlp.down_proj(gated, key))
        else:
            out = block.added("mlp", mid, block.mlp.down(gate, up, key))
        return (out * probe).sum(dtype=jnp.float32)

    return jax.jit(jax.value_and_grad(total, (0, 1)))(trainable, mid)


def assert_close(got, want, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    moved = 0
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, path
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), jax.tree_util.keystr(path)
        moved += bool(np.abs(b).max() > 0)
    assert moved >= 4


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_mlp_written_out(case):
    model, key = CASES[case]("float32", SIZES)
    got, want = (gradients(model, key, jnp.float32, written) for written in (False, True))
    assert dispatch.record["gated_backward"][0] == "reference"
    assert_close(got, want, 1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    model = adapted(tiny_model(**SIZES, activation=activation))
    assert_close(*(gradients(model, None, jnp.float32, written) for written in (False, True)), 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_gradients_through_the_kernel(case):
    """In bfloat16, whose roundings the two make at other places."""
    model, key = CASES[case]("bfloat16", SIZES)
    with gpu_kernel.interpreted():
        got = gradients(model, key, jnp.bfloat16, False)
    assert dispatch.record["gated_backward"] == ("mosaic", {})
    assert_close(got, gradients(model, key, jnp.bfloat16, True), 0.02)
