"""`model(tokens)` over a user's own mesh, whose axes XLA divides over or are Explicit (what jax.make_mesh makes), in
force by jax.set_mesh or only in the arrays' shardings. Logits and gradients are those of one device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny import CONFIGS, golden_tokens
from tiny_models import adapted_model

from jaxtune.models.files.quant import quantize
from jaxtune.models.hf import model_from_config

TOKENS = jnp.asarray(np.concatenate([golden_tokens(), golden_tokens()]))
IDS = jnp.asarray(np.repeat([[1] * 9 + [2] * (TOKENS.shape[1] - 11) + [0] * 2], len(TOKENS), 0), jnp.int32)


def in_four_bits():
    return adapted_model(quantize(model_from_config(CONFIGS["llama"], jax.random.key(0)), "nf4"), r=2)


def of_experts_and_delta_rules():
    return model_from_config(CONFIGS["qwen3_5_moe"], jax.random.key(0))


MODELS = (in_four_bits, of_experts_and_delta_rules)


@nnx.jit
def results(model, tokens, ids):
    """Logits, and the gradients of the sum of their squares."""

    def total(model):
        logits = model(tokens, ids)
        return jnp.square(logits).sum(), logits

    return nnx.grad(total, has_aux=True)(model)


@pytest.fixture(scope="module")
def alone():
    return {made: results(made(), TOKENS, IDS) for made in MODELS}


@pytest.mark.full
@pytest.mark.parametrize(
    ("made", "kind", "in_force", "weights_too"),
    [
        (in_four_bits, AxisType.Auto, False, True),
        (in_four_bits, AxisType.Auto, True, False),
        (in_four_bits, AxisType.Explicit, False, False),
        (in_four_bits, AxisType.Explicit, True, True),
        (of_experts_and_delta_rules, AxisType.Auto, True, True),
        (of_experts_and_delta_rules, AxisType.Explicit, False, True),
    ],
)
def test_a_mesh_gives_what_one_device_gives(alone, made, kind, in_force, weights_too):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    model, tokens, ids = made(), jax.device_put(TOKENS, rows), jax.device_put(IDS, rows)
    if weights_too:
        graph, state = nnx.split(model)
        model = nnx.merge(graph, jax.device_put(state, whole))
    with jax.set_mesh(mesh) if in_force else contextlib.nullcontext():
        gradients, logits = results(model, tokens, ids)
    wanted = alone[made]
    got = [*jax.tree.leaves(gradients), logits]
    for one, want in zip(got, [*jax.tree.leaves(wanted[0]), wanted[1]], strict=True):
        assert np.linalg.norm(one - want) <= 1e-4 * np.linalg.norm(want)
    assert logits.sharding.spec[0] == "data" and not logits.is_fully_replicated


def test_outside_of_jit_and_divided_along_other_axes():
    """Eagerly; over two axes, one of which divides weights; with tokens that numpy has."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    model = model_from_config(CONFIGS["llama"], jax.random.key(0))
    want = model(TOKENS)
    weight = model.layers[0].mlp.up_proj.weight
    weight.set_value(jax.device_put(weight.get_value(), NamedSharding(mesh, PartitionSpec("model"))))
    for tokens in (jax.device_put(TOKENS, NamedSharding(mesh, PartitionSpec("data"))), np.asarray(TOKENS)):
        with jax.set_mesh(mesh):
            np.testing.assert_allclose(model(tokens), want, atol=1e-5)
