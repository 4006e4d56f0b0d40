"""Public functions of decoding steps, except those of experts. All raise TypeError or ValueError for wrong arguments or
an implementation that refuses.

A step of some dozen rows is bound by the bytes of the weights, then by the number of its kernels, so each function is
one. A product whose weights have few rows is divided into splits of the summed columns; the function that takes the
result adds them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, gated, one_order
from jaxtune.pallas.arguments import CACHES, FLOATS, INTEGERS, Arguments
from jaxtune.pallas.decode.few_rows import reference, triton
from jaxtune.pallas.decode.few_rows.cases import in_float32, normal_array
from jaxtune.pallas.decode.few_rows.shards import unsharded, whole_shape
from jaxtune.pallas.quant_matmul import LoraWeights, few_sizes, few_thin
from jaxtune.pallas.quant_matmul.fp8_few import Coded, coded_types
from jaxtune.pallas.quant_matmul.lora_weights import check_adapter

IMPLEMENTATIONS = {"triton": triton, "reference": reference}


def _chosen(op: str, refusal, first_use, implementation: str | None) -> str:
    return dispatch.choose(op, {"triton": lambda: refusal() or first_use(), "reference": lambda: None}, implementation)


def _chosen_product(op: str, x, most: int, refusal, first_use, implementation: str | None) -> str:
    """Chooses "reference" for more than `most` rows, without a warning."""
    few = x.shape[0] <= most
    return _chosen(op, refusal, first_use, implementation if few or implementation else "reference")


def _check_adapters(check: Arguments, loras: Sequence[LoraWeights | None], sizes: Sequence[str]) -> None:
    """Checks the adapters a [r, in], b [out, r] of a product's weights. ValueError for a row_scale (DoRA)."""
    if loras:
        check.sequence("loras", loras, "one for each weight, or None in its place", len(sizes))
    for index, lora in enumerate(loras):
        if lora is None:
            continue
        check_adapter(check, index, lora, sizes[index])
        if lora.row_scale is not None:
            raise ValueError(f"{check.op}: loras[{index}] has a row_scale (DoRA): use quant_matmul")


def products(
    x: jax.Array,
    weights: Sequence[jax.Array],
    loras: Sequence[LoraWeights | None] = (),
    *,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies a few rows by the transposes of one to three weights, with their adapters, in one kernel. Not
    differentiable.

    Returns partial sums [splits, N, sum of out_i], in float32, or in x's dtype for one split. Their sum, rounded to x's
    dtype, is the weights' products side by side.

      x: [N, in], or in shards of devices [shards, N, in / shards], read as they are if of a multiple of 128 columns.
        "triton" supports N up to 128, and to 256 without adapters for several weights, or one of at most 25 million
        numbers.
      weights: [out_i, in] each, in x's dtype.
      loras: an adapter or None for each weight, or empty. It adds scale * (x a^T) b^T, or by its gate; "triton"
        supports ranks up to 64. Arrays in another dtype are cast in each call. ValueError for DoRA.
      implementation: "triton" (16-bit floats on Hopper, multiples of 64 rows and 128 columns, or 64 from 512 on),
        "reference" (jnp; one split if requested), or None: the first that supports the call.
    """
    check = Arguments("products")
    sharded = getattr(x, "ndim", 2) == 3
    check.array("x", x, "shards N columns" if sharded else "N in", FLOATS)
    if sharded and not triton.reads_shards(x):
        x, sharded = unsharded(x), False
    whole = whole_shape(x, 2)
    check.sizes["in"] = whole.shape[1], " (as x has)"
    for index, weight in enumerate(weights):
        check.array(f"weights[{index}]", weight, f"out_{index} in", x.dtype)
    _check_adapters(check, loras, [f"out_{index}" for index in range(len(weights))])

    tile = triton.product_tile(whole, weights, loras)

    def compare():
        rows, columns = few_sizes.padded(len(whole)), 2048 + whole.shape[1] % 128
        sizes = tile.rows, 2 * tile.rows, tile.rows
        weights = [normal_array(i, size, columns, dtype=x.dtype) for i, size in enumerate(sizes, 1)]
        x_shape = (2, rows, columns // 2) if sharded else (rows, columns)
        operands = normal_array(0, *x_shape, dtype=x.dtype), weights
        operands = (
            *operands,
            few_thin.small_adapters([*loras, None, None][:3] if loras else [], rows, sizes, columns, x.dtype),
        )
        kernel = jax.jit(functools.partial(triton.products_in, tile, one_order.is_exact()))
        return [kernel(*operands).sum(0)], [dispatch.exactly(reference.products)(*in_float32(operands))[0]]

    def first_use():
        call = f"{x.dtype}, {few_sizes.padded(len(whole))} rows{few_thin.text(loras)}, {tile}{', sharded' * sharded}"
        return dispatch.first_use("products", "triton", call, compare)

    most = triton.most_rows(weights, loras)

    def refusal():
        return triton.products_refusal(x, weights, loras, most)

    implementation_name = _chosen_product("products", whole, most, refusal, first_use, implementation)
    if implementation_name == "triton":
        return triton.products(x, weights, loras)
    return reference.products(x, weights, loras, 1 if implementation else triton.splits_of_many(whole, weights, loras))


def gated_product(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    activation: str,
    loras: Sequence[LoraWeights | None] = (),
    *,
    implementation: str | None = None,
) -> jax.Array:
    """activation(x gate^T) * (x up^T) for a few rows in one kernel: [N, out] in x's dtype. Not differentiable.

    x: [N, in]; "triton" supports N up to 128.
    activation: a key of gated.ACTIVATIONS. Its argument, its result and x up^T are rounded to x's dtype.
    loras: an adapter or None for gate and up, or empty.
    implementation: "triton" (16 bits on Hopper, sizes as in `products`, "silu" or "gelu_tanh"), "reference", or None:
    the first that supports the call.
    """
    check = Arguments("gated_product")
    check.array("x", x, "N in", FLOATS)
    check.array("gate", gate, "out in", x.dtype)
    check.array("up", up, "out in", x.dtype)
    _check_adapters(check, loras, ("out", "out"))

    rows = few_sizes.padded(len(x))
    # By the rows of the weights the tile is chosen.
    size, columns = (128, 2048) if loras else (gate.shape[0], 512)
    tile = triton.gated_tile(size)

    def compare():
        operands = (
            normal_array(0, rows, columns, dtype=x.dtype),
            *(0.02 * normal_array(i, size, columns, dtype=x.dtype) for i in (1, 2)),
        )
        adapters = few_thin.small_adapters(loras, rows, (128, 128), columns, x.dtype, 0.1)
        kernel, plain = (
            lambda x, gate, up, loras, module=module: module.gated_product(x, gate, up, activation, loras)
            for module in (triton, reference)
        )
        return [jax.jit(kernel)(*operands, adapters)], [dispatch.exactly(plain)(*in_float32((*operands, adapters)))]

    def first_use():
        call = f"{x.dtype}, {activation}, {rows} rows{few_thin.text(loras)}, {tile}"
        return dispatch.first_use("gated_product", "triton", call, compare)

    def refusal():
        return triton.gated_refusal(x, (gate, up), loras, activation)

    if one_order.is_exact() and implementation is None:  # rounded apart, for which one kernel has no registers
        gate_and_up = products(x, (gate, up), loras)[0]
        if one_order.runs_kernels():
            return one_order.triton.activated_halves(gate_and_up, activation)
        gate, up = jnp.split(gate_and_up, 2, axis=1)
        return gated.activated(gate, up, activation)
    implementation_name = _chosen_product("gated_product", x, triton.MOST_ROWS, refusal, first_use, implementation)
    if implementation_name == "reference" and not implementation and len(x) > triton.MOST_ROWS:
        gate, up = reference.each_product(x, (gate, up), loras)
        return _activated(gate, up, activation)
    return IMPLEMENTATIONS[implementation_name].gated_product(x, gate, up, activation, loras)


def _activated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:

    def compare():
        operands = normal_array(0, 33, 200, dtype=gate.dtype), normal_array(1, 33, 200, dtype=gate.dtype)
        kernel, exact = (functools.partial(module.activated, activation=activation) for module in (triton, reference))
        return [jax.jit(kernel)(*operands)], [dispatch.exactly(exact)(*in_float32(operands))]

    def first_use():
        return dispatch.first_use("activated", "triton", f"{gate.dtype}, {activation}", compare)

    plain = "reference" if triton.activated_refusal(gate, activation) else None
    implementation_name = dispatch.choose("activated", {"triton": first_use, "reference": lambda: None}, plain)
    return (triton if implementation_name == "triton" else reference).activated(gate, up, activation)


def added_norm(
    x: jax.Array,
    partial_sums: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(x plus a product, the RMS norm of that), [N, hidden] each in x's dtype, in one kernel. Not differentiable.

    x: [N, hidden], the residual stream. weight: float[hidden]. eps: added to the mean square.
    partial_sums: [splits, N, hidden], partial sums of `products` or `experts_down`; their sum is rounded to x's dtype
    first. Or in shards of devices, [splits, shards, N, hidden / shards].
    offset: added to the weight, such as 1 for Gemma; ignored unless float32.
    float32: the normed numbers times the weight are rounded once; otherwise both are rounded first, and the product.
    implementation: "triton" (x of 16 bits, at most 16,384 columns), "reference", or None.
    """
    return _added_norm(x, partial_sums, weight, None, implementation, eps=eps, offset=offset, float32=float32)


def added_norm_coded(
    x: jax.Array,
    partial_sums: jax.Array,
    weight: jax.Array,
    blocks: bool,
    *,
    eps: float,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, Coded]:
    """`added_norm`, and the norm rounded to e4m3 as FP8 products round it, in the same kernel.

    blocks: each 128 numbers have a scale, not each row; ValueError if hidden is no multiple of 128 then. Others: as in
    `added_norm`.
    """
    return _added_norm(x, partial_sums, weight, blocks, implementation, eps=eps, offset=offset, float32=float32)


def _added_norm(x, partial_sums, weight, blocks: bool | None, implementation: str | None, **options):
    check = Arguments("added_norm")
    check.array("x", x, "N hidden", FLOATS)
    sharded = getattr(partial_sums, "ndim", 3) == 4
    check.array("partial_sums", partial_sums, "splits shards N columns" if sharded else "splits N hidden", FLOATS)
    if sharded and partial_sums.shape[1] * partial_sums.shape[3] != x.shape[1]:
        raise ValueError(
            f"added_norm: partial_sums has {partial_sums.shape[1]} shards of {partial_sums.shape[3]} columns; "
            f"x has {x.shape[1]}"
        )
    check.array("weight", weight, "hidden", FLOATS)
    if blocks is not None:
        coded_types(len(x), x.shape[1], blocks)
    warps = one_order.triton.norm_warps(x.shape[1])

    def compare():
        size = 768 if warps == one_order.triton.norm_warps(768) else 2176
        operands = (
            normal_array(0, 5, size, dtype=x.dtype),
            normal_array(1, *((3, 2, 5, size // 2) if sharded else (3, 5, size)), dtype=partial_sums.dtype),
            normal_array(2, size, dtype=x.dtype),
        )
        added, normed, *coded = jax.jit(triton.added_norm, static_argnums=3, static_argnames=[*options])(
            *operands, blocks, **options
        )
        exact = list(dispatch.exactly(functools.partial(reference.added_norm, **options))(*in_float32(operands)))
        if coded:  # of the kernel's own norm: another rounding of it may be another code
            return [added, normed, coded[0].decode()], [*exact, Coded.of(normed, bool(blocks)).decode()]
        return [added, normed], exact

    def first_use():
        rounds = "" if blocks is None else ", in blocks" if blocks else ", in rows"
        call = f"{x.dtype}, sums in {partial_sums.dtype}{', sharded' * sharded}, {options}{rounds}, {warps} warps"
        return dispatch.first_use("added_norm", "triton", call, compare)

    def refusal():
        return triton.added_norm_refusal(x)

    implementation_name = _chosen("added_norm", refusal, first_use, implementation)
    return IMPLEMENTATIONS[implementation_name].added_norm(x, partial_sums, weight, blocks, **options)


def placed(
    partial_sums: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    table: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    *,
    dtype=None,
    eps: float = 1e-6,
    offset: float = 0.0,
    float32: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norms and rotates queries and keys of one new token in each of N sequences, and writes its keys and values into
    the caches, in one kernel. Not differentiable.

    Returns (query [N, heads, D] in `dtype`, keys, values). XLA changes the caches in place, unless the
    program reads the old ones again or they are arguments that are not donated.

      partial_sums: [splits, N, (heads + 2 kv_heads) D], partial sums of query, key and value side by side.
      keys, values: caches [N, kv_heads, capacity, D], of floats or float8_e4m3fn (no scales); a token goes to its
      position modulo capacity.
      positions: int32[N]; for a negative one nothing is written, and the row's query means nothing.
      table: (cos, sin) at these positions, float32[N, D / 2] (RoPE); None: no rotation.
      norms: weights [D] of the query's and key's RMS norms, before the rotation; None: no norms.
      dtype: in which everything is rounded before it is cached; None: the caches'.
      eps: added to the mean square. offset: added to the weight, if float32. float32: only the product is rounded.
      implementation: "triton" (16-bit dtypes, FP8 caches from compute capability 8.9, D a power of two from 32 to
        512), "reference", or None.
    """
    check = Arguments("placed")
    check.array("partial_sums", partial_sums, "splits N width", FLOATS)
    check.array("keys", keys, "N kv_heads capacity D", CACHES)
    check.array("values", values, "N kv_heads capacity D", keys.dtype)
    check.array("positions", positions, "N", INTEGERS)
    check.sizes["D/2"] = keys.shape[3] // 2, ""
    for name, pair, shape in (("table", table, "N D/2"), ("norms", norms, "D")):
        for index, array in enumerate(pair or ()):
            check.array(f"{name}[{index}]", array, shape, FLOATS)
    positions = jnp.asarray(positions, jnp.int32)
    options = dict(eps=eps, offset=offset, float32=float32)
    dim, dtype = keys.shape[3], dtype or keys.dtype

    def compare():
        rows = jnp.asarray([0, -1, 200, 77, 127], jnp.int32)
        caches = [normal_array(i, 5, 2, 128, dim, dtype=keys.dtype) for i in (1, 2)]
        angles = normal_array(3, 5, dim // 2, dtype=jnp.float32)
        tables = None if table is None else (jnp.cos(angles), jnp.sin(angles))
        weights = None if norms is None else tuple(normal_array(i, dim, dtype=norms[0].dtype) for i in (4, 5))
        operands = normal_array(0, 2, 5, 7 * dim, dtype=partial_sums.dtype), *caches, rows, tables, weights
        kernel, exact = (functools.partial(module.placed, **options) for module in (triton, reference))
        kernel = list(jax.jit(functools.partial(kernel, dtype=dtype))(*operands))
        if keys.dtype == dtype:
            exact = list(dispatch.exactly(exact)(*in_float32(operands)))
        else:  # e4m3 rounds by more than the check allows
            exact = list(dispatch.exactly(functools.partial(exact, dtype=dtype))(*operands))
        live = rows[:, None, None] >= 0
        return [jnp.where(live, kernel[0], 0), *kernel[1:]], [jnp.where(live, exact[0], 0), *exact[1:]]

    def first_use():
        call = f"{dtype}, {keys.dtype} cache, head dim {dim}, {options}, {table is not None}, {norms is not None}"
        call += f", sums in {partial_sums.dtype}"
        return dispatch.first_use("placed", "triton", call, compare)

    implementation_name = _chosen("placed", lambda: triton.placed_refusal(keys, dtype), first_use, implementation)
    run = IMPLEMENTATIONS[implementation_name].placed
    return run(partial_sums, keys, values, positions, table, norms, dtype, **options)
