"""Reads the tensors of a checkpoint with several threads, casts or quantises them, places them on devices, checks that
they are finite, and computes the digest of all: `read_tensors`, which models/hf.py calls to load a model."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.models.files import expert_files, headers, quant, shards, stored_weights
from jaxtune.models.files.digests import Digest, DigestCache
from jaxtune.models.files.stored_weights import StoredEntry
from jaxtune.models.files.tensor_entries import listed
from jaxtune.models.placement import partition
from jaxtune.pallas.formats import Stored

# Host memory of tensors on their way to the device; a single larger tensor is allowed.
IN_FLIGHT_BYTES = 1 << 30
_THREADS = 8
_PIECE_BYTES = 256 << 20


@functools.partial(jax.jit, static_argnums=1)
def _all_finite(tensor: jax.Array | Stored, dtype: str | None) -> jax.Array:
    """Whether all floating-point numbers of a tensor are finite, bool[] on its device, for `are_finite`. Of a quantised
    tensor, the scales are checked, and the codes if they are floats (FP8). dtype: that in which the numbers of a plain
    tensor must be finite; None: its own."""
    leaves = [leaf for leaf in jax.tree.leaves(tensor) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if dtype is not None and not isinstance(tensor, Stored):
        to = jnp.finfo(dtype)
        leaves = [lax.reduce_precision(leaf, to.nexp, to.nmant) for leaf in leaves]  # XLA would leave out a cast
    return jnp.stack([jnp.bool_(True), *(jnp.isfinite(leaf).all() for leaf in leaves)]).all()


def are_finite(tensor: jax.Array | np.ndarray | Stored, dtype: str | None = None) -> list[jax.Array | bool]:
    """Whether all numbers of a tensor are finite: a bool for each part of it. The loader and exports refuse broken
    weights by it.

    The parts of an array on devices are those that this process has, possibly none. Their bools are arrays that are
    still being computed, so that the loader can continue to read. A tensor in host memory is copied to the device in
    parts of 256 MiB, or one larger row, and this function waits for their results.

    dtype: the dtype to which a tensor that is not quantised will be cast, in which its numbers must be finite; None:
    its own.
    """
    if not isinstance(tensor, np.ndarray):
        return [_all_finite(part, dtype) for part in partition.addressable(tensor)]
    rows = max(1, _PIECE_BYTES * len(tensor) // max(tensor.nbytes, 1))
    return [bool(_all_finite(jnp.asarray(tensor[at : at + rows]), dtype)) for at in range(0, len(tensor), rows)]


def compile_are_finite(tensor: object, dtype: str | None = None) -> None:
    """Compiles what are_finite calls for a tensor on one device, of which the arrays may be shapes. Exports do so for
    all shapes of a model, in threads, before they write it."""
    _all_finite.lower(tensor, dtype).compile()


def _checked(load: Callable, name: str, entry: headers.TensorEntry) -> tuple:
    """(tensor, its digest), as `load(name, entry)` returns them, and what are_finite returns of the tensor: that check
    is compiled for each shape, in the threads that read, while others read on. None in its place for a tensor on
    several devices: these must get their programs in one order, from one thread."""
    tensor, digest = load(name, entry)
    leaves = [leaf for leaf in jax.tree.leaves(tensor) if isinstance(leaf, jax.Array)]
    return tensor, digest, None if any(len(leaf.devices()) > 1 for leaf in leaves) else are_finite(tensor)


def _require_finite(entries: Mapping[str, headers.TensorEntry], finite: Mapping[str, list], dtype: str) -> None:
    """Raises ValueError, which names the tensors and their files, if a tensor has values that are not finite. It waits
    until the devices have computed `finite`. read_tensors calls it once, at its end.

    Args:
      entries: {name: entry in files}.
      finite: {name: [whether the numbers are finite, for each of the tensor's parts] (are_finite)}.
      dtype: the dtype that the error names, to which tensors are cast unless read_tensors' `dtypes` names another.
    """
    if broken := [name for name, whole in jax.device_get(finite).items() if not all(whole)]:
        files = sorted({entries[name].file.name for name in broken})
        raise ValueError(
            f"{entries[broken[0]].file.parent}: values that are not finite in {dtype}: {listed(broken)} "
            f"(in {listed(files)}); fetch them again{'' if dtype != 'float16' else ', or load in bfloat16 or float32'}"
        )


def read_tensors(
    entries: Mapping[str, headers.TensorEntry],
    dtype: str,
    encoded: Mapping[str, str] = types.MappingProxyType({}),
    kept: Collection[str] = (),
    cancelled: threading.Event | None = None,
    where: Callable[[str, Any], Any] = lambda name, tensor: None,
    dtypes: Mapping[str, str] = types.MappingProxyType({}),
    stay: Collection[str] = (),
) -> tuple[dict[str, jax.Array | np.ndarray | Stored], Digest]:
    """Reads tensors of a checkpoint, not of an adapter; casts, encodes or decodes them, places them, and checks on the
    devices that they are finite. Eight threads read, in the files' order, at most 1 GiB or a larger tensor at a time.

    Args:
      entries: {name: entry in files}.
      dtype: of tensors that are not kept quantised; those that are encoded are cast to it first.
      encoded: {name: format} of tensors that are quantised on the device, one at a time.
      kept: names of quantised tensors that stay as they are stored. Others are decoded to their dtype.
      cancelled: once another thread sets it, CancelledError is raised before the next tensor, if there is one, begins.
      where: (name, tensor) -> the sharding of its arrays, called in threads; None: the default device. `tensor` is the
        array or quantised weight, or only its shape. Of a divided plain tensor only this process's parts are kept; the
        rest is read for its digest, unless that is cached on disk.
      dtypes: {name: dtype} of tensors that are cast to another dtype than `dtype`.
      stay: names of plain tensors, not divided by `where`, that stay in host memory as numpy arrays, beyond that 1 GiB.
    Returns ({name: array or quantised weight}, digest of all tensors as they are stored, in the order of their names).
    Raises CancelledError, and ValueError for files that end early, values that are not finite after the cast, or a
    quantised weight's scales or tables that cannot be right, such as negative scales (stored_weights.read)."""
    one_at_a_time, digest_cache = threading.Lock(), DigestCache(entry.file for entry in entries.values())

    def load(name, entry):
        own = dtypes.get(name, dtype)
        if isinstance(entry, StoredEntry):
            packed, digest = stored_weights.read(entry, dtype)
            if name in kept:
                return jax.block_until_ready(partition.put(packed, where(name, packed))), digest
            host = entry.layout.decoded(packed, own)
        else:
            stacked = isinstance(entry, expert_files.StackedEntry)
            read = functools.partial(expert_files.read_stacked if stacked else shards.read_bytes, entry)
            sharding = None if name in encoded else where(name, jax.ShapeDtypeStruct(entry.shape, own))
            if sharding is not None and not sharding.is_fully_replicated:
                divided = shards.over_devices(entry, sharding, read)
                digest = shards.entry_digest(name, entry, read, digest_cache.get(name))
                digest_cache.put(name, digest.whole)
                return jax.block_until_ready(divided.astype(own)), digest
            host = read(0, entry.size_bytes).view(headers.DTYPES[entry.dtype]).reshape(entry.shape)
            digest = Digest.of(name, host)
        with one_at_a_time if name in encoded else contextlib.nullcontext():
            if name in stay:
                return host.astype(own, copy=False), digest
            # Cast on the device: XLA rounds to nearest even as torch does, and many times faster than numpy.
            if name not in encoded:
                return jax.block_until_ready(partition.put(host, where(name, host)).astype(own)), digest
            stored = quant.encode(jax.device_put(host).astype(dtype), encoded[name])
            return jax.block_until_ready(partition.put(stored, where(name, stored))), digest

    arrays, digests, finite, waiting, in_flight = {}, {}, {}, deque(), 0

    def collect():
        """Waits for the oldest read and stores its results."""
        nonlocal in_flight
        name, entry, future = waiting.popleft()
        arrays[name], digests[name], found = future.result()
        finite[name] = are_finite(arrays[name]) if found is None else found
        in_flight -= entry.size_bytes

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-load") as pool:
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[1].offset)):
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            while waiting and in_flight + entry.size_bytes > IN_FLIGHT_BYTES:
                collect()
            waiting.append((name, entry, pool.submit(_checked, load, name, entry)))
            in_flight += entry.size_bytes
        while waiting:
            collect()
    _require_finite(entries, finite, dtype)
    digest_cache.save()
    return arrays, Digest.joined(digests[name] for name in sorted(digests))
