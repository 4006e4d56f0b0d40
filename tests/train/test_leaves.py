"""Trees as their leaves: what goes in comes out, arguments keep their names, and no step takes a module apart."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.train.loop.run import Run
from jaxtune.train.program.leaves import Leaves, over_leaves
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
