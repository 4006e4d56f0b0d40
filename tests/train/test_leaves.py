"""Trees as their leaves: what goes in comes out, arguments keep their names, and no step takes a module apart."""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.train.config import OptimConfig
from jaxtune.train.loop.run import Run
from jaxtune.train.optimizer import stacks
from jaxtune.train.program.leaves import Leaves, over_leaves
from jaxtune.train.spec import setup
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

TREES = st.recursive(
    st.integers(-9, 9).map(jnp.int32) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_tree_comes_back_and_its_structure_is_shared(tree):
    flat = Leaves.of(tree)
    assert jax.tree.structure(flat.tree) == jax.tree.structure(tree)
    assert jax.tree.leaves(flat.tree) == jax.tree.leaves(tree) == jax.tree.leaves(flat)
    again = Leaves.of(jax.tree.map(lambda x: x + 1, tree))
    assert jax.tree.structure(again) == jax.tree.structure(flat)
    doubled = jax.tree.map(lambda x: 2 * x, flat)
    assert jax.tree.leaves(doubled.tree) == [2 * x for x in jax.tree.leaves(tree)]


@given(TREES, TREES)
def test_other_structures_differ(one, other):
    equal = jax.tree.structure(one) == jax.tree.structure(other)
    assert (jax.tree.structure(Leaves.of(one)) == jax.tree.structure(Leaves.of(other))) == equal


SHAPES = st.lists(st.sampled_from([(), (1,), (2,), (2, 3), (3, 2)]), min_size=1, max_size=150)
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])


@settings(deadline=None, max_examples=25)
@given(SHAPES, SHAPES, st.lists(DTYPES, min_size=1, max_size=7))
def test_equal_tensors_lie_in_one_array_and_come_back(first, second, dtypes):
    """In no order that a program can tell from the tree's own, for arrays, shapes and within a program."""
    names = {name: [f"{name}{i}" for i in range(len(shapes))] for name, shapes in (("a", first), ("b", second))}
    kinds = list(zip(names["a"] + names["b"], first + second, strict=True))
    values = {key: jnp.full(shape, i, dtypes[i % len(dtypes)]) for i, (key, shape) in enumerate(kinds)}
    tree = {name: [values[key] for key in keys] for name, keys in names.items()}
    flat = Leaves.of(tree, stacked=True)
    assert jax.tree.structure(flat.tree) == jax.tree.structure(tree)
    for one, other in zip(jax.tree.leaves(flat.tree), jax.tree.leaves(tree), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    of_field = [{(leaf.shape, leaf.dtype) for leaf in leaves if leaf.size > 1} for leaves in tree.values()]
    numbers = sum(leaf.size <= 1 for leaf in jax.tree.leaves(tree))
    assert len(jax.tree.leaves(flat)) <= numbers + sum(map(len, of_field)) + len(kinds) // 64
    shapes = Leaves.of(jax.eval_shape(lambda: tree), stacked=True)
    assert jax.tree.structure(shapes) == jax.tree.structure(flat)
    assert [leaf.shape for leaf in jax.tree.leaves(shapes)] == [leaf.shape for leaf in jax.tree.leaves(flat)]
    doubled = jax.jit(over_leaves(lambda tree: jax.tree.map(lambda a: 2 * a, tree), dict, stacked=True))(flat)
    assert jax.tree.structure(doubled) == jax.tree.structure(flat)
    for one, other in zip(jax.tree.leaves(doubled.tree), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(one, 2 * other)


class Moments(NamedTuple):
    m: list
    v: list


def test_a_stack_holds_one_field_alone():
    """Or an accumulation would take the optimizer's states apart."""
    flat = Leaves.of(Moments([jnp.zeros(3)] * 2, [jnp.zeros(3)] * 5), stacked=True)
    assert [leaf.shape for leaf in jax.tree.leaves(flat)] == [(2, 3), (5, 3)]
    ways = Moments(["here"] * 2, ["there"] * 5)
    assert jax.tree.leaves(flat.of_each(ways)) == ["here", "there"]


def test_a_program_is_the_same_one_over_leaves():
    state = nnx.state(lora_model())

    def double(weights, factor):
        return jax.tree.map(lambda a: a * factor, weights)

    plain = jax.jit(double, donate_argnums=0).lower(state, 2.0)
    flat = jax.jit(over_leaves(double, nnx.State), donate_argnums=0).lower(Leaves.of(state), 2.0)
    assert flat.as_text(debug_info=True) == plain.as_text(debug_info=True)
    assert "weights['layers'][0]" in flat.as_text(debug_info=True)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_step_takes_a_module_apart(tmp_path, monkeypatch, micro_batches):
    """That is Python that may take longer than a small model's step on a GPU."""
    variables = nnx.variablelib
    watched = {function.__code__ for function in (variables._variable_flatten, variables._variable_unflatten)}
    calls, at_steps, dispatched = [], [], Run._dispatched

    def profile(frame, event, _):
        if event == "call" and frame.f_code in watched:
            calls.append(frame.f_code.co_name)

    def noting(*arguments):
        at_steps.append(len(calls))
        return dispatched(*arguments)

    monkeypatch.setattr(Run, "_dispatched", noting)
    model, config = lora_model(), make_config(tmp_path, steps=6, micro_batches=micro_batches)
    trainer = Trainer(model, None, config, dataset(documents(40)))
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        trainer.train()
    finally:
        sys.setprofile(before)
    assert len(at_steps) == 6 and at_steps[0] > 0 and at_steps[-1] == at_steps[0]


@pytest.mark.parametrize(("micro_batches", "optimizer"), [(2, "adamw"), (1, "lion"), (1, "adamw")])
def test_stacks_change_no_number(tmp_path, monkeypatch, micro_batches, optimizer):
    """A rounding of the compiler's choice apart."""
    weights, rule = [], OptimConfig(name=optimizer, learning_rate=1e-3, weight_decay=0.1)
    for size in (0, setup._STACKED_NUMBERS):
        monkeypatch.setattr(setup, "_STACKED_NUMBERS", size)
        config = make_config(tmp_path / str(size), steps=4, micro_batches=micro_batches, optim=rule)
        trainer = Trainer(lora_model(), None, config, dataset(documents(40)))
        weights.append((jax.tree.leaves(nnx.state(trainer.train(), nnx.Param)), trainer.history))
    (alone, history), (stacked, other_history) = weights
    assert [line["loss"] for line in other_history] == pytest.approx([line["loss"] for line in history], rel=1e-6)
    for one, other in zip(alone, stacked, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-7)


@given(st.lists(st.sampled_from([(), (3,), (2, 3), (4, 1)]), min_size=1, max_size=9), st.none() | st.integers(1, 4))
def test_each_tensor_is_reduced_with_at_most_so_many_others(shapes, most):
    tensors = [jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape) + i for i, shape in enumerate(shapes)]
    together = []

    def summed(stack):
        together.append(len(stack))
        return stack.sum(range(1, stack.ndim))

    sums = stacks.of_each(summed, tensors, most)
    assert sums.tolist() == [float(tensor.sum()) for tensor in tensors]
    counts = [shapes.count(shape) for shape in set(shapes)]
    assert sum(together) == len(shapes) and max(together) == min(max(counts), most or max(counts))
    assert len(together) == sum(-(-count // (most or count)) for count in counts)
