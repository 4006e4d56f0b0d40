"""The grouped product against a loop over experts in float64: values, and gradients of rows, weights and adapters.

The same body runs over the Mosaic kernel in Pallas' GPU interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.grouped_matmul import TILE_ROWS, GroupedLora, grouped_bias, grouped_matmul, mosaic
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.quant_matmul import NF4

IN, OUT, RANK, SCALE = 128, 192, 8, 0.5
SIZES = {
    "uneven": [130, 0, 1, 60],
    "first and last empty": [0, 128, 0],
    "one row": [0, 1],
    "all in one": [0, 300, 0],
    "nothing": [0, 0],
}


def operands(sizes, transposed, seed=0):
    """(x, weight, a, b, dout) in float64 with bfloat16's values, and the mask of rows that hold something."""
    groups = groups_of(jnp.asarray(sizes, jnp.int32), max(1, sum(sizes)))
    draw = np.random.default_rng(seed)

    def array(*shape, size=1.0):
        return np.asarray(jnp.asarray(size * draw.standard_normal(shape), jnp.bfloat16), np.float64)

    experts = len(sizes)
    starts = np.asarray(groups.starts())
    held = np.zeros(groups.rows, bool)
    for start, size in zip(starts, sizes, strict=True):
        held[start : start + size] = True
    x, dout = array(groups.rows, IN) * held[:, None], array(groups.rows, OUT) * held[:, None]
    weight = array(experts, IN, OUT, size=IN**-0.5) if transposed else array(experts, OUT, IN, size=IN**-0.5)
    return groups, held, (x, weight, array(experts, RANK, IN, size=IN**-0.5), array(experts, OUT, RANK), dout)


def exact(sizes, groups, transposed, x, weight, a, b, dout):
    """out, dx, dweight, da, db by a loop over experts in float64."""
    out, dx = np.zeros((groups.rows, OUT)), np.zeros((groups.rows, IN))
    dweight, da, db = (np.zeros(array.shape) for array in (weight, a, b))
    for e, (start, size) in enumerate(zip(np.asarray(groups.starts()), sizes, strict=True)):
        rows = slice(start, start + size)
        w = weight[e].T if transposed else weight[e]
        full = w + SCALE * b[e] @ a[e]
        out[rows], dx[rows] = x[rows] @ full.T, dout[rows] @ full
        product = dout[rows].T @ x[rows]
        dweight[e] = product.T if transposed else product
        da[e], db[e] = SCALE * b[e].T @ product, SCALE * product @ a[e].T
    return out, dx, dweight, da, db


def outputs(implementation, groups, transposed, arrays, dtype):
    x, weight, a, b, dout = (jnp.asarray(array, dtype) for array in arrays)

    def run(x, weight, a, b):
        lora = GroupedLora(a, b, SCALE)
        return grouped_matmul(x, weight, groups, lora, transposed=transposed, implementation=implementation)

    out, pullback = jax.vjp(run, x, weight, a, b)
    return [np.asarray(array, np.float64) for array in (out, *pullback(dout))]


def distance(got, want):
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_reference(case, transposed):
    sizes = SIZES[case]
    groups, _, arrays = operands(sizes, transposed)
    want = exact(sizes, groups, transposed, *arrays)
    for got, expected in zip(outputs("reference", groups, transposed, arrays, jnp.float32), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize(("case", "transposed"), [("uneven", False), ("uneven", True)])
def test_mosaic_in_the_interpreter(case, transposed):
    sizes = SIZES[case]
    groups, held, arrays = operands(sizes, transposed)
    want = exact(sizes, groups, transposed, *arrays)
    xla = outputs("reference", groups, transposed, arrays, jnp.bfloat16)
    with mosaic.interpreted():
        got = outputs(None, groups, transposed, arrays, jnp.bfloat16)
    assert dispatch.record["grouped_matmul"][0] == "mosaic"
    for mine, theirs, expected in zip(got, xla, want, strict=True):
        assert distance(mine, expected) <= 2 * distance(theirs, expected)
    for rows in got[:2]:
        assert not rows[~held].any(), "rows that hold nothing must be zero"


@pytest.mark.parametrize("blocks", [mosaic.Blocks(64, 2, 1), mosaic.Blocks(64, 3, 2)])
def test_mosaic_order_of_the_items_changes_nothing(blocks):
    """Narrow tiles, more of them than programs, and bands that do not divide them."""
    groups, _, (x, weight, *_) = operands(SIZES["uneven"], False)
    x, weight = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    with mosaic.interpreted():
        got = mosaic.product(x, weight, groups, 2, blocks=blocks)
        want = mosaic.product(x, weight, groups, 2)
    np.testing.assert_array_equal(got, want)


def test_wide_weights_of_a_trainable_base():
    """Past the width of thin products the gradient of the weight is added up tile by tile."""
    sizes = [200, 0, 140]
    groups = groups_of(jnp.asarray(sizes, jnp.int32), sum(sizes))
    draw = np.random.default_rng(1)
    x, dout = draw.standard_normal((groups.rows, 300)), draw.standard_normal((groups.rows, 260))
    held = np.zeros((groups.rows, 1))
    for start, size in zip(np.asarray(groups.starts()), sizes, strict=True):
        held[start : start + size] = 1
    x, dout = (np.float32(array * held) for array in (x, dout))
    _, pullback = jax.vjp(lambda w: grouped_matmul(jnp.asarray(x), w, groups), jnp.zeros((3, 260, 300)))
    (got,) = pullback(jnp.asarray(dout))
    for e, start in enumerate(np.asarray(groups.starts())):
        rows = slice(start, start + sizes[e])
        np.testing.assert_allclose(got[e], dout[rows].T @ x[rows], atol=1e-3)


def test_weights_in_four_bits_are_their_decoded_values():
    groups, _, (x, weight, a, b, dout) = operands(SIZES["uneven"], False)
    packed = NF4.encode(weight)
    lora = GroupedLora(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32), SCALE)
    x = jnp.asarray(x, jnp.float32)

    def run(weight):
        out, pullback = jax.vjp(lambda x: grouped_matmul(x, weight, groups, lora), x)
        return out, *pullback(jnp.asarray(dout, jnp.float32))

    for mine, theirs in zip(run(packed), run(packed.decode(jnp.float32)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_bias_and_its_gradients():
    sizes = SIZES["uneven"]
    groups, held, _ = operands(sizes, False)
    draw = np.random.default_rng(2)
    rows, drows = (jnp.asarray(draw.standard_normal((groups.rows, 5)) * held[:, None], jnp.float32) for _ in range(2))
    bias, weights = (jnp.asarray(draw.random(shape), jnp.float32) for shape in ((4, 5), groups.rows))
    expert = np.minimum(np.repeat(np.asarray(groups.tile_expert), TILE_ROWS), 3)
    got, pullback = jax.vjp(lambda *args: grouped_bias(*args, groups), rows, bias, weights)
    want, want_pullback = jax.vjp(lambda r, b, w: r + w[:, None] * b[expert], rows, bias, weights)
    np.testing.assert_allclose(np.asarray(got)[held], np.asarray(want)[held], atol=1e-6)
    for mine, theirs in zip(pullback(drows), want_pullback(drows), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "dtype", "columns", "reason"),
    [
        ((8, 0), jnp.bfloat16, OUT, "Hopper"),
        ((9, 0), jnp.float32, OUT, "float32"),
        ((9, 0), jnp.bfloat16, 100, "size 100 is not a multiple of 64"),
    ],
)
def test_refusals_say_why(capability, dtype, columns, reason):
    groups = groups_of(jnp.array([4, 4], jnp.int32), 8)
    x, weight = jnp.zeros((groups.rows, IN), dtype), jnp.zeros((2, columns, IN), dtype)
    with dispatch.compile_for(capability), pytest.raises(ValueError, match=reason):
        grouped_matmul(x, weight, groups, implementation="mosaic")


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [((256, IN), (3, OUT, IN), "of 2 experts"), ((256, 64), (2, OUT, IN), r"x \(256, 64\) does not fit weight")],
)
def test_shapes_that_do_not_fit_are_refused(x, weight, message):
    groups = groups_of(jnp.array([4, 4], jnp.int32), 200)
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.zeros(x), jnp.zeros(weight), groups)
