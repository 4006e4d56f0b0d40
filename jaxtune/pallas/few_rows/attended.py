"""`attended`: what a decoding step does between the product of query, key and value and that of the attention's output.
For short caches one kernel (attended_kernels.py) does what `placed` and decode_attention do. It saves the start and end
of a kernel, and the queries' way through memory. Other calls run these two."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch
from jaxtune.pallas.arguments import FLOATS, INTEGERS, Arguments
from jaxtune.pallas.decode_attention import decode_attention
from jaxtune.pallas.decode_attention import reference as attention_reference
from jaxtune.pallas.decode_attention.splits import log2_sinks
from jaxtune.pallas.decode_attention.triton import WHOLE, WHOLE_TILES, Tile
from jaxtune.pallas.few_rows import reference
from jaxtune.pallas.few_rows.api import placed
from jaxtune.pallas.few_rows.cases import drawn, wide
from jaxtune.pallas.few_rows.triton import placed_refusal

_CORES = 132  # multiprocessors of a Hopper GPU
# Tiles of a Hopper GPU by head dim. Where there are fewer programs than multiprocessors: the fewer tiles a program
# reads one after another, the sooner it ends.
_FEW_TILES = {128: Tile(128, 8, 3)}
# Where there are more programs than run at once with four warps each: up to ten of a single warp share a multiprocessor
# (_MOST_SHARING), and no warp waits for another.
_MANY_TILES = {128: Tile(16, 1, 3)}
_AT_ONCE = 4 * _CORES
_MOST_SHARING = 10
_SHARED_BYTES = 228 * 1024  # of a Hopper multiprocessor, of which each program takes another KB than its own


def attended(
    parts: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    table: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    float32: bool = False,
    batch_invariant: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norms and rotates the queries and keys of one new token in each of N sequences, writes its keys and values into
    the caches, and computes its attention over them. The kernel has no derivative.

    Args:
      parts, keys, values, positions, table, norms, eps, offset, float32: as for `placed`.
      scale, window, soft_cap, sinks: as for decode_attention.
      batch_invariant: False: the kernel may sum the keys in other tiles, and by several programs, if N is small.
      implementation: "triton" (one kernel; caches of 16 bits with at most 1,024 keys, D of 64, 128, 256 or 512),
        "apart" (`placed` and decode_attention, each by the implementation that it chooses), or None for the first that
        supports the call.
    Returns:
      (the attention [N, heads, D] in the caches' dtype, zeros for a row at a negative position; the cache of keys; the
        cache of values). Caches are changed in place as by `placed`. With the kernel, a row's result has the same bits
        in any slot, and with batch_invariant also in any batch.
    Raises:
      TypeError, ValueError: an argument does not fit this description, or the named implementation does not support the
        call.
    """
    check = Arguments("attended")
    check.array("parts", parts, "splits N width", FLOATS)
    check.array("keys", keys, "N kv_heads capacity D", FLOATS)
    check.array("values", values, "N kv_heads capacity D", keys.dtype)
    check.array("positions", positions, "N", INTEGERS)
    check.sizes["D/2"] = keys.shape[3] // 2, ""
    for name, given, shape in (("table", table, "N D/2"), ("norms", norms, "D")):
        for index, array in enumerate(given or ()):
            check.array(f"{name}[{index}]", array, shape, FLOATS)
    positions = jnp.asarray(positions, jnp.int32)
    rounding = dict(eps=eps, offset=offset, float32=float32)
    masking = dict(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    reason = refusal(parts, keys)
    if reason is not None and implementation is None:
        implementation = "apart"  # whose two parts say why they have no kernel, if they have none

    def first_use():
        tile = _tile(keys, batch_invariant)
        return _first_use(parts, keys, table, norms, soft_cap, rounding, tile, _shares(keys, tile))

    reasons = {"triton": lambda: reason or first_use()}
    chosen = dispatch.choose("attended", reasons | {"apart": lambda: None}, implementation)
    if chosen == "triton":
        tile = _tile(keys, batch_invariant)
        how: dict = dict(tile=tile, shares=_shares(keys, tile), rounding=rounding, masking=masking)
        return _by_kernel(parts, keys, values, positions, table, norms, **how)
    query, keys, values = placed(parts, keys, values, positions, table, norms, eps=eps, offset=offset, float32=float32)
    out = decode_attention(
        query, keys, values, positions + 1, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
    )
    return out, keys, values


def refusal(parts, keys) -> str | None:
    """The reason why the kernel of `attended` does not support a call on this GPU, or None: one of placed_refusal,
    caches that are longer than decode_attention's kernel reads in one pass, or a head dim or capacity that has no
    tiles. parts: [splits, N, (heads + 2 kv_heads) D]. keys: the cache of keys, [N, kv_heads, capacity, D]."""
    reason = placed_refusal(keys)
    if reason is not None:
        return reason
    kv_heads, capacity, dim = keys.shape[1:]
    if capacity > WHOLE:
        return f"a cache of {capacity} keys; up to {WHOLE}"
    if dim not in WHOLE_TILES:
        return f"head dim {dim}; {', '.join(map(str, WHOLE_TILES))}"
    if capacity % WHOLE_TILES[dim].step:
        return f"capacity {capacity}, no multiple of {WHOLE_TILES[dim].step}"
    if (parts.shape[2] // dim) % kv_heads:
        return f"{parts.shape[2] // dim - 2 * kv_heads} query heads and {kv_heads} key/value heads"
    return None


def _tile(keys, batch_invariant: bool) -> Tile:
    """The tile of keys, the warps and the stages of the kernel. keys: the cache of keys, [N, kv_heads, capacity, D].
    batch_invariant: of `attended`; the bits of a result depend on the keys of a tile and the warps, not on stages."""
    rows, kv_heads, capacity, dim = keys.shape
    tile, programs = WHOLE_TILES[dim], rows * kv_heads
    if dispatch.compute_capability() != (9, 0):
        return tile
    # The registers allow four programs a multiprocessor (_AT_ONCE), with three stages or four.
    tile = dataclasses.replace(tile, stages=3) if dim == 128 else tile
    if batch_invariant or _CORES < programs <= _AT_ONCE:
        return tile
    other = (_FEW_TILES if programs <= _CORES else _MANY_TILES).get(dim, tile)
    return tile if capacity % other.step else other


def _shares(keys, tile: Tile) -> int:
    """How many programs share the keys of each key/value head of each row. With the tiles for few programs (_FEW_TILES)
    they are as many as there are tiles, but all programs at most as many as multiprocessors; otherwise one. keys: the
    cache of keys, [N, kv_heads, capacity, D]. tile: how they are read."""
    rows, kv_heads, capacity, _ = keys.shape
    return min(capacity // tile.step, _CORES // (rows * kv_heads)) if tile in _FEW_TILES.values() else 1


def _shared_bytes(tile: Tile, programs: int) -> int | None:
    """Bytes of shared memory that each of `programs` programs gets at least; None: as many as it uses. All programs
    take about the same time, so they run in rounds. If ten shared a multiprocessor, 2,048 programs (256 rows of 8
    key/value heads) would fill half of the second round, in which fewer copies of keys are on their way than memory
    needs. With eight both rounds are full. `tile` is how the keys are read."""
    if tile not in _MANY_TILES.values():
        return None
    rounds = -(-programs // (_MOST_SHARING * _CORES))
    sharing = -(-programs // (rounds * _CORES))
    return _SHARED_BYTES // sharing // 128 * 128 - 1024  # in units of 128 bytes


def _first_use(parts, keys, table, norms, soft_cap, rounding: dict, tile: Tile, shares: int) -> str | None:
    """The reason why this GPU must not run the kernel for such calls, or None: it compares a small case with the
    reference, once for each kind of call. The case has rows without a token, rows that end within and at the end of a
    tile, rows longer than the cache, and for each program that shares a head four tiles of keys, more than it reads
    ahead. parts, keys, table, norms, soft_cap: of the call. rounding: its settings of norms. tile: how its keys are
    read. shares: how many programs share a head."""
    dim, dtype, kv_heads = keys.shape[3], keys.dtype, keys.shape[1]
    group = parts.shape[2] // dim // kv_heads - 2

    def compare():
        capacity = max(128, 4 * shares * tile.step)
        rows = jnp.asarray([0, -1, capacity + 72, 77, capacity - 1, 31], jnp.int32)
        count = len(rows)
        caches = [drawn(i, count, 2, capacity, dim, dtype=dtype) for i in (1, 2)]
        angles = drawn(3, count, dim // 2, dtype=jnp.float32)
        tables = None if table is None else (jnp.cos(angles), jnp.sin(angles))
        weights = None if norms is None else tuple(drawn(i, dim, dtype=norms[0].dtype) for i in (4, 5))
        given = drawn(0, 2, count, 2 * (group + 2) * dim, dtype=jnp.float32), *caches, rows, tables, weights
        masking = dict(scale=dim**-0.5, window=capacity - 28, soft_cap=soft_cap, sinks=jnp.linspace(-1, 1, 2 * group))

        def wanted(parts, keys, values, positions, table, norms):
            query, keys, values = reference.placed(parts, keys, values, positions, table, norms, **rounding)
            return attention_reference.decode(query, keys, values, positions + 1, **masking), keys, values

        how: dict = dict(tile=tile, shares=shares, rounding=rounding, masking=masking)
        got = jax.jit(functools.partial(_by_kernel, **how))(*given)
        return each_row(*got), each_row(*dispatch.exactly(wanted)(*wide(given)))

    def each_row(out, keys, values):
        """A list of the results in which each row of many keys stands alone, because its numbers are small."""
        return [out[:2], *out[2:], keys, values]

    call = f"{dtype}, head dim {dim}, {group} heads a key/value head, {tile}, {shares}, {rounding}, {table is not None}"
    call += f", {norms is not None}, {soft_cap is not None}"
    return dispatch.first_use("attended", "triton", call, compare)


def _by_kernel(parts, keys, values, positions, table, norms, *, tile: Tile, shares: int, rounding: dict, masking: dict):
    """Runs the kernel of `attended`, and returns what that returns. tile: how the keys are read. shares: how many
    programs share the keys of a head. rounding: its eps, offset and float32. masking: its scale, window, soft_cap and
    sinks. The other arguments are those of `attended`; `refusal` says which calls are supported."""
    from jaxtune.pallas.few_rows import attended_kernels

    splits, count, width = parts.shape
    kv_heads, capacity, dim = keys.shape[1:]
    heads = width // dim - 2 * kv_heads
    weights = (parts, parts) if norms is None else norms
    # cos and sin, and behind them zeros, in which programs count. Each call leaves zeros there, so that one kernel of
    # XLA's makes the array for all layers of a step.
    turns = [] if table is None else [jnp.concatenate(table, axis=-1).reshape(-1)]
    turns += [jnp.zeros(count * kv_heads, jnp.float32)] if shares > 1 else []
    turns = jnp.concatenate(turns) if turns else parts
    # No sinks are no array, which XLA would fill in each step.
    sinks = () if masking["sinks"] is None else (log2_sinks(masking["sinks"], heads),)
    before = parts, *weights, turns, positions, *sinks
    sums = count * kv_heads, shares, heads // kv_heads, dim + 2
    out, keys, values, *_ = compat.triton_graph_call(
        attended_kernels.attended_kernel,
        (*before, keys, values),
        [jax.ShapeDtypeStruct((count, heads, dim), keys.dtype)]
        + [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (keys, values)]
        + [jax.ShapeDtypeStruct(sums, jnp.float32)] * (shares > 1),
        (kv_heads, count, shares),
        warps=tile.warps,
        stages=tile.stages,
        aliases={len(before): 1, len(before) + 1: 2},
        shared_bytes=_shared_bytes(tile, kv_heads * count),
        **({} if sinks else {"sinks": None}),
        **({} if shares > 1 else {"sums": None}),
        COUNT=count,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        CAPACITY=capacity,
        SPLITS=splits,
        NORMS=int(norms is not None),
        ROTATES=int(table is not None),
        EPS=float(rounding["eps"]),
        OFFSET=float(rounding["offset"]),
        FLOAT32=int(rounding["float32"]),
        WINDOW=int(masking["window"] or 0),
        SCALE=float(masking["scale"]),
        CAP=float(masking["soft_cap"] or 0.0),
        STEP=tile.step,
        GROUP=max(16, 1 << (heads // kv_heads - 1).bit_length()),
        STAGES=tile.stages,
        SHARES=shares,
    )
    return out, keys, values
