"""linear_divergence against whole logits: values, gradients, chunks; and that whole logits never exist."""

from __future__ import annotations

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas.linear_cross_entropy import linear_divergence
from jaxtune.train.objectives.distillation import generalized_jsd

ROWS, LENGTH, DIM, WIDE, VOCAB = 2, 13, 16, 24, 50
CASES = {
    "forward": dict(beta=0.0),
    "reverse": dict(beta=1.0),
    "Jensen-Shannon": dict(beta=0.5, temperature=0.7),
    "generalised": dict(beta=0.1, temperature=2.0),
    "soft caps and scales": dict(
        beta=0.3, soft_cap=3.0, logit_scale=0.5, teacher_soft_cap=2.0, teacher_logit_scale=1.5, temperature=1.3
    ),
    "one soft cap": dict(beta=1.0, teacher_soft_cap=2.0),
}


def operands(dtype=jnp.float32, teacher_dtype=None, vocab=VOCAB):
    draw = np.random.default_rng(0)

    def array(*shape, of=dtype):
        return jnp.asarray(draw.standard_normal(shape), of)

    weights = jnp.asarray(draw.choice([0.0, 1.0, 0.25], (ROWS, LENGTH)), jnp.float32)
    others = teacher_dtype or dtype
    return array(ROWS, LENGTH, DIM), array(vocab, DIM), array(ROWS, LENGTH, WIDE, of=others), array(
        vocab, WIDE, of=others
    ), weights  # fmt: skip


def dense(hidden, head, teacher_hidden, teacher_head, weights, beta, temperature=1.0, **options):
    """(sum, divergences, entropies) of whole logits, differentiable."""

    def logits(states, weight, scale, cap):
        found = scale * jnp.einsum("btd,vd->btv", states, weight, precision="highest")
        return found if cap is None else cap * jnp.tanh(found / cap)

    own = logits(hidden, head, options.get("logit_scale", 1.0), options.get("soft_cap"))
    others = logits(
        teacher_hidden, teacher_head, options.get("teacher_logit_scale", 1.0), options.get("teacher_soft_cap")
    )
    losses = generalized_jsd(own, others, beta=beta, temperature=temperature)
    log_probs = jax.nn.log_softmax(own / temperature)
    return (weights * losses).sum(), losses, -(jnp.exp(log_probs) * log_probs).sum(-1)


def with_gradients(function, arguments):
    """(the function's results, the gradients of the first by all of its arguments)."""

    def first(*arguments):
        results = function(*arguments)
        return results[0], results

    gradients, results = jax.jit(jax.grad(first, tuple(range(len(arguments))), has_aux=True))(*arguments)
    return results, gradients


@pytest.mark.parametrize("chunk_tokens", [None, 10])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.gpu
def test_values_and_gradients(name, chunk_tokens):
    arguments, options = operands(), CASES[name]
    fused = functools.partial(linear_divergence, chunk_tokens=chunk_tokens, **options)
    got, gradients = with_gradients(fused, arguments)
    want, want_gradients = with_gradients(functools.partial(dense, **options), arguments)
    for one, other in zip((*got, *gradients), (*want, *want_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)
    assert not np.asarray(gradients[2]).any() and not np.asarray(gradients[3]).any()  # none reaches the teacher
    np.testing.assert_allclose(fused(*arguments)[0], got[0], rtol=1e-6)


@pytest.mark.parametrize("dtypes", [(jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.bfloat16)])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_heads_of_other_dtypes(dtypes, beta):
    arguments = operands(*dtypes)  # heads of 16 bits are filled up to 56 rows, those of 32 are not
    got, gradients = with_gradients(functools.partial(linear_divergence, beta=beta, chunk_tokens=10), arguments)
    wide = [a.astype(jnp.float32) for a in arguments]
    want, want_gradients = with_gradients(functools.partial(dense, beta=beta), wide)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5)  # softmax arithmetic is fp32
    error = 1e-5 if dtypes[0] == jnp.float32 else 2e-2
    for one, other in zip(gradients[:2], want_gradients[:2], strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=error, atol=error)


def test_a_frozen_head_has_no_gradient():
    arguments = operands()
    _, gradients = with_gradients(functools.partial(linear_divergence, head_gradient=False), arguments)
    assert not np.asarray(gradients[1]).any() and np.asarray(gradients[0]).any()


def biggest(jaxpr) -> int:
    """The most elements of any value that a jaxpr computes, inner jaxprs included."""
    most = 0
    for equation in jaxpr.eqns:
        most = max([most, *(out.aval.size for out in equation.outvars if hasattr(out.aval, "size"))])
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            most = max(most, biggest(inner))
    return most


def test_logits_of_all_tokens_exist_of_neither_model():
    rows, length, vocab, chunk = 2, 64, 4096, 16
    shapes = [(rows, length, DIM), (vocab, DIM), (rows, length, WIDE), (vocab, WIDE), (rows, length)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    step = jax.value_and_grad(lambda *a: linear_divergence(*a, beta=0.5, chunk_tokens=chunk)[0], (0, 1))
    assert biggest(jax.make_jaxpr(step)(*arrays).jaxpr) <= max(chunk * vocab, vocab * WIDE)
    memory = jax.jit(step).lower(*arrays).compile().memory_analysis()
    whole = 4 * rows * length * vocab  # bytes of one model's logits
    assert 0 < memory.temp_size_in_bytes < whole


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(beta=1.5), "beta"),
        (dict(temperature=0.0), "temperature"),
        (dict(teacher_soft_cap=-1.0), "teacher_soft_cap"),
        (dict(teacher_head=jnp.zeros((VOCAB + 1, WIDE))), "teacher_head"),
    ],
)
def test_what_cannot_be_is_named(change, message):
    names = ("hidden", "head", "teacher_hidden", "teacher_head", "weights")
    with pytest.raises(ValueError, match=message):
        linear_divergence(**(dict(zip(names, operands(), strict=True)) | change))
