"""The norm and rotation of heads: plain JAX against the definition, head by head, and which calls kernels refuse. The
kernels run in Triton's interpreter (tests/parity/test_triton_normed_heads.py)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.pallas import dispatch, targets
from jaxtune.pallas.normed_heads import normed_heads, triton


def drawn(rows=2, tokens=5, heads=3, dim=8, rotary=8):
    keys = jax.random.split(jax.random.key(1), 3)
    x, weight = jax.random.normal(keys[0], (rows, tokens, heads, dim)), jax.random.normal(keys[1], (dim,))
    angles = 3 * jax.random.normal(keys[2], (rows, tokens, rotary // 2))
    return x, weight, (jnp.cos(angles), jnp.sin(angles))


def defined(x, weight, table, eps, offset):
    """Each pair of normed numbers is a complex number, multiplied by that of the angle."""
    x, weight, cos, sin = (np.asarray(each, np.float64) for each in (x, weight, *table))
    normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (offset + weight)
    half = cos.shape[-1]
    turned = (normed[..., :half] + 1j * normed[..., half : 2 * half]) * (cos + 1j * sin)[:, :, None]
    return np.concatenate([turned.real, turned.imag, normed[..., 2 * half :]], -1)


@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.gpu
def test_heads_are_normed_and_rotated(rotary, offset):
    x, weight, table = drawn(rotary=rotary)
    got = normed_heads(x, weight, table, eps=0.1, offset=offset, float32=True)
    np.testing.assert_allclose(got, defined(x, weight, table, 0.1, offset), atol=2e-6)


@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.gpu
def test_the_derivative_is_that_of_the_definition(rotary):
    x, weight, table = drawn(rotary=rotary)
    probe = np.asarray(jax.random.normal(jax.random.key(2), x.shape), np.float64)
    dx, dweight = jax.grad(lambda x, w: (normed_heads(x, w, table) * probe).sum(), argnums=(0, 1))(x, weight)

    def slope(at, step):
        """Of the definition, along `step`, by a difference in float64."""

        def total(by):
            x, weight = (np.float64(a) + by * b for a, b in zip(at, step))
            return (defined(x, weight, table, 1e-6, 0.0) * probe).sum()

        return (total(1e-5) - total(-1e-5)) / 2e-5

    draw = np.random.default_rng(0)
    for _ in range(4):
        step = draw.normal(size=x.shape), draw.normal(size=weight.shape)
        by_ours = sum((np.float64(a) * b).sum() for a, b in zip((dx, dweight), step))
        assert by_ours == pytest.approx(slope((x, weight), step), rel=1e-4, abs=1e-4)


def test_what_kernels_refuse():
    """Here no GPU is there; for one of Hopper's kind the reasons are those of the call."""
    x, weight, table = drawn(heads=2, dim=64, rotary=64)
    with pytest.raises(ValueError, match="normed_heads: implementation 'triton' cannot serve .*no NVIDIA GPU"):
        normed_heads(x, weight, table, implementation="triton")
    half = jnp.zeros((2, 5, 2, 64), jnp.bfloat16)
    with targets.compile_for((9, 0)), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxtune.pallas.compat._has_jax_triton", lambda: True)
        assert triton.refusal(half, weight, table) is None
        assert triton.refusal(x, weight, table) == "dtype float32"
        assert "16 of 64 dimensions" in str(triton.refusal(half, weight, [part[..., :8] for part in table]))
        assert "head dim 48, no power of two" in str(triton.refusal(half[..., :48], weight[:48], table))


def test_few_heads_are_left_to_plain_jax():
    """So are heads that are rotated in part: neither is said to be refused."""
    x, weight, table = drawn(tokens=1024, heads=2, dim=64, rotary=32)
    with targets.compile_for((9, 0)):
        for given, by in ((x, table), (x[:, :8], [part[:, :8] for part in table])):
            jax.eval_shape(normed_heads, given.astype(jnp.bfloat16), weight, tuple(by))
            assert dispatch.record["normed_heads"] == ("reference", {})
