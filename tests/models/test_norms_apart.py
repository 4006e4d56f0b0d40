"""A layer's backward where a kernel computes the norms' gradients: it is called once for each norm, with what comes to
the stream otherwise, and the gradients are those that segments with norms in them have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checks import assert_gradients_are, stack_gradients
from tiny_models import adapted_model, golden_model

from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan
from jaxtune.models.stack.stack_norms import NormsApart
from jaxtune.pallas.normed_heads import normed
from jaxtune.pallas.normed_stream import api, triton
from jaxtune.pallas.quant_matmul import low_rank

SHAPE = (2, 12)


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


@pytest.mark.full
@pytest.mark.parametrize("plan", [KEEP, RECOMPUTE], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_gradients_are_the_same(name, plan, request):
    model = golden_model(name)
    want = stack_gradients(model, plan, SHAPE)
    calls = request.getfixturevalue("by_kernel")
    assert_gradients_are(stack_gradients(model, plan, SHAPE), want)
    assert (calls.count(True), calls.count(False)) == NORMS[name]


@pytest.mark.full
@pytest.mark.parametrize("plan", [KEEP, LayerPlan("keep", mid="offload")], ids=str)
@pytest.mark.parametrize(
    ("targets", "norms"), [("all-linear", 2), (["q_proj", "v_proj", "o_proj"], 1), (["o_proj"], 0)], ids=str
)
def test_adapters_alone_do_not_need_the_normed_stream_again(plan, targets, norms, by_kernel, monkeypatch):
    """The gradients of A are computed from what was normed; they are the same."""
    model = adapted_model(golden_model("qwen3"), r=3, target_modules=targets)
    calls, own = [], low_rank.Factors.contracted
    monkeypatch.setattr(low_rank.Factors, "contracted", lambda *given: calls.append(1) or own(*given))
    found = stack_gradients(model, plan, SHAPE)
    assert len(calls) % norms == 0 < len(calls) if norms else not calls
    monkeypatch.setattr(NormsApart, "factors", lambda norms, segment, values: ())
    jax.clear_caches()
    assert_gradients_are(found, stack_gradients(model, plan, SHAPE))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_float16_keeps_the_normed_stream(dtype, by_kernel):
    """A gradient times the factor of a row, which may be less than a hundredth, would end in zeros there."""
    model = adapted_model(golden_model("qwen3"), r=3, target_modules="all-linear")
    x = jnp.ones((*SHAPE, model.config.hidden_size), dtype)
    norms = NormsApart(model.layers[0], x, None, (), {})
    [project, *_] = norms.segments
    [factors] = norms.factors(project, {"layer_input": x})
    assert (factors is None) == (dtype == jnp.float16)
