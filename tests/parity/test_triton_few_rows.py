"""The Triton kernels of a decoding step, in Triton's interpreter, against their reference. In float16: the interpreter
does not round to bfloat16 as a GPU does."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton_interpreter import interpreted

from jaxtune.pallas import dispatch
from jaxtune.pallas.few_rows import added_norm, gated_product, placed, products, reference
from jaxtune.pallas.quant_matmul import LoraWeights

HOPPER = (9, 0)


def normal(*shape, seed=0, scale=1.0, dtype=jnp.float16):
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def near(got, want, bound=2e-3):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


@pytest.mark.parametrize("rows", [2, 33])
@pytest.mark.parametrize("sizes", [(64,), (128, 64, 192)])
def test_products_add_up_to_those_of_xla(rows, sizes):
    x = normal(rows, 2048)
    weights = [normal(size, 2048, seed=i + 1, scale=0.05) for i, size in enumerate(sizes)]
    with interpreted(HOPPER):
        parts = products(x, weights)
    assert dispatch.record["products"][0] == "triton"
    assert parts.shape == (8, rows, sum(sizes)) and parts.dtype == jnp.float32
    near(parts.sum(0), reference.products(x.astype(jnp.float32), weights)[0], 1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product(activation):
    x, gate, up = normal(5, 256), *(normal(128, 256, seed=i, scale=0.1) for i in (1, 2))
    with interpreted(HOPPER):
        got = gated_product(x, gate, up, activation)
    assert dispatch.record["gated_product"][0] == "triton"
    near(got, reference.gated_product(x, gate, up, activation))


def adapter(out: int, size: int, rank: int, scale: float, seed: int) -> LoraWeights:
    return LoraWeights(
        normal(rank, size, seed=seed, scale=0.03), normal(out, rank, seed=seed + 1, scale=0.3), scale=scale
    )


def wide(tree):
    return jax.tree.map(lambda array: array.astype(jnp.float32), tree)


@pytest.mark.parametrize(("rows", "sizes"), [(5, (128, 64, 192)), (33, (128, 64, 192)), (100, (128, 128, 256))])
def test_adapters_are_part_of_the_products(rows, sizes):
    """Of several ranks and scales, and one weight has none; the sums are those of merged weights. More than 64 rows
    have larger tiles."""
    x = normal(rows, 2048)
    weights = [normal(size, 2048, seed=i + 1, scale=0.05) for i, size in enumerate(sizes)]
    loras = [adapter(sizes[0], 2048, 8, 2.0, 10), None, adapter(sizes[2], 2048, 20, 0.7, 20)]
    with interpreted(HOPPER):
        parts = products(x, weights, loras)
    assert dispatch.record["products"][0] == "triton"
    assert parts.shape == (8, rows, sum(sizes)) and parts.dtype == jnp.float32
    near(parts.sum(0), reference.products(wide(x), wide(weights), wide(loras))[0], 5e-4)
    merged = [
        weight if lora is None else weight + lora.scale * lora.b @ lora.a
        for weight, lora in zip(wide(weights), wide(loras), strict=True)
    ]
    near(parts.sum(0), reference.products(wide(x), merged)[0], 5e-4)
    plain = reference.products(wide(x), wide(weights))[0]
    assert np.linalg.norm(parts.sum(0) - plain) > 0.1 * np.linalg.norm(plain)


@pytest.mark.parametrize("which", [(True, True), (False, True), (True, False)])
def test_a_gated_product_with_adapters(which):
    x, gate, up = normal(5, 256), *(normal(128, 256, seed=i, scale=0.1) for i in (1, 2))
    loras = [adapter(128, 256, rank, 1.5, 30 + rank) if has else None for has, rank in zip(which, (16, 4), strict=True)]
    with interpreted(HOPPER):
        got = gated_product(x, gate, up, "silu", loras)
    assert dispatch.record["gated_product"][0] == "triton"
    near(got, reference.gated_product(wide(x), wide(gate), wide(up), "silu", wide(loras)))
    assert np.linalg.norm(got - reference.gated_product(x, gate, up, "silu")) > 0.1 * np.linalg.norm(got)


def test_a_row_with_an_adapter_has_the_same_bits_beside_others():
    x, weight, lora = normal(16, 512), normal(64, 512, seed=1), adapter(64, 512, 16, 2.0, 2)
    with interpreted(HOPPER):
        whole, alone = products(x, [weight], [lora]), products(x.at[1:].set(7.0), [weight], [lora])
    np.testing.assert_array_equal(whole[:, 0], alone[:, 0])


def test_a_call_that_no_kernel_supports_says_why():
    lora = adapter(64, 256, 65, 1.0, 1)
    with interpreted(HOPPER), pytest.raises(ValueError, match="adapters of rank 65; up to 64"):
        products(normal(5, 256), [normal(64, 256)], [lora], implementation="triton")
    with pytest.raises(ValueError, match=r"loras.0. has a row_scale .DoRA.: use quant_matmul"):
        products(normal(5, 256), [normal(64, 256)], [dataclasses.replace(lora, row_scale=jnp.ones(64))])
    with interpreted(HOPPER), pytest.raises(ValueError, match="weights .100, 256.; multiples of 64 rows and 128 col"):
        products(normal(5, 256), [normal(100, 256)], implementation="triton")
    with interpreted(HOPPER), pytest.raises(ValueError, match="200 rows; from 2 to 128"):
        products(normal(200, 256), [normal(64, 256)], implementation="triton")
    with interpreted(HOPPER), pytest.raises(ValueError, match="activation gelu"):
        gated_product(normal(5, 256), normal(64, 256), normal(64, 256), "gelu", implementation="triton")


@pytest.mark.parametrize(("splits", "options"), [(1, {}), (3, {"offset": 1.0, "float32": True})])
def test_a_sum_and_its_norm(splits, options):
    """The sum has the bits of the reference: it is what the residual stream is."""
    x, weight = normal(3, 200), normal(200, seed=2)
    parts = normal(splits, 3, 200, seed=1, dtype=jnp.float16 if splits == 1 else jnp.float32)
    with interpreted():
        added, normed = added_norm(x, parts, weight, eps=1e-5, **options)
    assert dispatch.record["added_norm"][0] == "triton"
    want = (
        reference.added_norm(x, parts, weight, eps=1e-5, offset=0.0, float32=False)
        if not options
        else (reference.added_norm(x, parts, weight, eps=1e-5, **options))
    )
    np.testing.assert_array_equal(added, want[0])
    near(normed, want[1])


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("norms", [True, False])
def test_heads_are_normed_turned_and_written(rotates, norms):
    heads, kv_heads, dim, capacity = 4, 2, 32, 128
    positions = jnp.asarray([0, -1, 200, 127], jnp.int32)
    keys, values = (normal(4, kv_heads, capacity, dim, seed=i) for i in (1, 2))
    parts = normal(2, 4, (heads + 2 * kv_heads) * dim, seed=3, dtype=jnp.float32)
    angles = normal(4, dim // 2, seed=4, dtype=jnp.float32)
    table = (jnp.cos(angles), jnp.sin(angles)) if rotates else None
    weights = (normal(dim, seed=5), normal(dim, seed=6)) if norms else None
    with interpreted():
        got = placed(parts, keys, values, positions, table, weights, eps=1e-6)
    assert dispatch.record["placed"][0] == "triton"
    want = reference.placed(parts, keys, values, positions, table, weights, eps=1e-6, offset=0.0, float32=False)
    live = positions >= 0
    near(got[0][live], want[0][live])
    for new, expected, old in zip(got[1:], want[1:], (keys, values), strict=True):
        near(new, expected, 5e-4)
        np.testing.assert_array_equal(new[1], old[1])  # of the row that does not decode
        np.testing.assert_array_equal((new != old).any(-1).sum((1, 2)), [2, 0, 2, 2])
