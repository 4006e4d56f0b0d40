"""Norms before linears that multiply in FP8: the linears' operation computes them in a layer's forward, which then has
no normed stream, and the gradients are those that layers with norms of their own have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checks import assert_gradients_are, stack_gradients
from tiny_models import adapted_model, golden_model

from benchmarks.random_model import in_blocks
from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.norm import Normed
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE
from jaxtune.pallas.normed_heads import inverse_rms, normed
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
        return *fp8_product.rounded(wide, blocks), inverse_rms(x, eps), inner

    monkeypatch.setattr(fp8_normed, "normed", in_plain_jax)
    monkeypatch.setattr(fp8_normed, "refusal", lambda x, rank, blocks: None)
    monkeypatch.setattr("jaxtune.pallas.gated.thin._TOKENS", 1)
    monkeypatch.setattr("jaxtune.pallas.gated.thin._SIZE", 1)
    jax.clear_caches()
    yield ranks
    jax.clear_caches()


def by_rows(model):
    """The model with weights in FP8 that have a scale for each row."""
    return quantize(model, "fp8")


def in_fp8(name: str, stored=by_rows, **settings):
    """A model that multiplies in FP8 and has adapters of rank 3."""
    return adapted_model(compute_in_fp8(stored(golden_model(name))), r=3, **settings)


# {(family, plan): the ranks of query, key and value together, and of gate and up}
CASES = {
    ("llama", KEEP): {9, 6},
    ("llama", RECOMPUTE): {9, 6},
    ("gemma", KEEP): {9, 6},
    ("phi3", KEEP): {3},
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan"), CASES, ids=str)
def test_a_forward_norms_within_the_products(name, plan, request):
    """Also one that is run again in the backward, where no kernel computes the norms' gradients."""
    model = in_fp8(name)
    want = stack_gradients(model, plan, SHAPE)
    ranks = request.getfixturevalue("by_kernel")
    assert_gradients_are(stack_gradients(model, plan, SHAPE), want)
    assert set(ranks) == CASES[name, plan]


@pytest.mark.full
@pytest.mark.parametrize("stored", [in_blocks, by_rows])
def test_the_backward_takes_the_factors_of_rows_from_the_forward(stored, monkeypatch, request):
    """Where the norms are apart from the segments. With scales of 128 x 128 an MLP is differentiated at once."""
    model = in_fp8("llama", stored)
    monkeypatch.setattr("jaxtune.models.norm.has_kernel", lambda *_: True)
    plain = gradients_without_factors_of_rows(model, monkeypatch)
    assert any(jnp.isnan(each).any() for each in jax.tree.leaves(plain))
    request.getfixturevalue("by_kernel")
    want = stack_gradients(model, KEEP, SHAPE)
    assert_gradients_are(gradients_without_factors_of_rows(model, monkeypatch), want)


def gradients_without_factors_of_rows(model, monkeypatch):
    """What stack_gradients finds if what the norms compute of the stream for their Factors is not a number."""
    with monkeypatch.context() as patch:
        patch.setattr("jaxtune.models.norm.inverse_rms", lambda x, eps: jnp.full((*x.shape[:-1], 1), jnp.nan))
        jax.clear_caches()
        found = stack_gradients(model, KEEP, SHAPE)
    jax.clear_caches()
    return found


@pytest.mark.full
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
