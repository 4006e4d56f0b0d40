"""Sums over rows that devices share: the value and the gradient of `partition.total`, each counted once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models.placement import partition

ROWS = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)


def product_of_sums(weights, rows):
    """Of two sums over all rows, which is no sum over rows itself."""
    first, second = partition.total(((rows @ weights).sum(), jnp.square(rows @ weights).sum()))
    return first * second


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_a_total_and_its_gradient_are_those_of_all_rows(data, fsdp):
    mesh = partition.make_mesh(data, fsdp)
    weights = jnp.arange(1.0, 4.0)

    def shares(weights, rows):
        value, gradient = jax.value_and_grad(product_of_sums)(weights, rows)
        return value[None], gradient[None]

    divided = partition.divided(shares, mesh, (partition.WHOLE, partition.ROWS), partition.ROWS)
    values, gradients = jax.jit(divided)(weights, jnp.asarray(ROWS))
    want, gradient = jax.value_and_grad(product_of_sums)(weights, jnp.asarray(ROWS))
    assert len(values) == data * fsdp
    np.testing.assert_allclose(values, np.full(data * fsdp, want), rtol=1e-5)  # every device has the whole sum
    np.testing.assert_allclose(gradients.sum(0), gradient, rtol=1e-5)  # and its own share of the gradient


def test_a_sum_of_what_is_divided_already_is_over_the_other_devices():
    """A Shard has its sum over `fsdp`: only `data` is left to sum over."""
    mesh = partition.make_mesh(2, 2)

    def shares(rows):
        part = rows.sum(0)[:2]
        return partition.total(partition.Shard(part, 0, 2)).array[None], partition.total(part)[None]

    divided = partition.divided(shares, mesh, (partition.ROWS,), partition.ROWS)
    of_shards, of_all = jax.jit(divided)(jnp.asarray(ROWS))
    parts = ROWS.reshape(2, 2, 2, 3)[..., :2].sum(2)  # by data, by fsdp
    want = np.broadcast_to(parts.sum(0), (2, 2, 2)).reshape(4, 2)
    np.testing.assert_allclose(of_shards, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_all, np.broadcast_to(parts.sum((0, 1)), (4, 2)), rtol=1e-5, atol=1e-6)
