"""The Triton attention kernels' bodies, run by Triton's interpreter: forward and backward, against the reference.

In float16: the interpreter multiplies the bits of bfloat16 operands as integers. Everything else is the code that a
GPU runs; what it makes of bfloat16 is checked on one (`make gpu-test`).
"""

from __future__ import annotations

import os
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import attention_backward, attention_forward, packed_layout

HEADS, KV_HEADS = 4, 2

# Padding in front, between and behind; a document of one token; an id that returns; bounds off the tiles' edges.
RUNS = ((0, 5), (1, 90), (2, 1), (1, 60), (0, 7), (3, 110), (0, 27))
CASES = {
    "packed": (RUNS, {}),
    "window_sinks": (RUNS, {"window": 50, "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)}),
    "soft_cap": (RUNS, {"soft_cap": 4.0}),
    "everything": (RUNS, {"window": 30, "soft_cap": 4.0, "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)}),
    "window_soft_cap": (RUNS, {"window": 30, "soft_cap": 4.0}),
    "window_of_one": (RUNS, {"window": 1}),
    "runs": (RUNS, {"inside": lambda index: index % 47 < 40}),  # some cross tiles, some documents' bounds cut
    "runs_everything": (
        RUNS,
        {
            "inside": lambda index: index % 47 < 40,
            "window": 30,
            "soft_cap": 4.0,
            "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32),
        },
    ),
    "one_run": (((1, 300),), {"inside": lambda index: (index > 20) & (index < 290), "window": 50}),
    "one_document": (((1, 300),), {}),
    "whole_tiles": (((1, 256),), {}),
    "less_than_a_tile": (((1, 40),), {"window": 7}),
    "nothing_but_padding": (((0, 140),), {}),
}


def segments_of(runs):
    return np.concatenate([np.repeat(segment, count) for segment, count in runs]).astype(np.int32)[None]


def operands(length, dim, dtype, heads=HEADS, kv_heads=KV_HEADS):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, length, h, dim) for h in (heads, kv_heads, kv_heads, heads)]
    made = [jax.random.normal(k, s).astype(jnp.float16) for k, s in zip(keys, shapes, strict=True)]
    return [x.astype(dtype) for x in made]


def outputs(implementation, arrays, segments, features):
    query, key, value, dout = arrays
    layout = packed_layout(query.shape[:2], jnp.asarray(segments))
    features = dict(features)
    if (inside := features.pop("inside", None)) is not None:
        layout = layout.with_runs(jnp.asarray(inside(np.arange(query.shape[1])))[None])
    options = dict(features, scale=query.shape[-1] ** -0.5, implementation=implementation)
    out, lse = attention_forward(query, key, value, layout, **options)
    gradients = attention_backward(query, key, value, out, lse, dout, layout, **options)
    return [np.asarray(x, np.float64) for x in (out, *gradients) if x is not None], np.asarray(lse)


def check(segments, features, dim, capability=(8, 0), **heads):
    length = segments.shape[1]
    exact, exact_lse = outputs("reference", operands(length, dim, jnp.float32, **heads), segments, features)
    xla, _ = outputs("reference", operands(length, dim, jnp.float16, **heads), segments, features)
    with interpreted(capability):
        got, lse = outputs("triton", operands(length, dim, jnp.float16, **heads), segments, features)
    assert dispatch.record["attention"][0] == "triton"
    real = segments[0] > 0
    # Where each query sees itself alone, dq and dk are zero: there float32's own rounding is all that is left.
    rounding = 1e-6 * max(np.linalg.norm(want) for want in exact)
    for mine, theirs, want in zip(got, xla, exact, strict=True):
        assert np.linalg.norm(mine - want) <= 2 * np.linalg.norm(theirs - want) + rounding
    np.testing.assert_allclose(lse[:, :, real], exact_lse[:, :, real], atol=2e-5)
    for array in got[:4]:
        assert not array[:, ~real].any(), "padding must give zeros"


@pytest.mark.parametrize(
    ("case", "dim"),
    [
        *((case, 64) for case in CASES),
        *(("window_soft_cap", dim) for dim in (80, 96, 192, 256)),
        ("everything", 128),
        ("everything", 512),
        ("runs_everything", 256),
        ("runs_everything", 512),
    ],
)
def test_kernels_against_the_reference(case, dim):
    runs, features = CASES[case]
    check(segments_of(runs), features, dim)


@pytest.mark.full
@pytest.mark.parametrize(
    ("capability", "dim"), [((8, 6), 128), ((9, 0), 128), ((8, 9), 96), ((9, 0), 80), ((8, 9), 256)]
)
def test_the_tiles_of_other_gpus(capability, dim):
    check(segments_of(RUNS), {"window": 80}, dim, capability)


@pytest.mark.full
@pytest.mark.parametrize("case", ["whole_tiles", "packed"])
def test_heads_whose_blocks_have_more_columns(case):
    """Neighbouring heads lie where a block's columns past the head dim would be: as many key heads as query heads, with
    rows that whole tiles divide and that they do not."""
    check(segments_of(CASES[case][0]), {}, 72, kv_heads=HEADS)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_key_value_heads(kv_heads):
    check(segments_of(RUNS), {}, 64, heads=4, kv_heads=kv_heads)


rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=10)


@pytest.mark.full
@pytest.mark.parametrize("features", [{}, {"window": 20, "soft_cap": 3.0}], ids=["plain", "window_soft_cap"])
@hypothesis.settings(max_examples=8)
@hypothesis.given(runs=rows)
def test_any_layout(features, runs):
    row = (list(segments_of(runs)[0]) + [0] * 200)[:200]
    check(np.asarray([row], np.int32), features, 64, heads=2, kv_heads=1)


@pytest.mark.full
def test_no_bit_of_one_document_reaches_another():
    segments = segments_of(RUNS)
    length = segments.shape[1]
    inside = np.zeros(length, bool)
    inside[163:273] = True  # the document of id 3
    arrays = operands(length, 64, jnp.float16)
    changed = [jnp.where(inside[None, :, None, None], -3 * x, x) for x in arrays]
    with interpreted():
        before, _ = outputs("triton", arrays, segments, {})
        after, _ = outputs("triton", changed, segments, {})
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:, ~inside], b[:, ~inside])
        assert (a[:, inside] != b[:, inside]).any()


TRACE = """
import jax, jax.numpy as jnp
from jaxtune.pallas import targets
from jaxtune.pallas.attention import attention, packed_layout
query = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
with targets.compile_for((8, 6)):
    loss = lambda q: attention(q, q, q, packed_layout((2, 128)), scale=0.1, implementation="triton").sum()
    print(str(jax.make_jaxpr(jax.grad(loss))(query)).count("= triton_kernel_call"))
"""


def test_this_jax_triton_takes_the_calls():
    """The newest version (`make aot` has the oldest, with its compiler), in a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", TRACE], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "3", done.stderr
