"""A layer's backward adds no zeros for tensors that a segment does not read."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core
from tiny_models import adapted_model, golden_model

from jaxtune.models.layers.gradients import added, pulled_back, with_zeros, zeros_of_read
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan, ResidualPlan
from jaxtune.models.stack.stack import run_stack


def programs_in(jaxpr, name: str) -> Iterator:
    """Jaxprs of all calls of functions of that name."""
    for equation in jaxpr.eqns:
        for inner in core.jaxprs_in_params(equation.params):
            if equation.params.get("name") == name:
                yield inner
            yield from programs_in(inner, name)


def all_in(jaxprs) -> Iterator:
    """And those within."""
    for jaxpr in jaxprs:
        yield jaxpr
        yield from all_in(inner for equation in jaxpr.eqns for inner in core.jaxprs_in_params(equation.params))


def zeros_added(jaxpr, shapes: set[tuple[int, ...]]) -> int:
    """Additions of a tensor of these shapes that is a broadcast zero, also behind a barrier."""
    zeros: set = set()
    count = 0
    for equation in jaxpr.eqns:
        match equation.primitive.name:
            case "broadcast_in_dim":
                value = equation.invars[0]
                if isinstance(value, core.Literal) and value.aval.dtype != jax.dtypes.float0 and value.val == 0:
                    zeros.add(equation.outvars[0])
            case "optimization_barrier":
                pairs = zip(equation.invars, equation.outvars, strict=True)
                zeros |= {new for old, new in pairs if not isinstance(old, core.Literal) and old in zeros}
            case "add" | "add_any":
                values = [value for value in equation.invars if not isinstance(value, core.Literal)]
                count += any(value in zeros and value.aval.shape in shapes for value in values)
    return count


def backwards_of(model, plan: LayerPlan, tile: int | None = None) -> tuple[list, set[tuple[int, ...]]]:
    """(the traced backwards of a model's layers and the loops in them, the shapes of what trains)"""
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    shape, plans = (1, 8), ResidualPlan.uniform(plan, len(model.layers), tile)

    def total(trainable, x):
        model = nnx.merge(graph, trainable, frozen)
        return run_stack(model.layers, model.config.layers, x, model.layout(shape), plans)[0].sum()

    x = jnp.ones((*shape, model.config.hidden_size))
    traced = jax.make_jaxpr(jax.grad(total, (0, 1)))(trainable, x).jaxpr
    shapes = {leaf.shape for leaf in jax.tree.leaves(trainable["layers"])}
    return [*all_in(programs_in(traced, "layer_backward"))], shapes


@pytest.mark.parametrize("targets", [None, "all-linear", ["o_proj"]], ids=["all weights", "adapters", "an adapter"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "qwen3_moe", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("plan", [(KEEP,), (RECOMPUTE,), (RECOMPUTE, 4)], ids=["keep", "recompute", "tiles"])
def test_a_layers_backward_adds_no_zeros(name, targets, plan):
    model = golden_model(name)
    if targets is not None:
        model = adapted_model(model, r=2, target_modules=targets)
    programs, shapes = backwards_of(model, *plan)
    assert programs
    assert [zeros_added(program, shapes) for program in programs] == [0] * len(programs)


def test_zeros_are_counted():
    def run(x):
        zeros = jnp.zeros(3)
        return jax.lax.optimization_barrier((x, zeros))[1] + x, x + zeros, x + 1.0

    traced = jax.make_jaxpr(run)(jnp.ones(3)).jaxpr
    assert (zeros_added(traced, {(3,)}), zeros_added(traced, {(4,)})) == (2, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.integers(1, 3), st.booleans(), st.data())
@settings(max_examples=25, deadline=None)
def test_what_a_derivative_does_not_read_has_none(read, inputs, jitted, data):
    """And the sum of two such, with zeros in the end, is that of the whole gradients."""
    tensors = {f"t{index}": jnp.arange(1.0, 4.0) + index for index in range(len(read))}
    others = data.draw(st.lists(st.booleans(), min_size=len(read), max_size=len(read)))
    values = [jnp.arange(3.0) * (index + 1) for index in range(inputs)]

    def function(reads, tensors, *values):
        total = functools.reduce(jnp.add, values)
        for is_read, tensor in zip(reads, tensors.values(), strict=True):
            total = total * tensor if is_read else total + jax.lax.stop_gradient(tensor)
        return total

    trees = []
    for reads in (read, others):
        run = functools.partial(function, reads)
        pullback = jax.vjp(jax.jit(run) if jitted else run, tensors, *values)[1]
        whole = pullback(jnp.ones(3))
        first, *of_values = pulled_back(pullback, jnp.ones(3))
        assert [first[name] is not None for name in tensors] == reads
        for name, is_read in zip(tensors, reads, strict=True):
            np.testing.assert_array_equal(first[name] if is_read else 0.0 * whole[0][name], whole[0][name])
        jax.tree.map(np.testing.assert_array_equal, of_values, list(whole[1:]))
        zeros = zeros_of_read(run, tensors, *(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values))
        assert {name: np.asarray(zero).tolist() for name, zero in zeros.items() if zero is not None} == {
            name: [0.0] * 3 for name, is_read in zip(tensors, reads, strict=True) if is_read
        }
        trees.append((first, whole[0]))
    (first, whole), (second, whole_second) = trees
    total = with_zeros(added(first, second), tensors)
    jax.tree.map(np.testing.assert_array_equal, total, jax.tree.map(jnp.add, whole, whole_second))
    assert added(None, first) is first and added(first, None) is first
