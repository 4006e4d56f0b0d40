"""Attention against a dense float64 definition in numpy, forward and gradients, over every kind of packed row."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.attention import (
    attention,
    attention_backward,
    attention_forward,
    cudnn,
    mosaic,
    packed_layout,
    reference,
    triton,
)

ROWS, LENGTH, HEADS, DIM = 2, 24, 4, 8
SCALE = 0.3
# fp32 against float64: operands of order 1, sums of at most 24 terms.
TOLERANCE = dict(rtol=2e-5, atol=3e-6)


def visibility(segments: np.ndarray, window: int | None = None, causal: bool = True, inside=None) -> np.ndarray:
    """bool[B, T, T], from the words of the contract: one loop over queries and keys. inside: of runs, bool[B, T]."""
    rows, length = segments.shape
    visible = np.zeros((rows, length, length), bool)
    for row in range(rows):
        for query in range(length):
            for key in range(query, -1, -1):
                if segments[row, key] != segments[row, query] or segments[row, query] == 0:
                    break  # an earlier run of the same id is another document
                visible[row, query, key] = window is None or query - key < window
    if inside is not None:  # the look ahead is not cut by the window
        behind = visibility(segments)
        for row, query, key in np.argwhere(behind):
            visible[row, key, query] |= bool(np.asarray(inside)[row, key : query + 1].all())
    return visible if causal else visible | visible.swapaxes(1, 2)


def dense(
    query,
    key,
    value,
    segments,
    *,
    scale=SCALE,
    window=None,
    soft_cap=None,
    sinks=None,
    dout=None,
    causal=True,
    inside=None,
):
    """float64 (out, lse, gradients of sum(out * dout) or None)."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    group = query.shape[2] // key.shape[2]
    keys, values = np.repeat(key, group, 2), np.repeat(value, group, 2)
    raw = scale * np.einsum("bqhd,bkhd->bhqk", query, keys)
    capped = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    visible = visibility(np.asarray(segments), window, causal, inside)[:, None]
    exponential = np.where(visible, np.exp(capped), 0.0)
    total = exponential.sum(-1)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64))[None, :, None]
    real = (np.asarray(segments) != 0)[:, None]
    weights = exponential / np.where(real, total, 1.0)[..., None]
    out = np.einsum("bhqk,bkhd->bqhd", weights, values)
    lse = np.log(np.where(real, total, 1.0))
    if dout is None:
        return out, lse, None
    dout = np.asarray(dout, np.float64)
    dweights = np.einsum("bqhd,bkhd->bhqk", dout, values)
    delta = (weights * dweights).sum(-1)
    dscores = weights * (dweights - delta[..., None])
    if soft_cap is not None:
        dscores = dscores * (1 - np.tanh(raw / soft_cap) ** 2)
    shape = (*key.shape[:3], group, key.shape[3])
    gradients = [
        scale * np.einsum("bhqk,bkhd->bqhd", dscores, keys),
        scale * np.einsum("bhqk,bqhd->bkhd", dscores, query).reshape(shape).sum(3),
        np.einsum("bhqk,bqhd->bkhd", weights, dout).reshape(shape).sum(3),
    ]
    if sinks is not None:
        share = np.where(real, np.exp(np.asarray(sinks, np.float64))[None, :, None] / np.where(real, total, 1), 0)
        gradients.append(-(share * delta).sum((0, 2)))
    return out, lse, gradients


def operands(kv_heads=2, dtype=np.float32, seed=0, length=LENGTH):
    draw = np.random.default_rng(seed)
    shapes = [(ROWS, length, h, DIM) for h in (HEADS, kv_heads, kv_heads, HEADS)]
    return [jnp.asarray(draw.standard_normal(shape), dtype) for shape in shapes]


SINKS = jnp.asarray([0.5, -1.0, 2.0, 0.0], jnp.float32)


@functools.partial(jax.jit, static_argnames=("window", "soft_cap", "causal"))
def run(query, key, value, dout, segments, sinks=None, *, window=None, soft_cap=None, causal=True, inside=None):
    """(out, lse, gradients) of the public functions: the differentiable one must agree with the pair."""
    layout = packed_layout(query.shape[:2], segments, causal=causal)
    layout = layout if inside is None else layout.with_runs(inside)
    options = dict(scale=SCALE, window=window, soft_cap=soft_cap)
    out, lse = attention_forward(query, key, value, layout, sinks=sinks, **options)
    gradients = attention_backward(query, key, value, out, lse, dout, layout, sinks=sinks, **options)
    same, pullback = jax.vjp(
        lambda q, k, v, s: attention(q, k, v, layout, sinks=s, **options), query, key, value, sinks
    )
    return out, lse, gradients, same, pullback(dout)


INSIDE = jnp.asarray([row_of % 7 < 5 for row_of in range(24)] + [row_of % 11 != 3 for row_of in range(24)]).reshape(
    2, 24
)


def row(*runs: tuple[int, int]) -> list[int]:
    """row((1, 5), (0, 2)): five of segment 1, two of padding."""
    return [segment for segment, count in runs for _ in range(count)]


ONE = [row((1, 24))] * 2
PACKED = [row((1, 7), (2, 9), (3, 8)), row((1, 1), (2, 22), (3, 1))]
LAYOUTS = {
    "one document": ONE,
    "packed": PACKED,
    "padding at the end": [row((1, 10), (0, 14)), row((1, 4), (2, 4), (0, 16))],
    "padding in front": [row((0, 6), (1, 18)), row((0, 1), (1, 3), (2, 20))],
    "padding in the middle": [row((1, 5), (0, 3), (2, 16)), row((1, 5), (0, 1), (1, 8), (0, 1), (2, 9))],
    "returning ids": [row((1, 6), (2, 6), (1, 6), (2, 6)), row((5, 8), (1, 8), (5, 8))],
    "one-token documents": [list(range(1, 25)), row((1, 1), (2, 1), (1, 1), (0, 1), (1, 20))],
    "nothing but padding": [row((0, 24)), row((1, 24))],
}
FEATURES = {
    "plain": {},
    "window": dict(window=5),
    "window of one": dict(window=1),
    "soft cap": dict(soft_cap=0.7),
    "sinks": dict(sinks=SINKS),
    "all": dict(window=4, soft_cap=0.9, sinks=SINKS),
    "both ways": dict(causal=False),
    "runs": dict(inside=INSIDE),
    "runs, all": dict(inside=INSIDE, window=4, soft_cap=0.9, sinks=SINKS),
    "both ways, all": dict(causal=False, soft_cap=0.9, sinks=SINKS),
}


def check(segments, features, tensors, tolerance=TOLERANCE):
    segments = np.asarray(segments, np.int32)
    query, key, value, dout = tensors
    out, lse, gradients, same, pulled = run(query, key, value, dout, segments, **features)
    want_out, want_lse, want_gradients = dense(query, key, value, segments, dout=dout, **features)
    real = segments != 0
    np.testing.assert_allclose(out, want_out, **tolerance)
    np.testing.assert_allclose(np.moveaxis(np.asarray(lse), 1, 2)[real], np.moveaxis(want_lse, 1, 2)[real], **tolerance)
    assert not np.asarray(out)[~real].any(), "padding has an output"
    assert (gradients[3] is None) == ("sinks" not in features)
    for name, got, want in zip(("query", "key", "value", "sinks"), gradients, want_gradients, strict=False):
        np.testing.assert_allclose(got, want, err_msg=name, **tolerance)
        if name != "sinks":
            assert got.dtype == query.dtype
            assert not np.asarray(got)[~real].any(), f"padding has a gradient in {name}"
    # XLA, where it serves, may on a GPU sum the sinks' gradient in another order in another program.
    by_xla = jax.default_backend() == "gpu" and dispatch.record["attention"][0] == "reference"
    for one, other, exact in zip((out, *gradients), (same, *pulled), (*[True] * 4, not by_xla), strict=True):
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=0, atol=0 if exact else 1e-6 * np.abs(other).max())


@pytest.mark.gpu
def test_the_definition_has_the_right_gradients():
    """The dense gradients above, against differences of the dense forward."""
    query, key, value, dout = (np.asarray(a, np.float64) for a in operands())
    segments = np.asarray(LAYOUTS["padding in the middle"])
    sinks = np.asarray(SINKS, np.float64)
    options = dict(window=6, soft_cap=0.9)
    gradients = dense(query, key, value, segments, sinks=sinks, dout=dout, **options)[2]
    arrays = [query, key, value, sinks]
    for at, gradient in enumerate(gradients):
        direction = np.random.default_rng(at).standard_normal(arrays[at].shape)

        def along(step, at=at, direction=direction):
            moved = [a + step * direction if i == at else a for i, a in enumerate(arrays)]
            return (dense(*moved[:3], segments, sinks=moved[3], **options)[0] * dout).sum()

        difference = (along(1e-5) - along(-1e-5)) / 2e-5
        np.testing.assert_allclose((gradient * direction).sum(), difference, rtol=1e-7)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.gpu
def test_forward_and_gradients(layout, features):
    check(LAYOUTS[layout], FEATURES[features], operands())


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.gpu
def test_key_value_heads(kv_heads):
    check(PACKED, FEATURES["all"], operands(kv_heads))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2**-6), (jnp.float16, 2**-9)])
@pytest.mark.gpu
def test_half_precision(dtype, tolerance):
    """A few roundings of the format: of weights, of the output, of the scores' gradient."""
    check(PACKED, {}, operands(dtype=dtype), dict(rtol=tolerance, atol=2 * tolerance))


segment_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12).map(
    lambda runs: (row(*runs) + [0] * LENGTH)[:LENGTH]
)


@pytest.mark.parametrize("features", ["plain", "all", "both ways, all", "runs, all"])
@hypothesis.given(segments=st.tuples(segment_rows, segment_rows))
@pytest.mark.gpu
def test_any_layout(features, segments):
    check(segments, FEATURES[features], operands())


@pytest.mark.parametrize("features", ["plain", "all", "both ways, all", "runs, all"])
@pytest.mark.parametrize("chunk", [1, 7, 23])
def test_chunks_of_queries_change_nothing(monkeypatch, chunk, features):
    """The path for long rows, which keeps only some queries' scores at a time."""
    monkeypatch.setattr(reference, "_MAX_SCORES", chunk * ROWS * HEADS * LENGTH)
    assert reference._chunked(LENGTH, ROWS * HEADS * LENGTH)[0] < LENGTH
    run.clear_cache()
    try:
        check(LAYOUTS["padding in the middle"], FEATURES[features], operands())
    finally:
        run.clear_cache()


def test_scores_stay_bounded_on_long_rows():
    """A row of 64k tokens: no array of the program comes near its 64k x 64k scores."""
    length = 1 << 16
    query = jax.ShapeDtypeStruct((1, length, 2, DIM), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def forward_backward(query, segments):
        layout = packed_layout(segments.shape, segments)
        out, pullback = jax.vjp(lambda q: attention(q, q, q, layout, scale=SCALE), query)
        return pullback(out)

    text = str(jax.make_jaxpr(forward_backward)(query, segments))
    assert "scan" in text
    assert f",{length},{length}]" not in text


@pytest.mark.parametrize("features", ["plain", "all"])
@pytest.mark.gpu
def test_no_document_sees_another(features):
    """Other values in one document leave every bit of the others' outputs and gradients alone."""
    segments = np.asarray(LAYOUTS["padding in the middle"], np.int32)
    changed = np.zeros_like(segments, bool)
    changed[0, :5] = changed[1, 6:14] = True  # the first document; one between paddings, whose id stands before it too
    before = operands()
    after = [jnp.where(changed[:, :, None, None], 1e3 * a + 7, a) for a in before]
    options = {key: value for key, value in FEATURES[features].items() if key != "sinks"}
    first, second = (run(*tensors, segments, **options) for tensors in (before, after))
    for one, other in zip((first[0], *first[2][:3]), (second[0], *second[2][:3]), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[~changed], np.asarray(other)[~changed])
        assert (np.asarray(one)[changed] != np.asarray(other)[changed]).any()


# ---- layout


def test_layout_of_no_ids_is_one_document():
    layout = packed_layout((2, 5))
    assert layout.full and layout.max_documents == 1
    np.testing.assert_array_equal(layout.doc_start, np.zeros((2, 5)))
    np.testing.assert_array_equal(layout.doc_end, np.full((2, 5), 5))


@pytest.mark.gpu
def test_layout_bounds_and_positions():
    layout = packed_layout((1, 9), jnp.asarray([[0, 4, 4, 0, 0, 4, 2, 2, 2]]))
    np.testing.assert_array_equal(layout.doc_start, [[0, 1, 1, 3, 4, 5, 6, 6, 6]])
    np.testing.assert_array_equal(layout.doc_end, [[0, 3, 3, 3, 4, 6, 9, 9, 9]])
    np.testing.assert_array_equal(layout.positions(), [[0, 0, 1, 0, 0, 0, 0, 1, 2]])
    assert not layout.full and layout.max_documents is None


# ---- dispatch


def test_an_explicit_implementation_never_falls_back():
    query, key, value, _ = operands()
    layout = packed_layout(query.shape[:2])
    with pytest.raises(ValueError, match="attention: implementation 'cudnn' cannot serve this call: no NVIDIA GPU"):
        attention(query, key, value, layout, scale=SCALE, implementation="cudnn")
    with pytest.raises(
        ValueError, match="attention: no implementation 'flash'; there are cudnn, mosaic, triton, reference"
    ):
        attention(query, key, value, layout, scale=SCALE, implementation="flash")


def test_the_choice_and_its_reasons_are_recorded():
    query, key, value, _ = operands()
    layout = packed_layout(query.shape[:2])
    attention_forward(query, key, value, layout, scale=SCALE)
    refused = {
        "cudnn": "no NVIDIA GPU",
        "mosaic": "needs a Hopper GPU (compute capability 9.0)",
        "triton": "no NVIDIA GPU",
    }
    assert dispatch.record["attention"] == ("reference", refused)
    attention_forward(query, key, value, layout, scale=SCALE, implementation="reference")
    assert dispatch.record["attention"] == ("reference", {})


def test_choose():
    table = {"fast": lambda: "too old", "good": lambda: None, "slow": lambda: None}
    assert dispatch.choose("op", table, None) == "good"
    assert dispatch.record["op"] == ("good", {"fast": "too old"})
    assert dispatch.choose("op", table, "slow") == "slow"
    with pytest.raises(ValueError, match="'fast' cannot serve this call: too old"):
        dispatch.choose("op", table, "fast")
    with pytest.raises(ValueError, match="no implementation supports this call"):
        dispatch.choose("op", {"fast": lambda: "too old"}, None)


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((9, 0), {}, None),
        ((9, 0), dict(max_documents=32), None),
        ((9, 0), dict(dim=256), None),
        ((8, 0), {}, None),
        ((9, 0), dict(dtype=jnp.float32), "dtype float32"),
        ((9, 0), dict(dim=12), "head dim 12"),
        ((9, 0), dict(dim=264), "head dim 264"),
        ((8, 0), dict(dim=256), "head dim 256"),
        ((9, 0), dict(soft_cap=30.0), "soft cap"),
        ((9, 0), dict(sinks=SINKS), "sinks"),
        ((9, 0), dict(max_documents=None), "no promise of max_documents"),
        ((9, 0), dict(max_documents=33), "up to 33 documents a row"),
        ((8, 0), dict(max_documents=2), "packed rows need compute capability 9.0"),
        ((9, 0), dict(causal=False, dim=72), None),
        ((8, 0), dict(causal=False), "packed rows need compute capability 9.0"),
    ],
)
def test_what_cudnn_refuses(capability, changes, reason):
    settings = dict(dim=64, dtype=jnp.bfloat16, max_documents=1, soft_cap=None, sinks=None, causal=True) | changes
    query = jax.ShapeDtypeStruct((1, 8, 2, settings["dim"]), settings["dtype"])
    layout = packed_layout((1, 8), jnp.ones((1, 8), jnp.int32), settings["max_documents"], settings["causal"])
    with targets.compile_for(capability):
        got = cudnn.refusal(query, layout, window=None, soft_cap=settings["soft_cap"], sinks=settings["sinks"])
    assert got is None if reason is None else reason in got
    assert targets.here() is None


@pytest.mark.parametrize("kernels", [mosaic, triton])
def test_what_sees_later_tokens_has_no_kernel_of_ours(kernels, monkeypatch):
    query = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
    monkeypatch.setattr(triton.compat, "triton_refusal", lambda: None)
    with targets.compile_for((9, 0)):
        reasons = [
            kernels.refusal(query, packed_layout((1, 8), causal=causal), window=None, soft_cap=None, sinks=None)
            for causal in (False, True)
        ]
    assert reasons == ["tokens that see later ones", None]


def test_documents_handed_to_cudnn():
    """Starts and lengths of each row's documents, and where their statistics lie, whatever the padding."""
    segments = jnp.asarray([[1, 1, 0, 2, 2, 2], [0, 0, 0, 0, 0, 0], [3, 1, 1, 3, 0, 0]])
    layout = packed_layout((3, 6), segments, max_documents=4)
    lengths, offsets = cudnn._documents(layout)
    np.testing.assert_array_equal(lengths, [[2, 3, -1, -1], [-1, -1, -1, -1], [1, 2, 1, -1]])
    np.testing.assert_array_equal(offsets, [[0, 3, -1, -1, -1], [-1, -1, -1, -1, -1], [0, 1, 3, -1, -1]])
    document, offset = cudnn._stat_index(layout)
    real = np.asarray(segments) != 0
    np.testing.assert_array_equal(np.asarray(document)[real], [0, 0, 1, 1, 1, 2, 3, 3, 4])
    np.testing.assert_array_equal(np.asarray(offset)[real], [0, 1, 0, 1, 2, 0, 0, 1, 0])


# ---- over a mesh


@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_over_a_mesh_give_what_one_device_gives(with_sinks):
    rng = np.random.default_rng(7)
    query, dout = (jnp.asarray(rng.standard_normal((4, 33, 4, 16)), jnp.float32) for _ in range(2))
    key, value = (jnp.asarray(rng.standard_normal((4, 33, 2, 16)), jnp.float32) for _ in range(2))
    sinks = jnp.asarray(rng.standard_normal(4), jnp.float32) if with_sinks else None
    layout = packed_layout((4, 33), jnp.asarray(np.sort(rng.integers(0, 4, (4, 33)), axis=1)))

    @jax.jit
    def run(query, key, value, sinks, layout):
        def loss(query, key, value, sinks):
            return (attention(query, key, value, layout, scale=0.25, window=9, sinks=sinks) * dout).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3) if with_sinks else (0, 1, 2))(query, key, value, sinks)

    alone = run(query, key, value, sinks, layout)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, PartitionSpec("data"))
        shared = run(*jax.device_put((query, key, value), rows), sinks, jax.device_put(layout, rows))
    assert len(shared) == 3 + with_sinks
    for ours, theirs in zip(shared[:3], alone[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if with_sinks:
        np.testing.assert_allclose(shared[3], alone[3], rtol=1e-5, atol=1e-6)


def test_both_ways_without_segments():
    """A whole row is one document that every token sees."""
    query, key, value, _ = operands()
    layout = packed_layout(query.shape[:2], causal=False)
    want, _, _ = dense(query, key, value, np.ones((ROWS, LENGTH), int), causal=False)
    np.testing.assert_allclose(attention(query, key, value, layout, scale=SCALE), want, **TOLERANCE)
    with pytest.raises(ValueError, match="window = 3"):
        attention(query, key, value, layout, scale=SCALE, window=3)
