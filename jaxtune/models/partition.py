"""How a step is divided over the devices of a mesh.

Training runs in one shard_map over the whole mesh (`divided`), so that a model and its kernels see plain local arrays,
as on one device. The rows of a batch are divided over the mesh's axis `data`; weights are whole on every device, and
what rows are summed to, gradients too, is each device's own until it is added up. What a model must know of the other
devices, it asks here: `part_of_rows` and `total`. Where nothing is divided, these are 0 and the values as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

DATA = "data"
ROWS, WHOLE = PartitionSpec(DATA), PartitionSpec()
# Of sums that are not added up yet: an axis in front, of one place a device.
UNSUMMED = PartitionSpec(DATA)


def device_count(data: int) -> int:
    """How many devices `mesh.data` asks for; -1: all there are."""
    return jax.device_count() if data == -1 else data


def make_mesh(data: int) -> Mesh:
    """A mesh of `data` devices, or of all (-1), over the axis "data".

    Raises:
      ValueError: there are fewer devices.
    """
    devices = jax.devices()
    count = device_count(data)
    if count > len(devices):
        raise ValueError(f"mesh.data = {data}: there are {len(devices)} {devices[0].platform} devices")
    return jax.make_mesh((count,), (DATA,), axis_types=(AxisType.Auto,), devices=devices[:count])


def divided(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """The function, run by every device of the mesh on its own part of arrays; as it is, on one device or no mesh.

    Nothing checks what the specs say is whole. Inside, jax.grad is of a device's own share of a sum: a psum in what is
    differentiated would count each gradient once a device (see `total`).
    """
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _divides_rows() -> bool:
    """Whether this is traced inside `divided`, by a mesh that divides rows."""
    return DATA in jax.sharding.get_abstract_mesh().manual_axes


def part_of_rows() -> jax.Array | int:
    """Which of the equal parts of a batch's rows this device has: int32[]."""
    return jax.lax.axis_index(DATA) if _divides_rows() else 0


def total(sums: Any) -> Any:
    """Arrays that are sums over this device's rows, summed over all rows.

    For what is no sum over rows itself, such as a product of two. The gradient of the total is that of this device's
    share of it: as every device computes the same from the total, its gradients add up to the whole once.
    """
    return _total(sums) if _divides_rows() else sums


@jax.custom_vjp
def _total(sums):
    return jax.lax.psum(sums, DATA)


_total.defvjp(lambda sums: (_total(sums), None), lambda _, gradients: (gradients,))
