"""The gated delta rule as Triton kernels, for NVIDIA GPUs since Ampere (compute capability 8.0), 16-bit operands and
head dims of 128: `forward`, with its derivative, and `refusal`, which says what they cannot compute. gated_delta_rule
in api.py calls both.

Chunks have 64 tokens, as in chunked.py, but the error is defined without beta, so that nothing is divided by it: the
error z solves (1 + B) z = v - d k S with B[i, j] = (k_i . k_j) D[i, j] beta_j, and beta z is what is written. S is the
state before the chunk, d its decay up to a token (0 if the token's document began in the chunk), and D[i, j] the decay
from token j to a later token i of its document, otherwise 0. (B is also the number of rows in shapes such as [B, T].)
Queries and keys are not normalised in memory; their inverse lengths are factors per token.

The forward has three kernels. Two process all chunks in parallel: the first computes, for each token, the factors
(decay, beta and inverse lengths) with which its key and query read the state before the chunk and its error enters the
state after the chunk; the second the inverse of 1 + B, and the weights with which queries read the chunk's own tokens,
both in 16 bits (`Made` lists all these values). The third walks along a row, with a program for some columns of a
head's state, which stays in registers in float32; products get it rounded to 16 bits. For the backward it stores the
state before each chunk, and z, both in 16 bits.

The backward has five kernels. The first walks back with the gradients of the states, and stores the gradient after each
chunk and dvalue. The others compute, chunk by chunk, the gradients of the two matrices, dquery, dkey, and ddecay with
dbeta. No inverse is differentiated, as d(1 + B) = -dv z^T. Every sum has a fixed order.

The kernels are in triton_kernels.py, which imports triton and is therefore imported only where it is used.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch, meshes
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
_ROOMY = ((8, 0), (8, 7), (9, 0))  # compute capabilities whose shared memory has room for more than one step


def _tile(kernel: str) -> tuple[int, int, int]:
    """(warps of a program, columns of a head dim that it takes at a time, Triton's num_stages: steps of its loop that
    are loaded ahead), with which `_call` compiles the kernel of this name: its entry of _TILES, adapted to the GPU that
    is compiled for: on Hopper "reverse" has a larger one, and GPUs of other compute capabilities than 8.0, 8.7 and 9.0,
    which may have less shared memory than an A100, load one step only."""
    capability = dispatch.compute_capability()
    if kernel == "reverse" and capability == (9, 0):
        return 8, DIM, 3  # 210 KB
    warps, width, stages = _TILES[kernel]
    return warps, width, stages if capability in _ROOMY else 1


def refusal(key, value) -> str | None:
    """Returns the reason why these kernels cannot compute a call with key [B, T, key_heads, K] and value [B, T, heads,
    V], or None: no GPU that runs Triton kernels, or no jax-triton; a dtype other than bfloat16 and float16, head dims K
    and V other than 128, or a difference from the reference in the check at first use on this GPU, which may take some
    seconds now. Only shapes and dtypes are used."""
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
    """Returns the reason why this GPU must not run the kernels in `dtype` with `group` value heads for each key head,
    or None. It compares a small packed case, with its gradients, with the reference, once for each such call; a pass is
    stored in the user's cache. It is None without a check if there is no GPU, while compiling for another GPU, or if
    the check is only queued and is done later (within dispatch.built or dispatch.unchecked). `refusal` calls it:
    released versions of Triton have compiled such kernels wrongly."""

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
        got = jax.jit(lambda *arrays: run(forward, *arrays, dout=dout))(*arrays)
        exact = dispatch.exactly(lambda *arrays: run(reference.forward, *arrays, dout=dout))
        return got, exact(*(array.astype(jnp.float32) for array in arrays))

    call = f"{dtype.name}, {group} heads of a key head"
    return dispatch.first_use("gated_delta_rule", "triton", call, compare)


def forward(query, key, value, decay, beta, layout: PackedLayout):
    """Returns the output [B, T, heads, V] of the gated delta rule over packed documents, computed by the Triton
    kernels, in value's dtype; padding gives 0. It is differentiable with respect to all arguments but the layout.
    Queries and keys are normalised here, and the output is divided by sqrt(K). `refusal` says which calls are
    supported.

    query and key are [B, T, key_heads, K], value [B, T, heads, V], decay (the logarithm of the factor on the state) and
    beta (the share of what is stored at a key that is replaced) float32[B, T, heads]; layout: the document bounds.
    """
    return _rule(query, key, value, decay, beta, layout)


@jax.custom_vjp
def _rule(query, key, value, decay, beta, layout):
    """Returns the output of the gated delta rule, [B, T, heads, V], in value's dtype, with a custom derivative, whose
    backward has kernels of its own. If no derivative is taken, the forward kernel stores neither errors nor states.

    query and key are [B, T, key_heads, K], value [B, T, heads, V], decay (the logarithm of the factor on the state) and
    beta (the share of what is stored at a key that is replaced) float32[B, T, heads]; layout: the document bounds.
    """
    made = _by_rows(_chunks, 6)(query, key, decay, beta, value, layout)
    return _by_rows(functools.partial(_states, save=False), 4)(query, key, value, made)[0]


def _rule_fwd(query, key, value, decay, beta, layout):
    """The forward rule of `_rule` for jax.custom_vjp, with its arguments: returns (out [B, T, heads, V], residuals).
    The residuals are (query, key, layout, made, error, states): the Made that `_chunks` returned, and from `_states`
    the errors that tokens write into the state and the state before each chunk. value, decay and beta are not kept,
    because the backward needs them only in these forms."""
    made = _by_rows(_chunks, 6)(query, key, decay, beta, value, layout)
    out, error, states = _by_rows(functools.partial(_states, save=True), 4)(query, key, value, made)
    return out, (query, key, layout, made, error, states)


def _rule_bwd(residuals, dout):
    """The backward rule of `_rule` for jax.custom_vjp: returns (gradients of query, key, value, decay and beta, None
    for the layout), in the arguments' shapes and dtypes, 0 at padding. residuals is what `_rule_fwd` saved; dout [B, T,
    heads, V] is the gradient of the output, which is set to zero at padding first, unless the layout guarantees that
    there is none (`full`); it may be anything there, even NaN."""
    query, key, layout, made, error, states = residuals
    if not layout.full:  # padding may have any gradient, even NaN
        dout = jnp.where((jnp.arange(dout.shape[1]) < layout.doc_end)[..., None, None], dout, 0)
    return (*_by_rows(_backward, 7)(query, key, dout, error, states, layout, made), None)


_rule.defvjp(_rule_fwd, _rule_bwd)


def _by_rows(function, rows: int):
    """Returns a function that calls `function` on each device of a mesh with the device's own rows of the batch,
    because XLA cannot divide a kernel; if the mesh's axis "data" does not divide the number of rows, each device gets
    all rows. `_rule` and its forward and backward rules call all kernels so. `rows` is the number of its first
    arguments that have the batch's rows as their leading axis and are divided; all of its results have. Without a mesh
    of several devices, or within a shard_map over it, `function` gets the arrays as they are."""
    return meshes.on_each_device(function, rows=rows)


def _call(kernel: str, arguments, out_types, grid, key, value, **constants: Any):
    """Calls one of the kernels of triton_kernels.py and returns its outputs, a list in the order of out_types. The
    compile-time constants that all kernels have come from its tile (`_tile`) and from the shapes of key and value.

    Args:
      kernel: the kernel's name in _TILES, such as "forward" for triton_kernels.forward_kernel.
      arguments: the input arrays.
      out_types: shapes and dtypes of the outputs.
      grid: number of programs along each axis.
      key: [B, T, key_heads, K]; only its shape is used.
      value: value or another array of its shape, [B, T, heads, V]; only its shape is used.
      constants: further compile-time constants, those that only this kernel has: SAVE of "forward".
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


class Made(NamedTuple):
    """What the first two kernels compute, the values of chunks that do not depend on a state; the forward and the
    backward use it. It consists of two matrices of each chunk in key's dtype, eight numbers of each token and value
    head (`total` to `reach`), each float32[B, heads, tokens] with tokens padded to whole chunks of 64, and a number of
    each chunk. Factors of queries and keys are for those in memory, which are not normalised, so they contain unit_q or
    unit_k."""

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


def _chunks(query, key, decay, beta, value, layout) -> Made:
    """Runs the first two kernels, "numbers" and "chunk", which process all chunks in parallel, and returns what they
    compute: the factors of tokens and the matrices of chunks, which do not depend on a state.

    query and key are [B, T, key_heads, K], decay (the logarithm of the factor on the state) and beta float32[B, T,
    heads]; of value [B, T, heads, V] only the shape is used. layout: the document bounds.
    """
    rows, length, heads = value.shape[:3]
    chunks = math.ceil(length / CHUNK)
    numbers = jax.ShapeDtypeStruct((rows, heads, chunks * CHUNK), jnp.float32)
    faded = jax.ShapeDtypeStruct((rows, heads, chunks), jnp.float32)
    bounds = layout.doc_start, layout.doc_end
    found = _call(
        "numbers",
        (query, key, decay, beta, *bounds),
        (*(numbers,) * 8, faded),
        (key.shape[2], chunks, rows),
        key,
        value,
    )
    total, share, unit_q, unit_k = found[:4]
    matrices = jax.ShapeDtypeStruct((rows, heads, chunks, CHUNK, CHUNK), key.dtype)
    inverse, weights = _call(
        "chunk",
        (query, key, *bounds, total, share, unit_q, unit_k),
        (matrices, matrices),
        (heads, chunks, rows),
        key,
        value,
    )
    return Made(inverse, weights, *found)


def _states(query, key, value, made: Made, *, save: bool):
    """Runs the third kernel, which walks along the rows. Returns (out [B, T, heads, V], the errors z of tokens, which
    are written into the state times beta, of value's shape and dtype, and the states before each chunk, [B, heads,
    chunks, V, K] in key's dtype).

    query and key are [B, T, key_heads, K], value [B, T, heads, V]; made: the factors and matrices that `_chunks`
    returned. save: True: errors and states are stored for the backward; False, when no derivative is taken: in their
    place come two arrays of B numbers, one for each row as `_by_rows` requires, that are not written and have no
    meaning.
    """
    rows, length, heads, value_dim = value.shape
    chunks = math.ceil(length / CHUNK)
    like_value = jax.ShapeDtypeStruct(value.shape, value.dtype)
    states = jax.ShapeDtypeStruct((rows, heads, chunks, value_dim, key.shape[-1]), key.dtype)
    nothing = jax.ShapeDtypeStruct((rows,), key.dtype)
    return _call(
        "forward",
        (query, key, value, made.inverse, made.weights, made.kept, made.read, made.written, made.faded),
        (like_value, *((like_value, states) if save else (nothing, nothing))),
        (value_dim // _tile("forward")[1], heads, rows),
        key,
        value,
        SAVE=save,
    )


def _reverse(query, key, dout, made: Made):
    """Runs the kernel that walks back along the rows. Returns (dvalue [B, T, heads, V], the gradients of the states
    after each chunk, [B, heads, chunks, V, K] in key's dtype). query and key are [B, T, key_heads, K]; dout [B, T,
    heads, V] is the gradient of the output, 0 at padding; made: the factors and matrices that `_chunks` returned."""
    rows, length, heads, value_dim = dout.shape
    states = (rows, heads, math.ceil(length / CHUNK), value_dim, key.shape[-1])
    return _call(
        "reverse",
        (query, key, dout, made.inverse, made.weights, made.kept, made.read, made.written, made.faded),
        (jax.ShapeDtypeStruct(dout.shape, dout.dtype), jax.ShapeDtypeStruct(states, key.dtype)),
        (value_dim // _tile("reverse")[1], heads, rows),
        key,
        dout,
    )


def _backward(query, key, dout, error, states, layout, made: Made):
    """Runs the five kernels of the backward: returns (dquery, dkey, dvalue, ddecay, dbeta), in the shapes of query,
    key, value, decay and beta; ddecay and dbeta are float32, the others in the operands' dtype. `_rule_bwd` calls it,
    through `_by_rows` because it runs kernels.

    Args:
      query, key: [B, T, key_heads, K], the operands of the forward.
      dout: the gradient of the output, [B, T, heads, V], 0 at padding.
      error: [B, T, heads, V], each token's value minus what the decayed state predicts at its key; `_states` stored it.
      states: [B, heads, chunks, V, K], the state before each chunk, which `_states` stored too.
      layout: the document bounds.
      made: the values of the forward that do not depend on a state, which `_chunks` returned: two matrices for each
        chunk (the inverse that maps values to errors, and the weights with which queries read errors), factors of each
        token, and the decay of the state over each chunk.
    """
    dvalue, dstates = _reverse(query, key, dout, made)
    bounds = layout.doc_start, layout.doc_end
    matrices = jax.ShapeDtypeStruct(made.inverse.shape, made.inverse.dtype)
    numbers = jax.ShapeDtypeStruct(made.total.shape, made.total.dtype)
    fading = jax.ShapeDtypeStruct(made.faded.shape, made.faded.dtype)
    like_query = jax.ShapeDtypeStruct(query.shape, query.dtype)
    rows, length, heads = dout.shape[:3]
    rates = jax.ShapeDtypeStruct((rows, length, heads), jnp.float32)
    chunks, key_heads = math.ceil(length / CHUNK), key.shape[2]
    to_weights, to_system, flow, dbeta = _call(
        "pairs",
        (query, key, *bounds, error, dvalue, dout, made.total, made.share, made.unit_q, made.unit_k),
        (matrices, matrices, numbers, numbers),
        (heads, chunks, rows),
        key,
        dout,
    )
    dquery, asked = _call(
        "dquery",
        (query, key, dout, states, made.read, to_weights),
        (like_query, numbers),
        (key_heads, chunks, rows),
        key,
        dout,
    )
    dkey, *of_states = _call(
        "dkey",
        (query, key, error, dvalue, states, dstates, made.kept, made.written, to_weights, to_system),
        (like_query, numbers, numbers, fading),
        (key_heads, chunks, rows),
        key,
        dout,
    )
    ddecay, dbeta = _call(
        "rates",
        (made.share, *bounds, made.kept, made.faded, made.reach, flow, dbeta, asked, *of_states),
        (rates, rates),
        (heads, chunks, rows),
        key,
        dout,
    )
    return dquery, dkey, dvalue, ddecay, dbeta
