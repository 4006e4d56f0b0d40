"""The device memory that a model's weights need, computed from their shapes before any of them is read (`load_bytes`),
so that a model that does not fit is refused at once and not after minutes of reading (`require_room`)."""

from __future__ import annotations

import functools
import gc
import math
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.models.files import headers, quant
from jaxtune.pallas.formats import FORMATS, Stored

_GB = 1e9


def load_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, headers.TensorEntry],
    dtype: str,
    encoded: Mapping[str, str],
    kept: Collection[str] = (),
    dtypes: Mapping[str, str] = types.MappingProxyType({}),
) -> int:
    """Bytes of device memory that the tensors in `shapes` take on a device that has all of each; nothing is read.
    Pretrained.device_bytes calls it, by which `load` checks that the model fits into the free memory.

    Args:
      shapes: {name: shape} of the model's tensors, without those that stay in host memory.
      entries: {name: entry in files} of the tensors.
      dtype: of tensors that the model does not keep quantised.
      encoded: {name: format} of tensors that are quantised on loading.
      kept: names of quantised tensors that the model keeps quantised, which take the bytes that they have in files.
        Other quantised tensors are decoded on loading.
      dtypes: {name: dtype} of tensors that are cast to another dtype than `dtype`.
    """
    total = 0
    for name, shape in shapes.items():
        if name in kept:
            total += entries[name].size_bytes
        elif name in encoded:
            stored = encoded_shapes(shape, dtype, encoded[name])
            total += sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))
        else:
            total += math.prod(shape) * jnp.dtype(dtypes.get(name, dtype)).itemsize
    return total


@functools.cache
def encoded_shapes(shape: tuple[int, ...], dtype: str, load_in: str) -> Stored:
    """A weight of this shape [..., out, in] and dtype after quantisation to the format `load_in`, with
    jax.ShapeDtypeStruct in place of its codes and scales; nothing is computed. load_bytes counts its bytes, and the
    loader makes room for it. The results are cached, because many layers have the same shapes."""
    return jax.eval_shape(lambda array: quant.encode(array, load_in), jax.ShapeDtypeStruct(shape, dtype))


def require_room(folder: Path, need_bytes: int, how: str, nf4_bytes: int | None) -> None:
    """Raises ValueError where a model's weights are larger than the free memory of this process's first device.
    Pretrained.load calls it before it reads a tensor, unless the weights are divided over a mesh. A device that does
    not report its memory, such as a CPU, always has room. Models that nothing refers to any more are freed before the
    error.

    Without this check an allocation that cannot succeed is retried for seconds, and its error does not say what would
    fit.

    Args:
      folder: the model, for the error.
      need_bytes: of the weights.
      how: the dtype or format that they are loaded in, for the error.
      nf4_bytes: of the same model in NF4, which the error recommends if it would fit; None where it is loaded in NF4
        already, or cannot be because its files store it quantised.
    """
    device = jax.local_devices()[0]
    limit, free = _memory(device)
    if limit is None or need_bytes <= free:
        return
    gc.collect()  # frees models that nothing refers to any more
    limit, free = _memory(device)
    if limit is None or need_bytes <= free:
        return
    used = f", of which {free / _GB:.1f} are free" if limit - free > 0.01 * limit else ""
    remedy = "a smaller model or a larger card is needed"
    if nf4_bytes is not None and nf4_bytes <= free:
        remedy = (
            f"in four bits they take {nf4_bytes / _GB:.1f} GB: --load-in nf4 (in Python load_in='nf4'; in a recipe "
            "model.load_in=nf4, with an adapter)"
        )
    elif nf4_bytes is not None:
        remedy = f"in four bits, too, they take {nf4_bytes / _GB:.1f} GB; {remedy}"
    said = FORMATS[how].title if how in FORMATS else f"in {how}"
    raise ValueError(
        f"{folder}: its weights take {need_bytes / _GB:.1f} GB {said}, and the device "
        f"({device.device_kind}) has {limit / _GB:.1f} GB{used}; {remedy}"
    )


def _memory(device: Any) -> tuple[int | None, int]:
    """(bytes of a device that JAX may use, free bytes of these); (None, 0) for a device that does not report them, such
    as a CPU. require_room compares a model's weights with them. device: a jax.Device."""
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return (None, 0) if not limit else (limit, limit - stats.get("bytes_in_use", 0))
