"""The Triton kernels that round rows to e4m3, in Triton's interpreter, bit for bit against plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas.quant_matmul import fp8_product, fp8_rounding
from jaxtune.pallas.quant_matmul.fp8_rounding import Tile


def drawn(count: int, widths, dtype, seed: int = 0):
    """Arrays whose rows have other sizes; one row is zeros, another so small that its scale is the least."""
    draw = np.random.default_rng(seed)
    sizes = np.logspace(-3, 3, count)[:, None]
    arrays = [jnp.asarray(draw.normal(size=(count, width)) * sizes, dtype) for width in widths]
    arrays = [array.at[1].set(0) for array in arrays]
    if dtype == jnp.bfloat16:
        small = [draw.choice([-1, 1], width) * draw.uniform(2e-37, 4e-36, width) for width in widths]
        arrays = [array.at[2].set(jnp.asarray(numbers, dtype)) for array, numbers in zip(arrays, small, strict=True)]
    return arrays


def same(got, want, but: int | None = None) -> None:
    """Codes and scales, bit for bit, but for those of a row in which XLA on a CPU may miss a NaN; there codes have one
    and a scale is one."""
    for one, other in zip(got, want, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape and one.dtype == other.dtype
        if but is not None:
            assert np.isnan(np.asarray(one[but], np.float32)).any()
            one, other = (np.delete(each, but, 0) for each in (one, other))
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


TILES = [None, Tile(1, 256, 4, 8), Tile(2, 128, 4, 3)]


# Widths that are and are no multiples of a piece, one and several arrays.
@pytest.mark.parametrize("shape", TILES)
@pytest.mark.parametrize(("widths", "scaled"), [((512,), False), ((264, 40, 8), True), ((2304,), True)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows(widths, scaled, dtype, shape, monkeypatch):
    if shape is not None:
        monkeypatch.setattr(fp8_rounding, "tile", lambda *of: shape)
    arrays = drawn(7, widths, dtype)
    arrays[0] = arrays[0].at[3, 5].set(jnp.nan).at[4, 6].set(-jnp.inf)
    factors = jnp.asarray(np.random.default_rng(1).uniform(0.1, 3, sum(widths)), jnp.float32) if scaled else None
    with interpreted((9, 0)):
        assert fp8_rounding.refusal(widths, dtype, False) is None
        codes, scales = fp8_rounding.rounded(arrays, factors)
    wide = jnp.concatenate(arrays, axis=1).astype(jnp.float32)
    same((codes, scales[:, None]), fp8_product.rounded(wide if factors is None else wide * factors), but=3)


@pytest.mark.parametrize("shape", [None, Tile(4, 128, 4), Tile(8, 128, 4, 3)])
@pytest.mark.parametrize("widths", [(512,), (264, 40, 128, 8)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_blocks(widths, dtype, shape, monkeypatch):
    """Each array's part is filled up with zeros."""
    if shape is not None:
        monkeypatch.setattr(fp8_rounding, "tile", lambda *of: shape)
    arrays = drawn(19, widths, dtype)
    arrays[0] = arrays[0].at[3, 5].set(jnp.nan).at[4, 6].set(jnp.inf)
    with interpreted((9, 0)):
        assert fp8_rounding.refusal(widths, dtype, True) is None
        codes, scales = fp8_rounding.rounded(arrays, None, blocks=True)
    filled = [jnp.pad(array, ((0, 0), (0, -array.shape[1] % 128))) for array in arrays]
    same((codes, scales.T), fp8_product.rounded(jnp.concatenate(filled, axis=1), True), but=3)


@pytest.mark.parametrize(("blocks", "scaled"), [(False, False), (False, True), (True, False)])
def test_rows_of_experts_are_gathered_from_tokens(blocks, scaled):
    draw, width = np.random.default_rng(0), 264
    [x] = drawn(50, (width,), jnp.bfloat16)
    experts = jnp.asarray([0, 2, 5], jnp.int32)  # the last stands for no expert
    tokens = jnp.asarray(np.where(draw.random(384) < 0.3, 50, draw.integers(0, 50, 384)), jnp.int32)
    factors = jnp.asarray(draw.uniform(0.1, 3, (3, width)), jnp.float32) if scaled else None
    with interpreted((9, 0)):
        codes, scales = fp8_rounding.rounded([x], factors, experts, tokens, blocks)
    rows = jnp.concatenate([x, jnp.zeros((1, width), x.dtype)])[tokens].astype(jnp.float32)
    if factors is not None:
        rows *= jnp.repeat(factors[jnp.minimum(experts, 2)], 128, axis=0)
    want, of_rows = fp8_product.rounded(rows, blocks)
    if blocks:
        same((codes[:, :width], scales.T), (want, of_rows))
    else:
        same((codes, scales[:, None]), (want, of_rows))
