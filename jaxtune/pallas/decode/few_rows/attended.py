"""A decoding step from the product of query, key and value to the input of the output projection; for short caches one
kernel (attended_kernels.py, or attended_gluon.py for many rows).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import compat, dispatch, one_order, targets
from jaxtune.pallas.arguments import CACHES, FLOATS, INTEGERS, Arguments
from jaxtune.pallas.decode.attention import decode_attention
from jaxtune.pallas.decode.attention import reference as attention_reference
from jaxtune.pallas.decode.attention.splits import log2_sinks
from jaxtune.pallas.decode.attention.triton import WHOLE, WHOLE_TILES, Tile
from jaxtune.pallas.decode.few_rows import reference
from jaxtune.pallas.decode.few_rows.api import placed
from jaxtune.pallas.decode.few_rows.cases import in_float32, normal_array
from jaxtune.pallas.decode.few_rows.shards import unsharded_heads, whole_shape
from jaxtune.pallas.decode.few_rows.triton import placed_refusal

_MULTIPROCESSORS = 132  # multiprocessors of a Hopper GPU
# Tiles of a Hopper GPU by head dim. Where there are fewer programs than multiprocessors: the fewer tiles a program
# reads one after another, the sooner it ends.
_TILES_OF_FEW_HEADS = {128: Tile(128, 8, 3)}
# Where there are more, each is a single warp (attended_gluon.py). Four share a multiprocessor by their shared memory,
# so that 64, 128 and 256 rows of 8 key/value heads fill one, two and four rounds of programs.
_MANY_TILE, _MANY_DIM = Tile(32, 1, 3), 128
_MANY_IN_FP8 = Tile(32, 1, 5)
_MANY_GROUP = 8  # the most query heads a key/value head of that kernel
# The longest cache that it reads where there are more than two programs a multiprocessor. One warp reads a row's keys
# one after another, so that a step would wait long for a row of far more keys than the others, which decode_attention
# divides.
_MANY_CAPACITY = 3072


def attended(
    partial_sums: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    table: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    *,
    dtype=None,
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
    """Norms and rotates queries and keys of one new token in each of N sequences, writes its keys and values into the
    caches, and attends to them. Not differentiable.

    Returns (attention [N, heads, D] in `dtype`, 0 for a row at a negative position; keys; values), in place as
    `placed`. With the kernel, a row's result has the same bits in any slot, and with batch_invariant in any batch.

      partial_sums: of `placed`, or in shards of devices [splits, shards, N, width / shards], with the query, key and
        value heads of kv_heads / shards each.
      implementation: "triton" (one kernel; caches of 16 bits, or of float8_e4m3fn from compute capability 8.9, of at
        most 1,024 keys, or in Gluon 3,072 with a large N; D of 64, 128, 256 or 512), "apart" (`placed` and
        decode_attention), or None: the first that supports the call.
      scale, window, soft_cap, sinks: of decode_attention. Others: of `placed`.
    """
    check = Arguments("attended")
    sharded = getattr(partial_sums, "ndim", 3) == 4
    check.array("partial_sums", partial_sums, "splits shards N columns" if sharded else "splits N width", FLOATS)
    check.array("keys", keys, "N kv_heads capacity D", CACHES)
    check.array("values", values, "N kv_heads capacity D", keys.dtype)
    if sharded and (not partial_sums.shape[1] or keys.shape[1] % partial_sums.shape[1]):
        raise ValueError(
            f"attended: partial_sums has {partial_sums.shape[1]} shards of {keys.shape[1]} key/value heads"
        )
    whole = whole_shape(partial_sums, 3)
    check.array("positions", positions, "N", INTEGERS)
    check.sizes["D/2"] = keys.shape[3] // 2, ""
    for name, pair, shape in (("table", table, "N D/2"), ("norms", norms, "D")):
        for index, array in enumerate(pair or ()):
            check.array(f"{name}[{index}]", array, shape, FLOATS)
    positions = jnp.asarray(positions, jnp.int32)
    rounding: dict = dict(eps=eps, offset=offset, float32=float32)
    masking = dict(scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    dtype = jnp.dtype(dtype or keys.dtype)
    reason = refusal(whole, keys, batch_invariant, dtype)
    if reason is not None and implementation is None:
        implementation = "apart"  # whose two parts say why they have no kernel, if they have none

    def first_use():
        tile = _tile(whole, keys, batch_invariant)
        return _first_use(partial_sums, keys, dtype, table, norms, masking, rounding, tile, _shares(keys, tile))

    reasons = {"triton": lambda: reason or first_use()}
    implementation_name = dispatch.choose("attended", reasons | {"apart": lambda: None}, implementation)
    if implementation_name == "triton":
        tile = _tile(whole, keys, batch_invariant)
        how: dict = dict(tile=tile, shares=_shares(keys, tile), rounding=rounding, masking=masking)
        return _by_kernel(partial_sums, keys, values, positions, table, norms, dtype, **how)
    if sharded:
        partial_sums = unsharded_heads(partial_sums, *keys.shape[1::2])
    query, keys, values = placed(partial_sums, keys, values, positions, table, norms, dtype=dtype, **rounding)
    out = decode_attention(
        query, keys, values, positions + 1, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
    )
    return out, keys, values


def refusal(partial_sums, keys, batch_invariant: bool, dtype=None) -> str | None:
    """Why the kernels of `attended` do not support a call on this GPU, or None; batch_invariant: without
    attended_gluon.py.
    """
    reason = "sums in one order" if one_order.is_exact() else placed_refusal(keys, dtype)
    if reason is not None:
        return reason
    kv_heads, capacity, dim = keys.shape[1:]
    if capacity > WHOLE and not _by_single_warps(partial_sums, keys, batch_invariant):
        return f"a cache of {capacity} keys; up to {WHOLE}"
    if dim not in WHOLE_TILES:
        return f"head dim {dim}; {', '.join(map(str, WHOLE_TILES))}"
    if capacity % WHOLE_TILES[dim].step:
        return f"capacity {capacity}, no multiple of {WHOLE_TILES[dim].step}"
    if (partial_sums.shape[2] // dim) % kv_heads:
        return f"{partial_sums.shape[2] // dim - 2 * kv_heads} query heads and {kv_heads} key/value heads"
    return None


def _tile(partial_sums, keys, batch_invariant: bool) -> Tile:
    """Tile, warps and stages of the kernel; a result's bits depend on tile and warps."""
    rows, kv_heads, capacity, dim = keys.shape
    if _by_single_warps(partial_sums, keys, batch_invariant):
        return _MANY_IN_FP8 if _in_fp8(keys) else _MANY_TILE
    tile = WHOLE_TILES[dim]
    if targets.here() is not targets.HOPPER:
        return tile
    # The registers allow four programs of four warps a multiprocessor, with three stages or four.
    tile = dataclasses.replace(tile, stages=3) if dim == 128 else tile
    if batch_invariant or rows * kv_heads > _MULTIPROCESSORS:
        return tile
    few_tile = _TILES_OF_FEW_HEADS.get(dim, tile)
    return tile if capacity % few_tile.step else few_tile


def _by_single_warps(partial_sums, keys, batch_invariant: bool) -> bool:
    rows, kv_heads, capacity, dim = keys.shape
    if batch_invariant or dim != _MANY_DIM or targets.here() is not targets.HOPPER:
        return False
    programs = rows * kv_heads
    longest = _MANY_CAPACITY if programs > 2 * _MULTIPROCESSORS else WHOLE
    group = partial_sums.shape[2] // dim // kv_heads - 2
    supported = group <= _MANY_GROUP and capacity <= longest and not capacity % _MANY_TILE.step
    return supported and programs > _MULTIPROCESSORS and _has_gluon()


def _in_fp8(keys) -> bool:
    return keys.dtype == jnp.float8_e4m3fn


def _has_gluon() -> bool:
    try:
        from jaxtune.pallas.decode.few_rows import attended_gluon  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def _shares(keys, tile: Tile) -> int:
    """Programs that share the keys of each key/value head of each row."""
    rows, kv_heads, capacity, _ = keys.shape
    return (
        min(capacity // tile.step, _MULTIPROCESSORS // (rows * kv_heads)) if tile in _TILES_OF_FEW_HEADS.values() else 1
    )


def _first_use(
    partial_sums, keys, dtype, table, norms, call_masking: dict, rounding: dict, tile: Tile, shares: int
) -> str | None:
    """The case has rows without a token, with broken and whole tiles, longer than the cache, a window within a tile,
    and two key/value heads a shard.
    """
    dim, kv_heads = keys.shape[3], keys.shape[1]
    group = whole_shape(partial_sums, 3).shape[2] // dim // kv_heads - 2
    window, soft_cap, has_sinks = call_masking["window"], call_masking["soft_cap"], call_masking["sinks"] is not None
    splits = min(2, len(partial_sums))
    sharded = partial_sums.ndim == 4
    of_query = dtype if _in_fp8(keys) else None  # e4m3 rounds by more than the check allows

    def compare():
        capacity = max(128, (tile.stages + 2) * shares * tile.step)
        rows = jnp.asarray([0, -1, capacity + 72, 77, capacity - 1, 31], jnp.int32)
        count = len(rows)
        case_heads = 4 if sharded else 2
        caches = [normal_array(i, count, case_heads, capacity, dim, dtype=keys.dtype) for i in (1, 2)]
        angles = normal_array(3, count, dim // 2, dtype=jnp.float32)
        tables = None if table is None else (jnp.cos(angles), jnp.sin(angles))
        weights = None if norms is None else tuple(normal_array(i, dim, dtype=norms[0].dtype) for i in (4, 5))
        width = case_heads * (group + 2) * dim
        shape = (splits, 2, count, width // 2) if sharded else (splits, count, width)
        sums = normal_array(0, *shape, dtype=partial_sums.dtype)
        operands = sums, *caches, rows, tables, weights
        masking = dict(scale=dim**-0.5, window=window and capacity - 28, soft_cap=soft_cap)
        masking["sinks"] = jnp.linspace(-1, 1, case_heads * group) if has_sinks else None

        def reference_run(partial_sums, keys, values, positions, table, norms):
            if sharded:
                partial_sums = unsharded_heads(partial_sums, case_heads, dim)
            query, keys, values = reference.placed(
                partial_sums, keys, values, positions, table, norms, of_query, **rounding
            )
            return attention_reference.decode(query, keys, values, positions + 1, **masking), keys, values

        how: dict = dict(tile=tile, shares=shares, rounding=rounding, masking=masking)
        kernel_results = jax.jit(functools.partial(_by_kernel, dtype=dtype, **how))(*operands)
        if of_query is None:
            operands = in_float32(operands)
        return each_row(*kernel_results), each_row(*dispatch.exactly(reference_run)(*operands))

    def each_row(out, keys, values):
        """Each row of many keys stands alone, because its numbers are small."""
        return [out[:2], *out[2:], keys, values]

    call = f"{dtype}, {keys.dtype} cache, head dim {dim}, {group} heads a key/value head, {tile}, {shares}, {rounding}"
    call += f", {table is not None}, {norms is not None}, {window is not None}, {soft_cap is not None}"
    call += f", {has_sinks}, {splits} splits in {partial_sums.dtype}{', sharded' * sharded}"
    return dispatch.first_use("attended", "triton", call, compare)


def _by_kernel(
    partial_sums,
    keys,
    values,
    positions,
    table,
    norms,
    dtype,
    *,
    tile: Tile,
    shares: int,
    rounding: dict,
    masking: dict,
):
    """rounding: eps, offset, float32. masking: scale, window, soft_cap, sinks."""
    splits, count, width = whole_shape(partial_sums, 3).shape
    kv_heads, capacity, dim = keys.shape[1:]
    heads = width // dim - 2 * kv_heads
    weights = (partial_sums, partial_sums) if norms is None else norms
    # cos and sin, and behind them zeros, in which programs count. Each call leaves zeros there, so that one kernel of
    # XLA's makes the array for all layers of a step.
    rotations = [] if table is None else [jnp.concatenate(table, axis=-1).reshape(-1)]
    rotations += [jnp.zeros(count * kv_heads, jnp.float32)] if shares > 1 else []
    rotations = jnp.concatenate(rotations) if rotations else partial_sums
    # No sinks are no array, which XLA would fill in each step.
    sinks = () if masking["sinks"] is None else (log2_sinks(masking["sinks"], heads),)
    before = partial_sums, *weights, rotations, positions, *sinks
    results = [jax.ShapeDtypeStruct((count, heads, dim), dtype)]
    results += [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (keys, values)]
    constants: dict = {} if sinks else {"sinks": None}
    if tile in (_MANY_TILE, _MANY_IN_FP8):
        from jaxtune.pallas.decode.few_rows.attended_gluon import many_kernel as kernel
    else:
        from jaxtune.pallas.decode.few_rows.attended_kernels import attended_kernel as kernel

        sums = jax.ShapeDtypeStruct((count * kv_heads, shares, heads // kv_heads, dim + 2), jnp.float32)
        results += [sums] * (shares > 1)
        constants |= {} if shares > 1 else {"sums": None}
        constants |= dict(DIM=dim, GROUP=max(16, 1 << (heads // kv_heads - 1).bit_length()), SHARES=shares)
    out, keys, values, *_ = compat.triton_graph_call(
        kernel,
        (*before, keys, values),
        results,
        (kv_heads, count, shares),
        warps=tile.warps,
        stages=tile.stages,
        aliases={len(before): 1, len(before) + 1: 2},
        COUNT=count,
        HEADS=heads,
        KV_HEADS=kv_heads,
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
        STAGES=tile.stages,
        SHARDS=partial_sums.shape[1] if partial_sums.ndim == 4 else 1,
        **constants,
    )
    return out, keys, values
