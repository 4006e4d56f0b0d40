"""The bodies of the Triton kernels of the gated delta rule, run by Triton's interpreter: forward and backward, against
the definition.

In float16: the interpreter multiplies the bits of bfloat16 operands as integers. On a GPU, tests/pallas/
test_delta_rule.py runs the kernels themselves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.delta_rule import gated_delta_rule, short_convolution_parts
from jaxtune.pallas.delta_rule.triton import DIM

LONG_SCAN = {"xla_backend_extra_options": ""}  # tests/pallas/test_delta_rule.py says why

# Documents by length, a negative one is padding: borders inside and at the edges of chunks, of one token, one alone in
# a chunk's last place, one over several chunks; a row of no whole number of chunks.
CASES = {
    "packed": (5, 1, 40, -17, 1, 64, 70, 1, -20, 3),
    "documents_of_one_token": (1,) * 66,
    "a_document": (192,),
    "less_than_a_chunk": (23,),
    "padding": (-70,),
    "4,096 tokens": (1, 700, 64, 2, 600, 63, 500, 129, 1, 400, 300, 650, 686),
}


def outputs(implementation, arrays, dout, ids):
    """The output and the gradients of the arrays. Triton's interpreter needs numbers, so its calls are not traced."""

    def rule(*arrays):
        return gated_delta_rule(*arrays, packed_layout(ids.shape, jnp.asarray(ids)), implementation=implementation)

    def run(arrays, dout):
        out, pull = jax.vjp(rule, *arrays)
        return out, *pull(dout.astype(out.dtype))

    run = jax.jit(run, compiler_options=LONG_SCAN) if implementation == "reference" else run
    return [np.asarray(x, np.float64) for x in run(arrays, dout)]


@pytest.mark.parametrize(
    ("case", "key_heads", "heads"),
    [*((case, 1, 1 if case == "4,096 tokens" else 2) for case in CASES), ("packed", 2, 2)],
)
def test_kernels_against_the_definition(case, key_heads, heads):
    runs = CASES[case]
    ids = np.concatenate([np.full(abs(n), max(0, number * np.sign(n))) for number, n in enumerate(runs, 1)])
    ids = ids[None].astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = ((key_heads, DIM), (key_heads, DIM), (heads, DIM), (heads, DIM))
    drawn = [jax.random.normal(k, (*ids.shape, *shape)) for k, shape in zip(keys, shapes, strict=False)]
    query, key, value, dout = (x.astype(jnp.float16) for x in (drawn[0], drawn[1] + 0.3, *drawn[2:]))
    decay = -jnp.exp(2.0 * jax.random.normal(keys[4], (*ids.shape, heads)) - 2.0)
    decay = jnp.where(jax.random.uniform(keys[5], decay.shape) < 0.03, -jnp.inf, decay)  # some forget all
    beta = jax.random.uniform(keys[6], decay.shape).at[:, ::7].set(0.0)  # some write nothing
    arrays = query, key, value, decay, beta

    finite = (*arrays[:3], jnp.maximum(decay, -300.0), beta)  # the definition's gradient of a decay is exp's
    want = outputs("reference", [x.astype(jnp.float32) for x in finite], dout, ids)
    with interpreted((9, 0)):
        got = outputs("triton", arrays, dout, ids)
    assert dispatch.record["gated_delta_rule"][0] == "triton"
    # What a decay between documents does not reach has no gradient: there float32's own rounding is all that is left.
    rounding = 1e-6 * max(map(np.linalg.norm, want))
    for mine, exact in zip(got, want, strict=True):
        assert np.linalg.norm(mine - exact) <= 1e-3 * np.linalg.norm(exact) + rounding
        assert not mine[:, ids[0] == 0].any(), "padding must give zeros"


@pytest.mark.full
@pytest.mark.parametrize("runs", [(1, 2, 3, 4, 5, -2, 61, 1, 1), (-5, 40, -20), (-7,)])
def test_the_convolution_against_the_definition(runs):
    """Queries, keys and values and their gradients, with borders at all places of a group of four tokens."""
    ids = np.concatenate([np.full(abs(n), max(0, number * np.sign(n))) for number, n in enumerate(runs, 1)])
    ids, parts = ids[None].astype(np.int32), (256, 256, 256)
    keys = jax.random.split(jax.random.key(0), 3)
    x, dout = (jax.random.normal(key, (*ids.shape, sum(parts))).astype(jnp.float16) for key in keys[:2])
    dout = dout.at[:, ::5].set(jnp.nan) if (ids == 0).all() else dout
    weight = jax.random.normal(keys[2], (sum(parts), 4)).astype(jnp.float16)
    layout = packed_layout(ids.shape, jnp.asarray(ids))

    def run(implementation, x, weight, dout):
        def function(x, weight):
            return short_convolution_parts(x, weight, layout, parts, implementation=implementation)

        out, pull = jax.vjp(function, x, weight)
        return (*out, *pull(tuple(jnp.split(dout, 3, -1))))

    want = [np.asarray(a, np.float64) for a in run("reference", *(a.astype(jnp.float32) for a in (x, weight, dout)))]
    with interpreted((9, 0)):
        got = [np.asarray(a, np.float64) for a in run("triton", x, weight, dout)]
    assert dispatch.record["short_convolution"][0] == "triton"
    for mine, exact in zip(got, want, strict=True):
        assert np.linalg.norm(mine - exact) <= 1e-3 * np.linalg.norm(exact)
    assert not any(each[ids == 0].any() for each in got[:4]), "padding must give zeros"


@pytest.mark.full
def test_no_bit_of_one_document_reaches_another():
    ids = np.repeat([1, 2, 3], [50, 60, 40])[None].astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (1, 150, 1, DIM)).astype(jnp.float16) for key in keys]
    rates = jnp.full((1, 150, 1), 0.5)
    inside = ids == 2
    changed = [jnp.where(inside[..., None, None], -3 * x, x) for x in arrays]
    with interpreted():
        before, after = (outputs("triton", (*each[:3], -rates, rates), each[3], ids) for each in (arrays, changed))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[~inside], other[~inside])
        assert (one[inside] != other[inside]).any()
