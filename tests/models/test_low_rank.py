"""Adapters' low-rank inputs: the backward takes those that the forward made, and the planner counts what is kept."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import pytest
from checks import assert_gradients_are, stack_gradients
from flax import nnx
from tiny_models import adapted_model, golden_model

from jaxtune.models.stack import stack_layers
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan
from jaxtune.models.stack.stack import layer_forward
from jaxtune.models.stack.stack_layers import low_rank_inputs, with_low_rank_kept
from jaxtune.pallas.grouped_matmul import api as grouped
from jaxtune.pallas.quant_matmul import low_rank, reference
from jaxtune.train.planning.layer_costs import low_rank_bytes

SHAPE = (2, 12)
RANK = 3
MODELS = ("qwen3", "qwen2_moe", "qwen3_next", "gemma3")
PLANS = {
    "keep": KEEP,
    "recompute": RECOMPUTE,
    "some": LayerPlan("recompute", mid="offload", gate="keep", up="keep"),
}


def adapted(name: str) -> nnx.Module:
    """A tiny model whose linears and experts all have adapters that are not at their start."""
    experts = ["experts.gate_up_proj", "experts.down_proj"] if name in ("qwen2_moe", "qwen3_next") else None
    settings = dict(lora_alpha=RANK, target_modules="all-linear", target_parameters=experts)
    return adapted_model(golden_model(name), r=RANK, **settings)


def gradients(model, plan):
    """Under what of the plan the model has residuals for."""
    known = {r.name for layer in model.layers for r in layer.residuals()}
    return stack_gradients(
        model, LayerPlan(plan.rest, **{name: how for name, how in plan.items() if name in known}), SHAPE
    )


@pytest.fixture
def products(monkeypatch):
    """How many products with an A are traced, by the function that computes them."""
    counts = collections.Counter()
    product, thin = reference._product, grouped._thin

    def counted_product(x, weight, contract, dtype=None):
        counts["linears"] += contract == (1, 1) and weight.shape[0] in {RANK * n for n in range(1, 5)}
        return product(x, weight, contract, dtype)

    def counted_thin(x, weight, groups, contract, *others):
        counts["experts"] += contract == 2
        return thin(x, weight, groups, contract, *others)

    monkeypatch.setattr(reference, "_product", counted_product)
    monkeypatch.setattr(grouped, "_thin", counted_thin)
    jax.clear_caches()
    yield counts
    jax.clear_caches()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_where_everything_is_kept_the_backward_multiplies_by_no_a(name, products, monkeypatch):
    """Otherwise it multiplies by all of them again."""
    model = adapted(name)
    gradients(model, KEEP)
    kept = dict(products)
    products.clear()
    monkeypatch.setattr(stack_layers, "with_low_rank_kept", lambda *arguments: [])
    jax.clear_caches()
    gradients(model, KEEP)
    assert kept["linears"] and ("experts" in kept) == (name in ("qwen2_moe", "qwen3_next"))
    assert products == {kind: 2 * count for kind, count in kept.items()}


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_a_backward_that_computes_them_again(name, plan, monkeypatch):
    model = adapted(name)
    found = gradients(model, PLANS[plan])
    monkeypatch.setattr(stack_layers, "with_low_rank_kept", lambda *arguments: [])
    jax.clear_caches()
    assert_gradients_are(found, gradients(model, PLANS[plan]))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_the_planner_counts_what_the_forward_keeps(name):
    """But for the empty rows that fill up experts' tiles."""
    model = adapted(name)
    for layer, spec in zip(model.layers, model.config.layers, strict=True):
        graph, trainable, frozen = nnx.split(layer, nnx.Param, ...)
        segments = with_low_rank_kept(layer.segments(), ())
        names = tuple(map(low_rank_inputs, segments))
        x = jnp.zeros((*SHAPE, model.config.hidden_size))
        made = layer_forward(graph, spec, names, trainable, frozen, x, model.layout(SHAPE), None)[1]
        tokens = x.shape[0] * x.shape[1]
        for segment in segments:
            pairs = tokens * segment.experts_per_token  # experts have a row for each, and empty ones
            arrays = jax.tree.leaves(made[low_rank_inputs(segment)])
            size = sum(a.nbytes if len(a) == tokens else a.nbytes / len(a) * pairs for a in arrays)
            counted = low_rank_bytes(layer, (segment.name, segment.outputs), x.dtype) * tokens
            assert counted == size, segment.name


def test_what_is_traced_on_its_own_is_left_out():
    def run(x):
        return low_rank.recorded(lambda given: x * 2 if given is None else given)

    with low_rank.collected() as made:
        jax.jit(run)(jnp.ones(3))
        assert not made
        run(jnp.ones(3))
    assert [value.tolist() for value in made] == [[2.0, 2.0, 2.0]]
    with low_rank.collected([jnp.zeros(3)]):
        assert jax.jit(run)(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
        assert run(jnp.ones(3)).tolist() == [0.0, 0.0, 0.0]
    assert run(jnp.ones(3)).tolist() == [2.0, 2.0, 2.0]
