"""The Mosaic attention kernels' bodies, run by Pallas' GPU interpreter: forward and backward, several tiles and a tail.

Their products with a left side in registers are written out there (the interpreter has no such wgmma); everything
else is the code that a GPU runs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, gpu_kernel, targets, tuning
from jaxtune.pallas.attention import (
    attention,
    attention_backward,
    attention_forward,
    mosaic,
    packed_layout,
    reference,
)

ROWS, LENGTH, DIM = 1, 300, 64  # three tiles of keys, five of queries, the last ones with a tail


def row(*runs) -> np.ndarray:
    """Segment ids [1, LENGTH] of (id, tokens) runs, the rest padding."""
    ids = np.concatenate([np.repeat(number, tokens) for number, tokens in runs])
    return np.pad(ids, (0, LENGTH - len(ids))).astype(np.int32)[None]


# Padding in front, between and behind; a document of one token; an id that returns; bounds off the tiles' edges.
SEGMENTS = row((0, 5), (1, 90), (2, 1), (1, 60), (0, 7), (3, 110))

# segment ids, features, query heads, key heads
CASES = {
    "packed": (SEGMENTS, {}, 4, 2),
    "window_sinks": (SEGMENTS, {"window": 50, "sinks": np.linspace(-1, 1, 2, dtype=np.float32)}, 2, 1),
    # a sink that is far below all scores, and one far above, whose exponential is infinite
    "far_sinks": (SEGMENTS, {"sinks": np.asarray([-90, 90, 0.5], np.float32)}, 3, 1),
    "soft_cap": (SEGMENTS, {"soft_cap": 4.0}, 2, 1),
    "one_document": (None, {}, 2, 1),
    "heads_that_share_nothing": (SEGMENTS, {"window": 100}, 1, 1),
    "three_heads_share": (SEGMENTS, {}, 3, 1),
    "documents_of_one_token": (row(*((number, 1) for number in range(1, 200)), (0, 30), (7, 65)), {}, 2, 1),
    "padding_only": (row((0, 1)), {}, 2, 1),
}


def operands(dtype, heads=4, kv_heads=2, dim=DIM):
    draw = np.random.default_rng(0)
    shapes = [(ROWS, LENGTH, count, dim) for count in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(draw.standard_normal(shape).astype(jnp.bfloat16).astype(dtype)) for shape in shapes]


def outputs(implementation, arrays, segments, features, backward=None):
    layout = packed_layout((ROWS, LENGTH), None if segments is None else jnp.asarray(segments))
    query, key, value, dout = arrays
    options = dict(features, scale=query.shape[-1] ** -0.5)
    out, lse = attention_forward(query, key, value, layout, implementation=implementation, **options)
    assert dispatch.record["attention"][0] == implementation
    options |= dict(implementation=backward or implementation)
    gradients = attention_backward(query, key, value, out, lse, dout, layout, **options)
    return [np.asarray(x, np.float64) for x in (out, *gradients) if x is not None], np.asarray(lse)


def distance(got, want):
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def compare(segments, features, heads, kv_heads, dim=DIM, backward=None):
    exact, exact_lse = outputs("reference", operands(jnp.float32, heads, kv_heads, dim), segments, features)
    xla, _ = outputs("reference", operands(jnp.bfloat16, heads, kv_heads, dim), segments, features)
    with gpu_kernel.interpreted():
        got, lse = outputs("mosaic", operands(jnp.bfloat16, heads, kv_heads, dim), segments, features, backward)
    assert dispatch.record["attention"][0] == (backward or "mosaic")
    for mine, theirs, want in zip(got, xla, exact, strict=True):
        assert distance(mine, want) <= 2 * distance(theirs, want)
    real = np.ones(LENGTH, bool) if segments is None else segments[0] > 0
    np.testing.assert_allclose(lse[:, :, real], exact_lse[:, :, real], atol=2e-5)
    for array in got[:4]:
        assert not array[:, ~real].any(), "padding must give zeros"


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.gpu
def test_kernels_against_the_reference(case):
    compare(*CASES[case])


@pytest.mark.full
@pytest.mark.gpu
def test_the_blocks_of_head_dim_128(monkeypatch):
    """Other blocks walk other edges; the head dim itself changes none."""
    for blocks in (mosaic.FORWARD, mosaic.BACKWARD_QUERY, mosaic.BACKWARD_KEY):
        monkeypatch.setitem(blocks, DIM, blocks[128])
    compare(*CASES["three_heads_share"])


# Forms of the kernels that a tuner may choose: (kernel, what differs from the heuristic's blocks).
FORMS = {
    "lean": dict(lean=True),
    "no_turns": dict(lean=True, turns=False, stages=2),
    "one_buffer": dict(buffers=1),
}


def forced(kernel, change):
    heuristic = mosaic.HEURISTIC[kernel][DIM].as_dict()
    return tuning.forced(f"attention {kernel}", heuristic | change)


@pytest.mark.full
@pytest.mark.parametrize(
    ("form", "case"),
    [
        *((form, "window_sinks") for form in FORMS),
        ("lean", "soft_cap"),
        ("lean", "documents_of_one_token"),
        ("lean", "three_heads_share"),
        ("one_buffer", "packed"),  # five items a program: the three buffers come round
    ],
)
@pytest.mark.gpu
def test_forms_of_the_forward(form, case):
    """The gradients by the reference, from the kernel's output and log-sum-exp."""
    with forced("forward", FORMS[form]):
        compare(*CASES[case], backward="reference")


@pytest.mark.full
@pytest.mark.gpu
def test_lean_masks_in_the_backward():
    with forced("dquery", FORMS["lean"]), forced("dkey", FORMS["lean"]):
        compare(*CASES["window_sinks"])


@pytest.mark.full
@pytest.mark.gpu
def test_lean_scores_with_a_negative_scale():
    """The maximum of the scores is then the minimum of what they are made of."""
    query, key, value, _ = operands(jnp.bfloat16, 2, 1)
    layout = packed_layout((ROWS, LENGTH), jnp.asarray(SEGMENTS))
    with gpu_kernel.interpreted(), forced("forward", FORMS["lean"]):
        flipped = attention_forward(query, key, value, layout, scale=-1.0, implementation="mosaic")
        plain = attention_forward(-query, key, value, layout, scale=1.0, implementation="mosaic")
    for a, b in zip(flipped, plain, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-2, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("case", ["window_sinks", "soft_cap"])
@pytest.mark.gpu
def test_head_dim_256(case):
    """Its dk and dv are a kernel's of their own, and nothing of an item's own side is double-buffered."""
    compare(*CASES[case], dim=256)


@pytest.mark.full
@pytest.mark.parametrize("case", ["window_sinks", "soft_cap", "heads_that_share_nothing"])
@pytest.mark.gpu
def test_head_dim_512(case):
    """Every result is made in two halves of 256 columns, by kernels of their own."""
    compare(*CASES[case], dim=512)


def test_gradients_by_the_implementation_that_is_named():
    query = jnp.ones((1, 128, 1, 256), jnp.bfloat16)
    layout = packed_layout((1, 128), jnp.ones((1, 128), jnp.int32))

    def loss(query, **named):
        return attention(query, query, query, layout, scale=0.1, implementation="mosaic", **named).sum()

    with targets.compile_for((9, 0)):
        jax.eval_shape(jax.grad(functools.partial(loss, backward_implementation="reference")), query)
        assert dispatch.record["attention"][0] == "reference"
        jax.eval_shape(jax.grad(loss), query)
    assert dispatch.record["attention"] == ("mosaic", {})


@pytest.mark.full
@pytest.mark.gpu
def test_a_head_dim_between_the_kernels():
    """D = 96 and the like are padded to the next one that there are kernels for; here 40 to 64."""
    compare(*CASES["soft_cap"], dim=40)


@pytest.mark.full
def test_every_item_is_done_once_however_many_programs_there_are(monkeypatch):
    """More programs than items, and a number that does not divide them."""
    monkeypatch.setattr(mosaic, "_INTERPRETED_PROGRAMS", 7)
    compare(SEGMENTS, {}, 1, 1)


@pytest.mark.full
@pytest.mark.parametrize(("case", "dim"), [("packed", DIM), ("soft_cap", 512)])
def test_query_heads_of_a_key_head_are_shared_out_where_there_are_few_tiles(monkeypatch, case, dim):
    """On a GPU every case here has fewer tiles of keys than multiprocessors."""
    monkeypatch.setattr(mosaic, "_INTERPRETED_PROGRAMS", 24)
    compare(*CASES[case], dim=dim)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "window", "shares"),
    [
        (8, 16, 1, 512, None, 1),  # Gemma 4 12B's global layers: 256 tiles of 64 keys
        (1, 16, 1, 512, None, 8),  # 32 tiles: eight shares are the fewest that occupy 132 multiprocessors
        (1, 8, 2, 512, None, 4),  # E4B's global layers: 64 tiles, and four query heads a key head are all there are
        (1, 8, 2, 256, 512, 1),  # its sliding layers
        (1, 32, 8, 128, None, 1),  # 8B: 128 tiles of 128 keys
    ],
)
def test_shares_of_query_heads(rows, heads, kv_heads, dim, window, shares):
    query, key = (jax.ShapeDtypeStruct((rows, 2048, count, dim), jnp.bfloat16) for count in (heads, kv_heads))
    with targets.compile_for((9, 0)):
        assert mosaic._head_shares(query, key, mosaic.BACKWARD_KEY[dim], window) == shares


@pytest.mark.full
@pytest.mark.parametrize("form", [{}, FORMS["no_turns"]], ids=["heuristic", "no_turns"])
@pytest.mark.gpu
def test_no_bit_of_one_document_reaches_another(form):
    with gpu_kernel.interpreted(), forced("forward", form):
        before, _ = outputs("mosaic", operands(jnp.bfloat16), SEGMENTS, {})
        arrays = operands(jnp.bfloat16)
        inside = (np.arange(LENGTH) >= 163) & (np.arange(LENGTH) < 273)  # the document of id 3
        arrays = [jnp.where(inside[None, :, None, None], -3 * x, x) for x in arrays]
        after, _ = outputs("mosaic", arrays, SEGMENTS, {})
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[:, ~inside], b[:, ~inside])
        assert (a[:, inside] != b[:, inside]).any()


def test_packed_and_short_rows_go_to_the_kernels_and_long_whole_rows_to_cudnn():
    def chosen(length, packed, dim=64, **features):
        query = jax.ShapeDtypeStruct((1, length, 4, dim), jnp.bfloat16)
        layout = packed_layout((1, length), jnp.ones((1, length), jnp.int32) if packed else None)
        options = dict(scale=1.0, **features)
        with targets.compile_for((9, 0)):
            jax.eval_shape(lambda q: attention_forward(q, q, q, layout, **options), query)
        return dispatch.record["attention"]

    assert chosen(4096, packed=True)[0] == "mosaic"
    assert chosen(4096, packed=False)[0] == "mosaic"
    assert chosen(4224, packed=False)[0] == "cudnn"
    assert chosen(2048, packed=False, dim=96)[0] == "cudnn"  # padded to 128 in ours
    assert chosen(2048, packed=False, dim=256)[0] == "mosaic"
    assert chosen(2048, packed=True, dim=256)[0] == "mosaic"
    assert chosen(8192, packed=False, dim=256)[0] == "cudnn"
    assert chosen(8192, packed=False, soft_cap=5.0) == ("mosaic", {"cudnn": "soft cap"})


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "reason"),
    [
        ((8, 0), jnp.bfloat16, 64, "Hopper"),
        ((9, 0), jnp.float32, 64, "float32"),
        ((9, 0), jnp.bfloat16, 520, "head dim 520; at most 512"),
    ],
)
def test_refusals_say_why(capability, dtype, dim, reason):
    query = jnp.zeros((1, 128, 2, dim), dtype)
    layout = packed_layout((1, 128))
    with targets.compile_for(capability), pytest.raises(ValueError, match=reason):
        attention_forward(query, query, query, layout, scale=1.0, implementation="mosaic")


def test_bounds_rise_along_the_row_and_match_the_definition():
    layout = packed_layout((1, LENGTH), jnp.asarray(SEGMENTS))
    for window in (None, 50):
        lower, upper = (np.asarray(x)[0] for x in mosaic._bounds(layout, window))
        assert (np.diff(lower) >= 0).all() and (np.diff(upper) >= 0).all()
        index = np.arange(LENGTH)
        from_queries = (index >= lower[:, None]) & (index <= index[:, None])
        from_keys = (index[:, None] >= index) & (index[:, None] < upper)
        visible = np.asarray(reference._visible(layout.doc_start, layout.doc_end, 0, LENGTH, window, True))[0, 0, 0]
        np.testing.assert_array_equal(from_queries, visible)
        np.testing.assert_array_equal(from_keys & (SEGMENTS[0] > 0)[:, None], visible)
