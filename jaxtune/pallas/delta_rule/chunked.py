"""The gated delta rule in plain jnp by chunks of tokens, with matrix products and few sequential steps.

Within a chunk the errors e that tokens write into the state depend on each other through a unit lower triangular matrix
(the WY form of arXiv 2406.06484, with decays as in arXiv 2412.06464). With the chunk's first state S, unit keys k, and
unit queries q divided by sqrt(key_dim),

  (1 + A) e = beta (v - d k S),   A[i, j] = beta_i (k_i . k_j) D[i, j] below the diagonal
  out = d q S + P e,              P[i, j] = (q_i . k_j) D[i, j] on and below it
  S <- d_last S + sum_j D[last, j] k_j e_j^T

D[i, j] is the decay from token j to token i, 0 if their documents differ, and d[i] that from the chunk's first state, 0
if the document of i starts within the chunk: borders are exact wherever they are. For a group of chunks A, P and the
inverse of 1 + A are computed at once, then the state runs through the chunks. The backward recomputes all this from the
group's first state, so one state per group and row is stored.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from jaxtune.pallas.delta_rule.reference import unit

CHUNK = 64
GROUP_TOKENS = 4096  # tokens (of all rows) whose matrices [CHUNK, CHUNK] exist at a time


def forward(query, key, value, decay, beta, layout):
    """As api.gated_delta_rule: [B, T, heads, V], over chunks of tokens."""
    length = value.shape[1]
    index = jnp.arange(length)
    real = (index < layout.doc_end)[..., None]
    # Padding writes nothing into any state.
    decay, beta = (jnp.where(real, x.astype(jnp.float32), 0.0) for x in (decay, beta))
    out, _ = _run(query, key, value, decay, beta, jnp.broadcast_to(layout.doc_start, value.shape[:2]))
    return jnp.where(real[..., None], out, 0.0).astype(value.dtype)


def state(key, value, decay, beta, lengths):
    """As api.delta_rule_state: float32[B, heads, K, V]."""
    real = (jnp.arange(value.shape[1]) < lengths[:, None])[..., None]
    decay, beta = (jnp.where(real, x.astype(jnp.float32), 0.0) for x in (decay, beta))
    return _run(key, key, value, decay, beta, jnp.zeros(value.shape[:2], jnp.int32))[1]


def chunk(query, key, value, decay, beta, state):
    """As api.delta_rule_chunk: (out [B, T, heads, V], next state)."""
    continued = jnp.full(value.shape[:2], -1, jnp.int32)  # the document started before the first token
    out, state = _run(query, key, value, decay, beta, continued, state)
    return out.astype(value.dtype), state


def _run(query, key, value, decay, beta, doc_start, first=None):
    """float32 (out [B, T, heads, V], last state [B, heads, K, V]) over all tokens, by groups of chunks.

    decay, beta: 0 at padding.
    doc_start: int32[B, T], each token's document's first token; negative if before the first token.
    first: float32[B, heads, K, V], the state before the tokens; None: 0.
    """
    rows, length, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    count = -(-length // chunk)  # number of chunks
    groups = -(-count // max(1, GROUP_TOKENS // (chunk * rows)))
    chunks_of_group = -(-count // groups)
    padded = groups * chunks_of_group * chunk

    def grouped(array, filling="constant"):
        """[B, T, ...] -> [groups, B, chunks of a group, chunk, ...]"""
        array = jnp.pad(array, ((0, 0), (0, padded - length), *((0, 0),) * (array.ndim - 2)), mode=filling)
        return jnp.moveaxis(array.reshape(rows, groups, chunks_of_group, chunk, *array.shape[2:]), 1, 0)

    # Tokens that pad the last chunk belong to the last document, and write nothing.
    arrays = (*map(grouped, (query, key, value, decay, beta)), grouped(doc_start, "edge"))
    firsts = jnp.arange(0, padded, chunk).reshape(groups, chunks_of_group)
    precision = jax.lax.Precision.HIGHEST if value.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    run_group = jax.checkpoint(functools.partial(_group, precision), prevent_cse=groups == 1)
    shape = rows, key_heads, heads // key_heads, key_dim, value_dim
    first = jnp.zeros(shape, jnp.float32) if first is None else first.reshape(shape)
    last, out = jax.lax.scan(run_group, first, (firsts, *arrays))
    out = jnp.moveaxis(out, 0, 1).reshape(rows, padded, heads, value_dim)[:, :length]
    return out, last.reshape(rows, heads, key_dim, value_dim)


def _group(precision, state, group):
    """(state after a group's chunks, output float32[B, chunks, chunk, heads, V]); the backward recomputes it.

    state: float32[B, key_heads, value heads of a key head, K, V].
    """
    firsts, query, key, value, decay, beta, doc_start = group
    chunk, key_heads, key_dim = key.shape[2:]
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def by_head(array):
        """[B, chunks, chunk, heads, ...] -> float32[chunks, B, key_heads, heads of each, chunk, ...]"""
        array = array.astype(jnp.float32).reshape(*array.shape[:3], key_heads, -1, *array.shape[4:])
        return jnp.moveaxis(array, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))

    query = jnp.moveaxis(unit(query), (1, 0, 3, 2), (0, 1, 2, 3)) / math.sqrt(key_dim)
    key = jnp.moveaxis(unit(key), (1, 0, 3, 2), (0, 1, 2, 3))
    value, decay, beta = by_head(value), by_head(decay), by_head(beta)
    doc_start = doc_start - firsts[:, None]  # [B, chunks, chunk], counted from each chunk's first token
    positions = jnp.arange(chunk)
    below = positions[:, None] > positions
    visible = (doc_start[..., None] <= positions) & (positions[:, None] >= positions)
    visible = jnp.moveaxis(visible, 1, 0)[:, :, None, None]  # [chunks, B, 1, 1, chunk, chunk]
    inherits = jnp.moveaxis(doc_start < 0, 1, 0)[:, :, None, None]  # [chunks, B, 1, 1, chunk]
    # D is computed by sums starting at each token, as differences of sums from the chunk's first token round more.
    later = jnp.where(below, decay[..., None], 0.0)
    sums = jnp.matmul((~below.T).astype(jnp.float32), later, precision=jax.lax.Precision.HIGHEST)
    between = jnp.exp(jnp.where(visible, sums, -jnp.inf))
    total = jnp.where(visible, decay[..., None, :], 0.0).sum(-1)  # sums over the document's tokens in the chunk
    since = jnp.where(inherits, jnp.exp(total), 0.0)  # d
    alike = product("nbhid,nbhjd->nbhij", key, key)[:, :, :, None]
    attended = product("nbhid,nbhjd->nbhij", query, key)[:, :, :, None] * between
    solve = unit_lower_inverse(jnp.where(below, beta[..., None] * alike * between, 0.0), precision)
    after = between[..., -1, :]  # from each token to the chunk's last

    def run_chunk(state, inputs):
        query, key, value, beta, since, attended, solve, after = inputs
        stored = product("bhid,bhgdv->bhgiv", key, state) * since[..., None]
        error = product("bhgij,bhgjv->bhgiv", solve, beta[..., None] * (value - stored))
        out = product("bhid,bhgdv->bhgiv", query, state) * since[..., None]
        out = out + product("bhgij,bhgjv->bhgiv", attended, error)
        written = product("bhid,bhgiv->bhgdv", key, error * after[..., None])
        return state * since[..., -1, None, None] + written, out

    state, out = jax.lax.scan(run_chunk, state, (query, key, value, beta, since, attended, solve, after))
    out = jnp.moveaxis(out, (0, 1, 4, 2, 3), (1, 0, 2, 3, 4))
    return state, out.reshape(*out.shape[:3], -1, out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def unit_lower_inverse(lower: jax.Array, precision) -> jax.Array:
    """Inverse of 1 + lower, float32[..., n, n], whose derivative stores only the inverse. lower is strictly lower
    triangular, n a power of two.

    The inverses of diagonal blocks give those of blocks twice as large. This is as stable as substitution; the series
    in powers of `lower`, which needs the same products, is not, because its terms grow as binomials.
    """
    n = lower.shape[-1]
    row, column = jnp.arange(n)[:, None], jnp.arange(n)
    inverse, size = jnp.broadcast_to(jnp.eye(n, dtype=lower.dtype), lower.shape), 1
    while size < n:
        corners = (row // size == column // size + 1) & (row // size % 2 == 1)
        corner = jnp.where(corners, lower, 0.0)
        if size > 1:  # the blocks of size 1 are ones
            corner = jnp.matmul(jnp.matmul(inverse, corner, precision=precision), inverse, precision=precision)
        inverse, size = inverse - corner, 2 * size
    return inverse


def _inverse_fwd(lower, precision):
    inverse = unit_lower_inverse(lower, precision)
    return inverse, inverse


def _inverse_bwd(precision, inverse, gradient):
    """-inverse^T gradient inverse^T; the mask that made `lower` drops entries on and above the diagonal."""
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.matmul(jnp.matmul(transposed, gradient, precision=precision), transposed, precision=precision),)


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)
