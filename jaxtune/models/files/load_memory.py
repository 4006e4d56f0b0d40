"""The device memory that a model's weights need, from their shapes, so that a model that does not fit is refused before
minutes of reading.
"""

from __future__ import annotations

import functools
import gc
import math
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxtune.models.files import headers, quant
from jaxtune.pallas.formats import FORMATS, Stored

_GB = 1e9
MOST_TO_ANSWER = 0.93  # of the free bytes, for weights that a sampler reads


def load_bytes(
    shapes: Mapping[str, tuple[int, ...]],
    entries: Mapping[str, headers.TensorEntry],
    dtype: str,
    encoded: Mapping[str, str],
    kept_quantised: Collection[str] = (),
    dtypes: Mapping[str, str] = types.MappingProxyType({}),
) -> int:
    """Bytes on a device that has all of each tensor in `shapes`.

    shapes: {name: shape} of the model's tensors.
    entries: {name: where and how the files have it}.
    dtype: into which plain tensors are converted.
    encoded: {name: format} of tensors to quantise.
    kept_quantised: quantised tensors that stay so; others are decoded.
    dtypes: {name: dtype} of tensors with another dtype than `dtype`.
    """
    total = 0
    for name, shape in shapes.items():
        if name in kept_quantised:
            total += entries[name].size_bytes
        elif name in encoded:
            stored = encoded_shapes(shape, dtype, encoded[name])
            total += sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))
        else:
            total += math.prod(shape) * jnp.dtype(dtypes.get(name, dtype)).itemsize
    return total


@functools.cache
def encoded_shapes(shape: tuple[int, ...], dtype: str, load_in: str) -> Stored:
    """A quantised weight with jax.ShapeDtypeStructs in place of arrays.

    shape: [..., out, in], of the weight.
    dtype: to which it is decoded.
    load_in: a format's word, such as "nf4".
    """
    return jax.eval_shape(lambda array: quant.encode(array, load_in), jax.ShapeDtypeStruct(shape, dtype))


def require_room(folder: Path, need_bytes: int, storage: str, nf4_bytes: Callable[[], int] | None) -> None:
    """Raises ValueError if the weights exceed the free memory of this process's first device. XLA would retry the
    allocation for seconds, and not say what fits.

      folder: of the checkpoint, for the error.
      need_bytes: of the weights on this device.
      storage: their dtype or format, for the error.
      nf4_bytes: counts those of the weights in NF4, which the error recommends if it fits; None: it does not.
    """
    limit, free = _memory()
    if limit is None or need_bytes <= free:
        return
    gc.collect()  # frees models that nothing refers to any more
    limit, free = _memory()
    if limit is None or need_bytes <= free:
        return
    free_text = f", of which {free / _GB:.1f} are free" if limit - free > 0.01 * limit else ""
    remedy = "a smaller model or a larger card is needed"
    in_nf4 = None if nf4_bytes is None else nf4_bytes()  # its shapes are traced, which takes up to a second
    if in_nf4 is not None and in_nf4 <= free:
        remedy = (
            f"in four bits they take {in_nf4 / _GB:.1f} GB: --load-in nf4 (in Python load_in='nf4'; in a recipe "
            "model.load_in=nf4, with an adapter)"
        )
    elif in_nf4 is not None:
        remedy = f"in four bits, too, they take {in_nf4 / _GB:.1f} GB; {remedy}"
    format_text = FORMATS[storage].title if storage in FORMATS else f"in {storage}"
    raise ValueError(
        f"{folder}: its weights take {need_bytes / _GB:.1f} GB {format_text}, and the device "
        f"({jax.local_devices()[0].device_kind}) has {limit / _GB:.1f} GB{free_text}; {remedy}"
    )


def has_room_to_answer(weight_bytes: float) -> bool:
    """Whether rows have room beside such weights on this process's first device; True if it reports no memory."""
    free = free_bytes()
    return free is None or weight_bytes <= MOST_TO_ANSWER * free


def free_bytes() -> int | None:
    """Of this process's first device; None if it reports none, as a CPU."""
    limit, free = _memory()
    return None if limit is None else free


def _memory() -> tuple[int | None, int]:
    """(bytes that JAX may use, free ones), or (None, 0)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return (None, 0) if not limit else (limit, limit - stats.get("bytes_in_use", 0))
