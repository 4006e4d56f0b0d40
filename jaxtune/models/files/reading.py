"""The tensors of a checkpoint, read by a few threads and put on their devices."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.models.files import expert_files, quant, shards, stored_weights
from jaxtune.models.files.digests import Digest, Kept
from jaxtune.models.files.stored_weights import StoredEntry
from jaxtune.models.files.tensor_entries import listed
from jaxtune.models.placement import partition
from jaxtune.pallas.formats import Stored

# Host memory of tensors on their way to the device, unless one alone is larger.
IN_FLIGHT_BYTES = 1 << 30
_THREADS = 8


@jax.jit
def _all_finite(tensor: jax.Array | Stored) -> jax.Array:
    """bool[]: of a tensor in one pass; of a quantised one, its scales, and its codes where they are floats."""
    leaves = [leaf for leaf in jax.tree.leaves(tensor) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def read_tensors(
    entries: Mapping[str, shards.TensorEntry],
    dtype: str,
    encoded: Mapping[str, str] = types.MappingProxyType({}),
    opened: frozenset[str] = frozenset(),
    cancelled: threading.Event | None = None,
    where: Callable[[str, Any], Any] = lambda name, tensor: None,
) -> tuple[dict[str, jax.Array | Stored], Digest]:
    """({name: array in dtype}, digest of all as they are stored). Reads and transfers run in a few threads.

    where: (name, tensor) -> how its arrays are to lie; None: on the default device. Of a divided tensor the parts of
    this process's devices are read, each for its own; but what is packed is read whole, and what is encoded here is so
    on the default device first, one tensor at a time (four bits' offset is the mean over all of a tensor).

    Tensors named in `encoded` are turned into that format on the device, one at a time; packed ones stay as they are,
    but for those named in `opened`.
    Every tensor is looked over for values that are not finite, where it lies; the answers are waited for at the end.
    """

    one_at_a_time = threading.Lock()
    kept = Kept(entry.file for entry in entries.values())

    def load(name, entry):
        if isinstance(entry, StoredEntry):
            packed, digest = stored_weights.read(entry, dtype)
            if not entry.layout.opens:
                packed = partition.put(packed, where(name, packed))
                return jax.block_until_ready(packed.decode(dtype) if name in opened else packed), digest
            host = entry.layout.open(packed, dtype)
        else:
            stacked = isinstance(entry, expert_files.StackedEntry)
            read = functools.partial(expert_files.read_stacked if stacked else shards.read_bytes, entry)
            lies = None if name in encoded else where(name, jax.ShapeDtypeStruct(entry.shape, dtype))
            if lies is not None and not lies.is_fully_replicated:
                divided = shards.over_devices(entry, lies, read)
                digest = shards.entry_digest(name, entry, read, kept.get(name))
                kept.put(name, digest.whole)
                return jax.block_until_ready(divided.astype(dtype)), digest
            host = read(0, entry.size_bytes).view(shards.DTYPES[entry.dtype]).reshape(entry.shape)
            digest = Digest.of(name, host)
        with one_at_a_time if name in encoded else contextlib.nullcontext():
            # Cast on the device: XLA rounds to nearest even as torch does, and many times faster than numpy.
            if name not in encoded:
                return jax.block_until_ready(partition.put(host, where(name, host)).astype(dtype)), digest
            stored = quant.encode(jax.device_put(host).astype(dtype), encoded[name])
            return jax.block_until_ready(partition.put(stored, where(name, stored))), digest

    arrays, digests, finite = {}, {}, {}
    waiting: deque = deque()
    in_flight = 0

    def collect():
        nonlocal in_flight
        name, entry, future = waiting.popleft()
        arrays[name], digests[name] = future.result()
        finite[name] = [_all_finite(part) for part in partition.own(arrays[name])]  # nothing waits for it
        in_flight -= entry.size_bytes

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-load") as pool:
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].file, item[1].offset)):
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            while waiting and in_flight + entry.size_bytes > IN_FLIGHT_BYTES:
                collect()
            waiting.append((name, entry, pool.submit(load, name, entry)))
            in_flight += entry.size_bytes
        while waiting:
            collect()
    if broken := [name for name, whole in jax.device_get(finite).items() if not all(whole)]:
        files = sorted({entries[name].file.name for name in broken})
        raise ValueError(
            f"{entries[broken[0]].file.parent}: values that are not finite in {dtype}: {listed(broken)} "
            f"(in {listed(files)}); fetch them again{'' if dtype != 'float16' else ', or load in bfloat16 or float32'}"
        )
    kept.save()
    return arrays, Digest.joined(digests[name] for name in sorted(digests))
