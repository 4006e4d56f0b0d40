"""The Triton grouped product in Triton's interpreter, against a loop over experts in float64: forward, dx, LoRA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_matmul, triton
from jaxtune.pallas.grouped_matmul.layout import groups_of

IN, OUT, RANK, SCALE = 72, 136, 5, 0.5  # no multiple of a tile in any direction
SIZES = {"uneven": [130, 0, 1, 60], "one row": [0, 1], "all in one": [0, 140, 0], "nothing": [0, 0]}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", SIZES)
def test_against_a_loop(case, transposed):
    sizes = SIZES[case]
    groups = groups_of(jnp.asarray(sizes, jnp.int32), max(1, sum(sizes)))
    draw = np.random.default_rng(0)

    def array(*shape, size=1.0):
        return (size * draw.standard_normal(shape)).astype(np.float16)

    starts = np.asarray(groups.starts())
    held = np.zeros((groups.rows, 1), np.float16)
    for start, size in zip(starts, sizes, strict=True):
        held[start : start + size] = 1
    experts = len(sizes)
    x, dout = array(groups.rows, IN) * held, array(groups.rows, OUT) * held
    weight = array(experts, *((IN, OUT) if transposed else (OUT, IN)), size=IN**-0.5)
    a, b = array(experts, RANK, IN, size=IN**-0.5), array(experts, OUT, RANK)
    want, want_dx = np.zeros((groups.rows, OUT)), np.zeros((groups.rows, IN))
    for e, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        own = slice(start, start + size)
        w = (weight[e].T if transposed else weight[e]).astype(np.float64)
        full = w + SCALE * b[e].astype(np.float64) @ a[e]
        want[own], want_dx[own] = x[own].astype(np.float64) @ full.T, dout[own].astype(np.float64) @ full

    def outputs(implementation):
        def run(x):
            lora = GroupedLora(jnp.asarray(a), jnp.asarray(b), SCALE)
            options = dict(transposed=transposed, implementation=implementation)
            return grouped_matmul(x, jnp.asarray(weight), groups, lora, **options)

        out, pullback = jax.vjp(run, jnp.asarray(x))
        return [np.asarray(array, np.float64) for array in (out, *pullback(jnp.asarray(dout)))]

    xla = outputs("reference")
    with interpreted():
        got = outputs("triton")
    for mine, theirs, exact in zip(got, xla, (want, want_dx), strict=True):
        assert np.linalg.norm(mine - exact) <= 2 * np.linalg.norm(theirs - exact)
        assert not mine[held[:, 0] == 0].any(), "rows that hold nothing must be zero"


def test_narrow_tiles_and_bands_change_nothing():
    """Tiles of 64 rows in groups of 128; bands that do not divide them."""
    groups = groups_of(jnp.array([130, 0, 1, 60], jnp.int32), 191)
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.standard_normal((groups.rows, 64)), jnp.float16)
    weight = jnp.asarray(draw.standard_normal((4, 160, 64)), jnp.float16)
    with interpreted():
        want = triton.product(x, weight, groups, 2)
        got = triton.product(x, weight, groups, 2, tile_sizes=triton.Tile(64, 32, 32, 4, 2, band=3))
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-3, atol=2e-2)


def test_it_serves_where_mosaic_does_not():
    groups = groups_of(jnp.array([4, 4], jnp.int32), 8)
    x, weight = jnp.zeros((groups.rows, IN), jnp.float16), jnp.zeros((2, OUT, IN), jnp.float16)
    with interpreted():
        grouped_matmul(x, weight, groups)
        chosen, refused = dispatch.record["grouped_matmul"]
    assert chosen == "triton" and "Hopper" in refused["mosaic"]
