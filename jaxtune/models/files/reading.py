"""Reads the tensors of a checkpoint with several threads, casts or quantises them, places them on devices, checks that
they are finite, and digests them.
"""

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

from jaxtune.models.files import expert_files, gguf_reading, headers, load_memory, quant, shards, stored_weights
from jaxtune.models.files.digests import Digest, DigestCache
from jaxtune.models.files.stored_weights import StoredEntry
from jaxtune.models.files.tensor_entries import listed
from jaxtune.models.placement import partition
from jaxtune.pallas.formats import Stored
from jaxtune.system import timing

# Host memory of tensors on their way to the device; a single larger tensor is allowed.
IN_FLIGHT_BYTES = 1 << 30
_THREADS = 8
_PIECE_BYTES = 256 << 20
_LIMITS = (".input_min", ".input_max", ".output_min", ".output_max")  # of clamped linears; infinite for none


@functools.partial(jax.jit, static_argnums=1)
def _all_finite(tensor: jax.Array | Stored, dtype: str | None) -> jax.Array:
    """bool[]: whether all floats are finite in `dtype`; of a quantised tensor, scales and FP8 codes."""
    leaves = [leaf for leaf in jax.tree.leaves(tensor) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    if dtype is not None and not isinstance(tensor, Stored):
        target = jnp.finfo(dtype)
        leaves = [
            lax.reduce_precision(leaf, target.nexp, target.nmant) for leaf in leaves
        ]  # XLA would leave out a cast
    return jnp.stack([jnp.bool_(True), *(jnp.isfinite(leaf).all() for leaf in leaves)]).all()


def are_finite(tensor: jax.Array | np.ndarray | Stored, dtype: str | None = None) -> list[jax.Array | bool]:
    """Whether all numbers are finite, a bool for each part that this process has; those of device arrays are still
    being computed.

      dtype: in which a plain tensor's numbers must be finite; None: its own.
    """
    if isinstance(tensor, np.ndarray):
        return [_finite_on_host(tensor, dtype)]
    target = None if isinstance(tensor, Stored) else dtype
    return [
        all(_finite_on_host(np.asarray(leaf), target) for leaf in jax.tree.leaves(section))
        if _on_cpu(section)
        else _all_finite(section, dtype)
        for section in partition.addressable(tensor)
    ]


def compile_are_finite(tensor: object, dtype: str | None = None) -> None:
    """Compiles are_finite for a tensor on one device, or its shapes."""
    if not _on_cpu(tensor):
        _all_finite.lower(tensor, dtype).compile()


def _on_cpu(tensor: object) -> bool:
    """Whether a tensor, or its shapes with shardings, is on a CPU, where numpy needs no program to look at it."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tensor)]
    return all(where is not None and all(d.platform == "cpu" for d in where.device_set) for where in shardings)


def _finite_on_host(tensor: np.ndarray, dtype: str | None) -> bool:
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return True
    flat = tensor.reshape(-1)
    count = _PIECE_BYTES // tensor.itemsize
    pieces = (flat[start : start + count] for start in range(0, flat.size, count))
    return all(_has_finite(piece if dtype is None else _cast(piece, dtype)) for piece in pieces)


def _has_finite(numbers: np.ndarray) -> bool:
    """Of 16 bits by their patterns, in a third of the time: what is not finite has the largest."""
    if numbers.itemsize == 2:
        infinite = np.array(np.inf, numbers.dtype).view(np.uint16)
        return bool((numbers.view(np.uint16) & 0x7FFF).max(initial=0) < infinite)
    return bool(np.isfinite(numbers).all())


def _cast(tensor: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to nearest even, as torch does."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused
        return tensor.astype(dtype, copy=False)


def _computed(
    entries: Mapping[str, headers.TensorEntry],
    dtype: str,
    encoded: Mapping[str, str],
    dtypes: Mapping[str, str],
    where: Callable,
) -> dict[str, jax.ShapeDtypeStruct | Stored]:
    """{name: shapes} of tensors that are quantised, decoded or cast on devices."""
    shapes = {}
    for name, entry in entries.items():
        plain = jax.ShapeDtypeStruct(entry.shape, dtypes.get(name, dtype))
        if name in encoded:
            shapes[name] = load_memory.encoded_shapes(entry.shape, dtype, encoded[name])
            continue
        cast = isinstance(entry, StoredEntry) or headers.DTYPES[entry.dtype].name != plain.dtype.name
        if cast and (isinstance(entry, StoredEntry) or not _is_whole(where(name, plain))):
            shapes[name] = plain
    return shapes


def _is_whole(sharding: jax.sharding.Sharding | None) -> bool:
    return sharding is None or sharding.is_fully_replicated


@functools.cache
def _zeros_on(sharding: jax.sharding.Sharding | None) -> Callable[..., jax.Array]:
    """Cached, because a new jitted function for each array takes ten times as long to call."""
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)


def _zeros(shapes: jax.ShapeDtypeStruct | Stored, where: object) -> jax.Array | Stored:
    """Zeros in the shapes of a tensor; side by side, as the allocator loses 13 to 19 % of NF4 in gaps."""
    leaves, structure = jax.tree.flatten(shapes)
    shardings = [None] * len(leaves) if where is None else jax.tree.leaves(jax.tree.broadcast(where, shapes))
    return structure.unflatten(
        [_zeros_on(sharding)(leaf.shape, leaf.dtype) for leaf, sharding in zip(leaves, shardings, strict=True)]
    )


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _moved_into(zeros: jax.Array | Stored, tensor: jax.Array | Stored) -> jax.Array | Stored:
    """`tensor` in the dtypes and the memory of `zeros`, which are donated."""
    return jax.tree.map(lambda target, leaf: leaf.astype(target.dtype), zeros, tensor)


def _read_plain(
    name: str, entry: headers.TensorEntry, sharding: jax.sharding.Sharding | None, digest_cache: DigestCache
) -> tuple[np.ndarray | jax.Array, Digest]:
    """(array in its stored dtype, digest), in host memory or divided by `sharding`. name: the model's."""
    if isinstance(entry, gguf_reading.GgufEntry):
        read = gguf_reading.reader(entry)
    else:
        stacked = isinstance(entry, expert_files.StackedEntry)
        read = functools.partial(expert_files.read_stacked if stacked else shards.read_bytes, entry)
    if sharding is None or _is_whole(sharding):
        host = read(0, entry.size_bytes).view(headers.DTYPES[entry.dtype]).reshape(entry.shape)
        return host, Digest.of(name, host)
    divided = shards.over_devices(entry, sharding, read)
    digest = shards.entry_digest(name, entry, read, digest_cache.get(name))
    digest_cache.put(name, digest.whole)
    return divided, digest


def _checked(load: Callable, name: str, entry: headers.TensorEntry) -> tuple:
    """(tensor, digest, are_finite(tensor)); None for a tensor on several devices."""
    tensor, digest, flags = load(name, entry)
    if flags is not None:
        return tensor, digest, flags
    leaves = [leaf for leaf in jax.tree.leaves(tensor) if isinstance(leaf, jax.Array)]
    return tensor, digest, None if any(len(leaf.devices()) > 1 for leaf in leaves) else are_finite(tensor)


def _require_finite(entries: Mapping[str, headers.TensorEntry], finite: Mapping[str, list], dtype: str) -> None:
    """ValueError for tensors with a value that is not finite."""
    read = jax.device_get(finite).items()
    if broken := [name for name, flags in read if not all(flags) and not name.endswith(_LIMITS)]:
        files = sorted({entries[name].file.name for name in broken})
        raise ValueError(
            f"{entries[broken[0]].file.parent}: values that are not finite in {dtype}: {listed(broken)} "
            f"(in {listed(files)}); fetch them again{'' if dtype != 'float16' else ', or load in bfloat16 or float32'}"
        )


def read_tensors(
    entries: Mapping[str, headers.TensorEntry],
    dtype: str,
    encoded: Mapping[str, str] = types.MappingProxyType({}),
    kept_quantised: Collection[str] = (),
    cancelled: threading.Event | None = None,
    where: Callable[[str, Any], Any] = lambda name, tensor: None,
    dtypes: Mapping[str, str] = types.MappingProxyType({}),
    on_host: Collection[str] = (),
    pinned: Mapping[str, Callable[[object], object]] = types.MappingProxyType({}),
) -> tuple[dict[str, jax.Array | np.ndarray | Stored], Digest]:
    """({name: array or quantised weight}, digest of all as stored). Eight threads read; at most 1 GiB, or one larger
    tensor, is on its way.

      entries: {the model's name: where files have it}.
      dtype: into which plain tensors are converted, and quantised ones decoded.
      encoded: {name: format} of tensors to quantise on the device, one at a time.
      kept_quantised: quantised tensors that stay so; others are decoded.
      cancelled: once set, CancelledError is raised before the next tensor.
      where: (name, tensor or its shape) -> sharding, called in threads; None: the default device. Other processes'
        parts of a tensor are read only for a digest that is not cached.
      dtypes: {name: dtype} of tensors with another dtype than `dtype`.
      on_host: plain tensors that stay in host memory.
      pinned: {name: tensor -> its shardings} of tensors that go on to pinned host memory, from one device.

    Raises ValueError for files that end early, values that are not finite after the cast, or impossible scales.
    """
    one_at_a_time, digest_cache = threading.Lock(), DigestCache(entry.file for entry in entries.values())
    moved = {name: entry for name, entry in entries.items() if name not in kept_quantised and name not in on_host}
    computed = _computed(moved, dtype, encoded, dtypes, where)
    zeros = {name: _zeros(shapes, where(name, shapes)) for name, shapes in computed.items() if name not in pinned}

    def load(name, entry):
        tensor_dtype = dtypes.get(name, dtype)
        if isinstance(entry, StoredEntry):
            with timing.phase("files", "weights"):
                tensor, digest = stored_weights.read(entry, dtype)
        else:
            sharding = None if name in encoded else where(name, jax.ShapeDtypeStruct(entry.shape, tensor_dtype))
            with timing.phase("files", "weights"):
                tensor, digest = _read_plain(name, entry, sharding, digest_cache)
        if isinstance(tensor, np.ndarray) and name not in encoded:
            with timing.phase("files", "weights"):
                tensor = _cast(tensor, tensor_dtype)
                flags = are_finite(tensor)
            if name in on_host:
                return tensor, digest, flags
            with timing.phase("load"):
                return jax.block_until_ready(partition.put(tensor, where(name, tensor))), digest, flags
        if name not in computed:
            with timing.phase("load"):
                return jax.block_until_ready(partition.put(tensor, where(name, tensor))), digest, None
        alone = name in encoded or isinstance(tensor, Stored)
        with timing.phase("load"), one_at_a_time if alone else contextlib.nullcontext():
            if isinstance(tensor, Stored):
                tensor = entry.layout.decoded(tensor, tensor_dtype)
            if name in encoded:
                tensor = quant.encode(jax.device_put(tensor).astype(dtype), encoded[name])
            placed = partition.put(tensor, where(name, tensor))
            if name in pinned:
                placed = jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), placed, computed[name])
                return jax.block_until_ready(placed), digest, None
            return jax.block_until_ready(_moved_into(zeros.pop(name), placed)), digest, None

    arrays, digests, finite, waiting, in_flight = {}, {}, {}, deque(), 0

    def collect():
        """Takes the oldest read's results."""
        nonlocal in_flight
        name, entry, future = waiting.popleft()
        arrays[name], digests[name], flags = future.result()
        finite[name] = are_finite(arrays[name]) if flags is None else flags
        if name in pinned:
            arrays[name] = jax.block_until_ready(partition.put(arrays[name], pinned[name](arrays[name])))
        in_flight -= entry.size_bytes
        work.advance(entry.size_bytes)

    stored_bytes = sum(entry.size_bytes for entry in entries.values())
    with (
        timing.phase("files", "weights", total=stored_bytes, unit="B") as work,
        ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-load") as pool,
    ):
        for batch in (entries.keys() - computed.keys(), computed):
            for name in sorted(batch, key=lambda name: (entries[name].file, entries[name].offset, name)):
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError
                entry = entries[name]
                while waiting and in_flight + entry.size_bytes > IN_FLIGHT_BYTES:
                    collect()
                waiting.append((name, entry, pool.submit(_checked, load, name, entry)))
                in_flight += entry.size_bytes
            while waiting:  # what the second batch frees would leave gaps between these
                collect()
    _require_finite(entries, finite, dtype)
    digest_cache.save()
    return arrays, Digest.joined(digests[name] for name in sorted(digests))
