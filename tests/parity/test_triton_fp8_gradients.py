"""The Triton kernel of fp8_gradients.py in Triton's interpreter, against plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.quant_matmul import fp8_gradients, fp8_product


def drawn(tokens: int, widths, ranks, dtype):
    """(gradients of outputs, low-rank inputs, B's), of numbers that `dtype` has. Of the blocks of 128 numbers some are
    zeros, and some tiny or large."""
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(widths) + 1))
    factors = jnp.asarray([1.0, 0.0, 1e-3, 64.0], dtype)
    douts = [
        jax.random.normal(next(keys), (tokens, width)).astype(dtype) * factors[jnp.arange(width) // 128 % 4]
        for width in widths
    ]
    inner = jax.random.normal(next(keys), (tokens, sum(ranks))).astype(dtype)
    bs = [jax.random.normal(next(keys), shape).astype(dtype) for shape in zip(widths, ranks, strict=True)]
    return douts, inner, [b.astype(jnp.float32) for b in bs]


# Rows that are and are no multiple of a tile, one and several programs along each axis, one output and several, and
# ranks of which some are no power of two.
@pytest.mark.parametrize(
    ("tokens", "widths", "ranks"),
    [(37, (1024,), (16,)), (128, (384, 128), (8, 20)), (200, (128, 256), (1, 31)), (70, (128,) * 4, (16,) * 4)],
)
@pytest.mark.parametrize(("capability", "dtype"), [((8, 9), jnp.float16), ((9, 0), jnp.bfloat16)])
def test_the_results_are_those_of_the_rounding_and_of_plain_products(tokens, widths, ranks, capability, dtype):
    douts, inner, bs = drawn(tokens, widths, ranks, dtype)
    with interpreted(capability):
        assert fp8_gradients.refusal(widths, ranks, dtype) is None
        (codes, scales), products, dbs = fp8_gradients.rounded_pair(douts, inner, bs, fp8_gradients.tile())
    want, want_scales = fp8_product.side_by_side(douts, None, True, "reference")
    np.testing.assert_array_equal(scales, want_scales)
    # The interpreter does not fuse multiply-adds, by which a GPU divides exactly.
    assert (np.float32(codes) != np.float32(want)).mean() < 1e-3
    np.testing.assert_allclose(np.float32(codes), np.float32(want), rtol=1 / 8, atol=2**-9)
    assert products.dtype == dtype
    at = np.cumsum((0, *ranks))
    for dout, b, db, first, end in zip(douts, bs, dbs, at, at[1:], strict=False):
        exact = np.float64(dout) @ np.float64(b)
        assert np.linalg.norm(np.float64(products[:, first:end]) - exact) <= jnp.finfo(dtype).eps * np.linalg.norm(
            exact
        )
        exact = np.float64(dout).T @ np.float64(inner[:, first:end])
        assert db.dtype == jnp.float32 and np.linalg.norm(np.float64(db) - exact) <= 1e-6 * np.linalg.norm(exact)


@pytest.mark.full
@pytest.mark.parametrize("several", [False, True])
def test_the_check_at_first_use_has_many_tiles_in_a_row(several, monkeypatch):
    """A program reads tiles ahead in a loop. The codes that are compared are those of another kernel."""
    checks, steps = [], []
    monkeypatch.setattr(dispatch, "first_use", lambda op, name, kind, compare: checks.append(compare) and None)
    fp8_gradients._first_use(jnp.dtype(jnp.bfloat16), 16, several)
    monkeypatch.setattr(jax, "jit", lambda function, **_: function)  # the interpreter runs on arrays
    with interpreted((9, 0)):
        call = compat.triton_call

        def recorded(kernel, *given, **settings):
            steps.append((kernel.__name__, settings["STEPS"]))
            return call(kernel, *given, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(compat, "triton_call", recorded)
            got, want = checks[0]()
    (ours, count), (other, _) = steps
    assert ours == "rounded_pair_kernel" and other == "to_fp8_blocks_kernel"
    assert count >= 4 * fp8_gradients.tile().stages
    np.testing.assert_array_equal(got[1], want[1])
    for one, other in zip(got, want, strict=True):
        one, other = np.float32(one), np.float32(other)
        assert np.linalg.norm(one - other) <= 0.01 * np.linalg.norm(other) > 0
