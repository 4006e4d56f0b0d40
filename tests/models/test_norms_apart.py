"""A layer's backward where a kernel computes the norms' gradients: it is called once for each norm, with what comes to
the stream otherwise, and the gradients are those that segments with norms in them have."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_models import golden_model

from jaxtune.models.residual_plan import KEEP, RECOMPUTE, ResidualPlan
from jaxtune.models.stack import run_stack
from jaxtune.pallas.normed_heads import normed
from jaxtune.pallas.normed_stream import api, triton

SHAPE = (2, 12)


def gradients(model, plan):
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(5), (*SHAPE, model.config.hidden_size))
    probe = jax.random.normal(jax.random.key(6), x.shape)
    plans = ResidualPlan.uniform(plan, len(model.layers))

    def total(trainable, x):
        model = nnx.merge(graph, trainable, frozen)
        return (run_stack(model.layers, model.config.layers, x, model.layout(SHAPE), plans)[0] * probe).sum()

    return jax.jit(jax.grad(total, (0, 1)))(trainable, x)


@pytest.fixture
def by_kernel(monkeypatch):
    """Plain JAX stands for the kernel, for norms of any size: a list of whether each call adds a gradient."""
    calls = []

    def gradient(x, dnormed, passed, weight, eps, offset, float32, trained):
        calls.append(passed is not None)
        pull = jax.vjp(lambda x, weight: normed(x, weight, eps, offset, float32), x, weight)[1]
        dx, dweight = pull(dnormed)
        return [dx if passed is None else passed + dx, *([dweight[None]] if trained else [])]

    monkeypatch.setattr(triton, "gradient", gradient)
    monkeypatch.setattr(api, "_chosen", lambda *call: "triton")
    jax.clear_caches()
    yield calls
    jax.clear_caches()


# {model: (norms before parts of a layer of each kind, other norms)}. Layers of one
# kind are traced once.
NORMS = {
    "qwen3": (4, 0),
    "qwen2_moe": (4, 0),
    "qwen3_next": (4, 1),
    "gemma3": (4, 4),
    "olmo2": (0, 4),
    "cohere2": (0, 0),
}


@pytest.mark.parametrize("plan", [KEEP, RECOMPUTE], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_are_the_same(name, plan, request):
    model = golden_model(name)
    want = jax.tree.leaves(gradients(model, plan))
    calls = request.getfixturevalue("by_kernel")
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(gradients(model, plan)), want, strict=True):
        near = 2e-6 * float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=near, err_msg=jax.tree_util.keystr(path))
    assert (calls.count(True), calls.count(False)) == NORMS[name]
