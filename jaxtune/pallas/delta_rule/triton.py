"""The gated delta rule as Triton kernels, from compute capability 8.0 on, for 16-bit operands and head dims of 128.

Chunks have 64 tokens, as in chunked.py, but the error is defined without beta, so that nothing is divided by it: z
solves (1 + B) z = v - d k S with B[i, j] = (k_i . k_j) D[i, j] beta_j, and beta z is written. S is the state before the
chunk, d its decay up to a token, D[i, j] the decay from token j to a later token i, each 0 across documents. Queries
and keys are not normalised in memory; their inverse lengths are factors per token.

Two kernels of the forward process all chunks in parallel (ChunkFactors). The third walks along a row, with a program
for some columns of a head's state, in registers in float32; products get it rounded to 16 bits. For the backward it
stores z and the state before each chunk, in 16 bits. The backward's first kernel walks back with the states' gradients,
and stores the gradient after each chunk and dvalue; four others compute by chunks. No inverse is differentiated, as d(1
+ B) = -dv z^T. Every sum has a fixed order.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch, meshes, targets
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.delta_rule import reference
from jaxtune.pallas.delta_rule.chunked import CHUNK

DIM = 128  # dimensions of keys and of values
# {kernel: (warps, columns at a time (for a state: the rows of a matrix product), steps that are loaded ahead)}
_TILES = {
    "numbers": (4, DIM, 1),
    "chunk": (4, DIM, 1),
    "forward": (4, 64, 2),
    "reverse": (4, 64, 2),
    "pairs": (4, 64, 2),
    "dquery": (4, 32, 3),
    "dkey": (8, 32, 3),
    "rates": (1, DIM, 1),
}
_LEAST_KB = 163  # shared memory that has room for more than one step


def _tile(kernel: str) -> tuple[int, int, int]:
    """(warps, columns of a head dim at a time, num_stages) of a kernel on the GPU compiled for."""
    if kernel == "reverse" and targets.here() is targets.HOPPER:
        return 8, DIM, 3  # 210 KB
    warps, width, stages = _TILES[kernel]
    return warps, width, stages if targets.shared_memory_kb() >= _LEAST_KB else 1


def refusal(key, value) -> str | None:
    """Why these kernels cannot compute a call, or None; it may run their check at first use."""
    reason = compat.triton_refusal()
    if reason is not None:
        return reason
    if key.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {key.dtype}"
    dims = key.shape[-1], value.shape[-1]
    if dims != (DIM, DIM):
        return f"head dims {dims[0]} and {dims[1]}; they serve {DIM} and {DIM}"
    return _first_use(jnp.dtype(key.dtype), value.shape[2] // key.shape[2])


def _first_use(dtype, group: int) -> str | None:
    """Released versions of Triton have compiled such kernels wrongly."""

    def compare():
        runs = ((1, 70), (0, 5), (2, 1), (3, 130), (4, 64), (0, 27))
        ids = np.concatenate([np.repeat(number, tokens) for number, tokens in runs])[None].astype(np.int32)
        layout = packed_layout(ids.shape, jnp.asarray(ids))
        keys = jax.random.split(jax.random.key(0), 6)
        tokens = (1, ids.shape[1])
        query, key = (jax.random.normal(k, (*tokens, 2, DIM)).astype(dtype) for k in keys[:2])
        value, dout = (jax.random.normal(k, (*tokens, 2 * group, DIM)).astype(dtype) for k in keys[2:4])
        decay = -jnp.exp(jax.random.normal(keys[4], (*tokens, 2 * group)) - 2.0)
        beta = jax.nn.sigmoid(jax.random.normal(keys[5], decay.shape))

        def run(function, *arrays, dout):
            out, pull = jax.vjp(lambda *arrays: function(*arrays, layout), *arrays)
            return (out, *pull(dout.astype(out.dtype)))

        arrays = query, key, value, decay, beta
        kernel_results = jax.jit(lambda *arrays: run(forward, *arrays, dout=dout))(*arrays)
        exact = dispatch.exactly(lambda *arrays: run(reference.forward, *arrays, dout=dout))
        return kernel_results, exact(*(array.astype(jnp.float32) for array in arrays))

    call = f"{dtype.name}, {group} heads of a key head"
    return dispatch.first_use("gated_delta_rule", "triton", call, compare)


def forward(query, key, value, decay, beta, layout: PackedLayout):
    """As api.gated_delta_rule, of head dim 128 and 16 bits."""
    return _rule(query, key, value, decay, beta, layout)


@jax.custom_vjp
def _rule(query, key, value, decay, beta, layout):
    """The rule with a derivative by kernels. Without a derivative, neither errors nor states are stored."""
    factors = _by_rows(_chunks, 6)(query, key, decay, beta, value, layout)
    return _by_rows(functools.partial(_states, save=False), 4)(query, key, value, factors)[0]


def _rule_fwd(query, key, value, decay, beta, layout):
    """value, decay and beta are no residuals: the backward needs them only in ChunkFactors' forms."""
    factors = _by_rows(_chunks, 6)(query, key, decay, beta, value, layout)
    out, error, states = _by_rows(functools.partial(_states, save=True), 4)(query, key, value, factors)
    return out, (query, key, layout, factors, error, states)


def _rule_bwd(residuals, dout):
    """Gradients of query, key, value, decay and beta, 0 at padding, where dout may be anything."""
    query, key, layout, factors, error, states = residuals
    if not layout.full:  # padding may have any gradient, even NaN
        dout = jnp.where((jnp.arange(dout.shape[1]) < layout.doc_end)[..., None, None], dout, 0)
    return (*_by_rows(_backward, 7)(query, key, dout, error, states, layout, factors), None)


_rule.defvjp(_rule_fwd, _rule_bwd)


def _by_rows(function, rows: int):
    """`function` on each device with its rows of the batch; rows: number of leading arguments with rows."""
    return meshes.on_each_device(function, rows=rows)


def _call(kernel: str, arguments, out_types, grid, key, value, **constants: Any):
    """Outputs of the kernel of this name in _TILES. Of key and value (or an array of value's shape) only shapes are
    read.
    """
    from jaxtune.pallas.delta_rule import triton_kernels

    length, heads, value_dim = value.shape[1:]
    warps, width, stages = _tile(kernel)
    return compat.triton_call(
        getattr(triton_kernels, f"{kernel}_kernel"),
        arguments,
        out_types,
        grid,
        warps=warps,
        stages=stages,
        LENGTH=length,
        CHUNKS=math.ceil(length / CHUNK),
        CHUNK=CHUNK,
        KEY_HEADS=key.shape[2],
        HEADS=heads,
        KEY_DIM=key.shape[-1],
        VALUE_DIM=value_dim,
        SCALE=key.shape[-1] ** -0.5,
        WIDTH=width,
        **constants,
    )


class ChunkFactors(NamedTuple):
    """What the first two kernels compute, which depends on no state: two matrices of each chunk in key's dtype; from
    `total` to `reach` float32[B, heads, tokens padded to whole chunks of 64]; and a number of each chunk. Factors are
    for queries and keys as they are in memory, so they contain unit_q or unit_k.
    """

    inverse: jax.Array  # [B, heads, chunks, CHUNK, CHUNK]: the inverse of 1 + B, which maps v - d k S to the errors z
    weights: jax.Array  # of the same shape: with which queries read the errors z of the chunk's tokens, beta included
    total: jax.Array  # sum of the decays (logarithms) of the token and those before it in its document and chunk
    share: jax.Array  # beta; 0 at padding
    unit_q: jax.Array  # 1 over the query's length, divided by sqrt(K); 0 at padding
    unit_k: jax.Array  # 1 over the key's length
    kept: jax.Array  # factor with which a token's key reads the state before the chunk; contains unit_k
    read: jax.Array  # factor with which a token's query reads the state before the chunk; contains unit_q
    written: jax.Array  # factor on error times key in the state after the chunk; contains beta and unit_k
    reach: jax.Array  # `written` without its factor beta
    # [B, heads, chunks]: factor of the state before the chunk in that after it; 0 unless the chunk's last token belongs
    # to a document that began before the chunk
    faded: jax.Array


def _chunks(query, key, decay, beta, value, layout) -> ChunkFactors:
    """Runs the first two kernels. Of value only the shape is read."""
    rows, length, heads = value.shape[:3]
    chunks = math.ceil(length / CHUNK)
    numbers = jax.ShapeDtypeStruct((rows, heads, chunks * CHUNK), jnp.float32)
    faded = jax.ShapeDtypeStruct((rows, heads, chunks), jnp.float32)
    bounds = layout.doc_start, layout.doc_end
    token_factors = _call(
        "numbers",
        (query, key, decay, beta, *bounds),
        (*(numbers,) * 8, faded),
        (key.shape[2], chunks, rows),
        key,
        value,
    )
    total, share, unit_q, unit_k = token_factors[:4]
    matrices = jax.ShapeDtypeStruct((rows, heads, chunks, CHUNK, CHUNK), key.dtype)
    inverse, weights = _call(
        "chunk",
        (query, key, *bounds, total, share, unit_q, unit_k),
        (matrices, matrices),
        (heads, chunks, rows),
        key,
        value,
    )
    return ChunkFactors(inverse, weights, *token_factors)


def _states(query, key, value, factors: ChunkFactors, *, save: bool):
    """(out [B, T, heads, V], errors z in value's shape, states before each chunk [B, heads, chunks, V, K] in key's
    dtype).

      save: False: the last two are placeholders of B numbers, and not written.
    """
    rows, length, heads, value_dim = value.shape
    chunks = math.ceil(length / CHUNK)
    like_value = jax.ShapeDtypeStruct(value.shape, value.dtype)
    states = jax.ShapeDtypeStruct((rows, heads, chunks, value_dim, key.shape[-1]), key.dtype)
    nothing = jax.ShapeDtypeStruct((rows,), key.dtype)
    return _call(
        "forward",
        (
            query,
            key,
            value,
            factors.inverse,
            factors.weights,
            factors.kept,
            factors.read,
            factors.written,
            factors.faded,
        ),
        (like_value, *((like_value, states) if save else (nothing, nothing))),
        (value_dim // _tile("forward")[1], heads, rows),
        key,
        value,
        SAVE=save,
    )


def _reverse(query, key, dout, factors: ChunkFactors):
    """(dvalue [B, T, heads, V], gradients of states [B, heads, chunks, V, K]); dout must be 0 at padding."""
    rows, length, heads, value_dim = dout.shape
    states = (rows, heads, math.ceil(length / CHUNK), value_dim, key.shape[-1])
    return _call(
        "reverse",
        (
            query,
            key,
            dout,
            factors.inverse,
            factors.weights,
            factors.kept,
            factors.read,
            factors.written,
            factors.faded,
        ),
        (jax.ShapeDtypeStruct(dout.shape, dout.dtype), jax.ShapeDtypeStruct(states, key.dtype)),
        (value_dim // _tile("reverse")[1], heads, rows),
        key,
        dout,
    )


def _backward(query, key, dout, error, states, layout, factors: ChunkFactors):
    """(dquery, dkey, dvalue, ddecay, dbeta); the last two float32. dout must be 0 at padding."""
    dvalue, dstates = _reverse(query, key, dout, factors)
    bounds = layout.doc_start, layout.doc_end
    matrices = jax.ShapeDtypeStruct(factors.inverse.shape, factors.inverse.dtype)
    numbers = jax.ShapeDtypeStruct(factors.total.shape, factors.total.dtype)
    carry_terms = jax.ShapeDtypeStruct(factors.faded.shape, factors.faded.dtype)
    like_query = jax.ShapeDtypeStruct(query.shape, query.dtype)
    rows, length, heads = dout.shape[:3]
    rates = jax.ShapeDtypeStruct((rows, length, heads), jnp.float32)
    chunks, key_heads = math.ceil(length / CHUNK), key.shape[2]
    to_weights, to_system, pair_terms, dbeta = _call(
        "pairs",
        (query, key, *bounds, error, dvalue, dout, factors.total, factors.share, factors.unit_q, factors.unit_k),
        (matrices, matrices, numbers, numbers),
        (heads, chunks, rows),
        key,
        dout,
    )
    dquery, query_terms = _call(
        "dquery",
        (query, key, dout, states, factors.read, to_weights),
        (like_query, numbers),
        (key_heads, chunks, rows),
        key,
        dout,
    )
    dkey, *state_terms = _call(
        "dkey",
        (query, key, error, dvalue, states, dstates, factors.kept, factors.written, to_weights, to_system),
        (like_query, numbers, numbers, carry_terms),
        (key_heads, chunks, rows),
        key,
        dout,
    )
    ddecay, dbeta = _call(
        "rates",
        (
            factors.share,
            *bounds,
            factors.kept,
            factors.faded,
            factors.reach,
            pair_terms,
            dbeta,
            query_terms,
            *state_terms,
        ),
        (rates, rates),
        (heads, chunks, rows),
        key,
        dout,
    )
    return dquery, dkey, dvalue, ddecay, dbeta
