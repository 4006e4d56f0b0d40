"""Norms before linears that multiply in FP8: the linears' operation computes them in a layer's forward, which then has
no normed stream, and the gradients are those that layers with norms of their own have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checks import assert_gradients_are, stack_gradients
from tiny_models import adapted_model, golden_model

from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.norm import Normed
from jaxtune.models.residual_plan import KEEP, RECOMPUTE
from jaxtune.pallas.normed_heads import normed
from jaxtune.pallas.quant_matmul import fp8_normed, fp8_product

SHAPE = (2, 12)


@pytest.fixture
def by_kernel(monkeypatch):
    """Plain JAX stands for the kernel, for any call: a list of the rank of each call."""
    ranks = []

    def in_plain_jax(x, factors, a, eps, blocks):
        ranks.append(0 if a is None else len(a))
        wide = normed(x.astype(jnp.float32), factors.astype(jnp.float32), eps, 0.0, True)
        inner = None if a is None else jnp.dot(wide, a.T, precision="highest").astype(x.dtype)
        return *fp8_product.rounded(wide, blocks), inner

    monkeypatch.setattr(fp8_normed, "normed", in_plain_jax)
    monkeypatch.setattr(fp8_normed, "refusal", lambda x, rank: None)
    monkeypatch.setattr("jaxtune.pallas.gated.thin._TOKENS", 1)
    monkeypatch.setattr("jaxtune.pallas.gated.thin._SIZE", 1)
    jax.clear_caches()
    yield ranks
    jax.clear_caches()


def in_fp8(name: str, **settings):
    """A model that multiplies in FP8 and has adapters of rank 3."""
    return adapted_model(compute_in_fp8(quantize(golden_model(name), "fp8")), r=3, **settings)


# {(family, plan): the ranks of query, key and value together, and of gate and up}
CASES = {
    ("llama", KEEP): {9, 6},
    ("llama", RECOMPUTE): {9, 6},
    ("gemma", KEEP): {9, 6},
    ("phi3", KEEP): {3},
}


@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_a_forward_norms_within_the_products(name, plan, request):
    """Also one that is run again in the backward, where no kernel computes the norms' gradients."""
    model = in_fp8(name)
    want = stack_gradients(model, plan, SHAPE)
    ranks = request.getfixturevalue("by_kernel")
    assert_gradients_are(stack_gradients(model, plan, SHAPE), want)
    assert set(ranks) == CASES[name, plan]


def test_linears_that_do_more_get_the_normed_stream(by_kernel):
    stack_gradients(in_fp8("llama", use_dora=True), KEEP, SHAPE)
    stack_gradients(in_fp8("cohere2"), KEEP, SHAPE)  # it has no RMSNorm
    assert by_kernel == []


def test_a_norm_of_a_precision_map_is_computed_first():
    """Its product with the weight is in 16 bits, which the kernel does not have."""
    layer = in_fp8("llama").layers[0]
    x = jnp.ones((*SHAPE, layer.mixer_norm.weight.shape[0]))
    assert isinstance(layer.to_norm("mixer", x), Normed)
    layer.mixer_norm.compute = "bfloat16"
    assert isinstance(layer.to_norm("mixer", x), jax.Array)
    layer.mixer_norm.compute = "float32"
    assert isinstance(layer.to_norm("mixer", x), Normed)
