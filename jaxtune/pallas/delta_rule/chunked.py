"""The gated delta rule in plain jnp by chunks of tokens, with matrix products and few sequential steps: over packed
rows (`forward`), over the next tokens of rows that began before (`chunk`), and only the state after a prompt (`state`).

Within a chunk the errors e that tokens write into the state depend on each other through a unit lower triangular matrix
(the WY form of arXiv 2406.06484, with decays as in arXiv 2412.06464; `unit_lower_inverse` inverts it). With the chunk's
first state S, unit keys k, and unit queries q divided by sqrt(key_dim),

    (1 + A) e = beta (v - d k S),   A[i, j] = beta_i (k_i . k_j) D[i, j] below the diagonal
    out = d q S + P e,              P[i, j] = (q_i . k_j) D[i, j] on and below it
    S <- d_last S + sum_j D[last, j] k_j e_j^T

where D[i, j] is the decay from token j to token i, 0 if they are of different documents, and d[i] the decay from the
chunk's first state, 0 if the document of i starts within the chunk. Borders are therefore exact wherever they are.

Chunks are processed in groups. For a group, A, P and the inverse of 1 + A are computed for all chunks at once, and then
the state runs through the chunks. The backward recomputes all this from the group's first state, so one state per group
is stored for each row.
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
    """Returns the output [B, T, heads, V] of the gated delta rule over packed documents, computed by chunks of tokens,
    in value's dtype; padding gives 0, whatever finite numbers stand there. It is differentiable. gated_delta_rule calls
    this as its implementation "chunked".

    query and key are [B, T, key_heads, K], value [B, T, heads, V], decay (the logarithm of the factor on the state) and
    beta (the share of what is stored at a key that is replaced) float32[B, T, heads]; layout: the document bounds.
    Queries and keys are normalised here, and the output is divided by sqrt(K).
    """
    length = value.shape[1]
    index = jnp.arange(length)
    real = (index < layout.doc_end)[..., None]
    # Padding writes nothing into any state.
    decay, beta = (jnp.where(real, x.astype(jnp.float32), 0.0) for x in (decay, beta))
    out, _ = _run(query, key, value, decay, beta, jnp.broadcast_to(layout.doc_start, value.shape[:2]))
    return jnp.where(real[..., None], out, 0.0).astype(value.dtype)


def state(key, value, decay, beta, lengths):
    """Returns the state after the first `lengths` (int32[B]) tokens of each row, which is one document: float32[B,
    heads, K, V]. Generation continues from it: delta_rule_state calls this. Tokens from `lengths` on are ignored; a row
    of length 0 gives 0.

    key is [B, T, key_heads, K], normalised here, value [B, T, heads, V], decay (the logarithm of the factor on the
    state) and beta (the share of what is stored at a key that is replaced) float32[B, T, heads].
    """
    real = (jnp.arange(value.shape[1]) < lengths[:, None])[..., None]
    decay, beta = (jnp.where(real, x.astype(jnp.float32), 0.0) for x in (decay, beta))
    return _run(key, key, value, decay, beta, jnp.zeros(value.shape[:2], jnp.int32))[1]


def chunk(query, key, value, decay, beta, state):
    """Returns (out [B, T, heads, V], the next state) for the next T tokens of each row, which continue the document of
    `state` (0 at its start): a prompt that is prefilled chunk by chunk, for delta_rule_chunk. out has value's dtype,
    and the next state is as `state`.

    query and key are [B, T, key_heads, K], value [B, T, heads, V], decay (the logarithm of the factor on the state) and
    beta (the share of what is stored at a key that is replaced) float32[B, T, heads]; state, before the tokens, is
    float32[B, heads, K, V]. Queries and keys are normalised here, and the output is divided by sqrt(K).
    """
    continued = jnp.full(value.shape[:2], -1, jnp.int32)  # the document started before the first token
    out, state = _run(query, key, value, decay, beta, continued, state)
    return out.astype(value.dtype), state


def _run(query, key, value, decay, beta, doc_start, first=None):
    """Returns float32 (out [B, T, heads, V], the last state [B, heads, K, V]) of the rule over all tokens, by groups of
    chunks. Products have full precision for float32 values, and the device's default for others. out at padding has no
    meaning.

    Args:
      query, key: [B, T, key_heads, K], not normalised yet.
      value: [B, T, heads, V].
      decay: float32[B, T, heads], the logarithm of the factor on the state; 0 at padding.
      beta: float32[B, T, heads], the share of the state's value at the key that is replaced; 0 at padding.
      doc_start: int32[B, T], the first token of each token's document; negative if it started before the first token.
      first: float32[B, heads, K, V], the state before the tokens; None: 0.
    """
    rows, length, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    count = -(-length // chunk)  # number of chunks
    groups = -(-count // max(1, GROUP_TOKENS // (chunk * rows)))
    each = -(-count // groups)
    padded = groups * each * chunk

    def cut(array, filling="constant"):
        """[B, T, ...] -> [groups, B, chunks of a group, chunk, ...]"""
        array = jnp.pad(array, ((0, 0), (0, padded - length), *((0, 0),) * (array.ndim - 2)), mode=filling)
        return jnp.moveaxis(array.reshape(rows, groups, each, chunk, *array.shape[2:]), 1, 0)

    # Tokens that pad the last chunk belong to the last document, and write nothing.
    arrays = (*map(cut, (query, key, value, decay, beta)), cut(doc_start, "edge"))
    firsts = jnp.arange(0, padded, chunk).reshape(groups, each)
    precision = jax.lax.Precision.HIGHEST if value.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    one = jax.checkpoint(functools.partial(_group, precision), prevent_cse=groups == 1)
    shape = rows, key_heads, heads // key_heads, key_dim, value_dim
    first = jnp.zeros(shape, jnp.float32) if first is None else first.reshape(shape)
    last, out = jax.lax.scan(one, first, (firsts, *arrays))
    out = jnp.moveaxis(out, 0, 1).reshape(rows, padded, heads, value_dim)[:, :length]
    return out, last.reshape(rows, heads, key_dim, value_dim)


def _group(precision, state, group):
    """The rule over the chunks of one group, the body of `_run`'s scan over groups: returns (the state after the group,
    the group's output, float32[B, chunks, chunk, heads, V]). JAX recomputes it in the backward, so that only one state
    per group is stored.

    Args:
      precision: the precision of matrix products (jax.lax.Precision).
      state: float32[B, key_heads, value heads of a key head, K, V], before the group.
      group: a tuple: int32[chunks], the index in the row of the first token of each chunk; then query, key, value,
        decay, beta and doc_start of `_run`, each [B, chunks, chunk, ...], cut into chunks of `chunk` tokens.
    """
    firsts, query, key, value, decay, beta, doc_start = group
    chunk, key_heads, key_dim = key.shape[2:]
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def by_head(array):
        """[B, chunks, chunk, heads, ...] -> float32 [chunks, B, key_heads, heads of each, chunk, ...]"""
        array = array.astype(jnp.float32).reshape(*array.shape[:3], key_heads, -1, *array.shape[4:])
        return jnp.moveaxis(array, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))

    query = jnp.moveaxis(unit(query), (1, 0, 3, 2), (0, 1, 2, 3)) / math.sqrt(key_dim)
    key = jnp.moveaxis(unit(key), (1, 0, 3, 2), (0, 1, 2, 3))
    value, decay, beta = by_head(value), by_head(decay), by_head(beta)
    doc_start = doc_start - firsts[:, None]  # [B, chunks, chunk], counted from each chunk's first token
    places = jnp.arange(chunk)
    below = places[:, None] > places
    same = (doc_start[..., None] <= places) & (places[:, None] >= places)
    same = jnp.moveaxis(same, 1, 0)[:, :, None, None]  # [chunks, B, 1, 1, chunk, chunk]
    inherits = jnp.moveaxis(doc_start < 0, 1, 0)[:, :, None, None]  # [chunks, B, 1, 1, chunk]
    # D is computed by sums starting at each token, as differences of sums from the chunk's first token round more.
    later = jnp.where(below, decay[..., None], 0.0)
    sums = jnp.matmul((~below.T).astype(jnp.float32), later, precision=jax.lax.Precision.HIGHEST)
    between = jnp.exp(jnp.where(same, sums, -jnp.inf))
    total = jnp.where(same, decay[..., None, :], 0.0).sum(-1)  # sums over the document's tokens in the chunk
    since = jnp.where(inherits, jnp.exp(total), 0.0)  # d
    alike = product("nbhid,nbhjd->nbhij", key, key)[:, :, :, None]
    attended = product("nbhid,nbhjd->nbhij", query, key)[:, :, :, None] * between
    solve = unit_lower_inverse(jnp.where(below, beta[..., None] * alike * between, 0.0), precision)
    after = between[..., -1, :]  # from each token to the chunk's last

    def one(state, inputs):
        query, key, value, beta, since, attended, solve, after = inputs
        stored = product("bhid,bhgdv->bhgiv", key, state) * since[..., None]
        error = product("bhgij,bhgjv->bhgiv", solve, beta[..., None] * (value - stored))
        out = product("bhid,bhgdv->bhgiv", query, state) * since[..., None]
        out = out + product("bhgij,bhgjv->bhgiv", attended, error)
        written = product("bhid,bhgiv->bhgdv", key, error * after[..., None])
        return state * since[..., -1, None, None] + written, out

    state, out = jax.lax.scan(one, state, (query, key, value, beta, since, attended, solve, after))
    out = jnp.moveaxis(out, (0, 1, 4, 2, 3), (1, 0, 2, 3, 4))
    return state, out.reshape(*out.shape[:3], -1, out.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def unit_lower_inverse(lower: jax.Array, precision) -> jax.Array:
    """Returns the inverse of the matrix 1 + lower, float32[..., n, n], with which `_group` finds what all tokens of a
    chunk write at once. Its derivative stores only the inverse.

    The inverses of diagonal blocks give those of blocks twice as large, by matrix products. This is as stable as
    substitution. The series in powers of `lower`, which needs the same products, is not, because its terms grow as
    binomials.

    Args:
      lower: float32[..., n, n], strictly lower triangular (zeros on and above the diagonal); n is a power of two.
      precision: the precision of matrix products (jax.lax.Precision).
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
    """The forward rule of `unit_lower_inverse` for jax.custom_vjp: returns (the inverse of 1 + lower, the residual for
    the backward rule). The residual is that same inverse, because the gradient needs nothing else, and no step of the
    inversion has to be kept.

    lower: float32[..., n, n], strictly lower triangular (zeros on and above the diagonal). precision: the precision of
    matrix products.
    """
    inverse = unit_lower_inverse(lower, precision)
    return inverse, inverse


def _inverse_bwd(precision, inverse, gradient):
    """The backward rule of `unit_lower_inverse` for jax.custom_vjp: returns (dlower,), where dlower = -inverse^T
    gradient inverse^T. Its entries on and above the diagonal are not set to zero: `_group` made `lower` with a mask,
    the derivative of which drops them.

    precision: the precision of matrix products. inverse: the inverse of 1 + lower, the residual of the forward rule.
    gradient: the gradient of that inverse. All arrays are float32[..., n, n].
    """
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-jnp.matmul(jnp.matmul(turned, gradient, precision=precision), turned, precision=precision),)


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)
