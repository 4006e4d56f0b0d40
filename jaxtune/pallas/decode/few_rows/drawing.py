"""The token that each row gets by its logits, drawn or most likely, and its log-probability, by two kernels."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.pallas import compat, dispatch, one_order
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.decode.few_rows.cases import normal_array

_BLOCK = 256  # tokens whose probabilities are added up before a draw looks for the block that it falls into
_CHUNK = 4096  # tokens that a program of the first kernel reads
_LEAST = -1e30  # of a logit that a mask allows: finite also after its division by a small temperature


def block_sums(scores: jax.Array, top: jax.Array) -> jax.Array:
    """float32[B, blocks]: sums of exp(scores - top) over blocks of 256 tokens; over all blocks it is the softmax's
    normaliser.

      scores: float32[B, V]; top: float32[B], each row's largest, so that the exponential does not overflow.
    """
    padding = -scores.shape[1] % _BLOCK
    weights = jnp.exp(scores - top[:, None])
    return jnp.pad(weights, ((0, 0), (0, padding))).reshape(len(scores), -1, _BLOCK).sum(-1)


def looked_up(scores: jax.Array, likeliest: jax.Array, uniform: jax.Array) -> jax.Array:
    """int32[B]: a token of each row, drawn from softmax(scores) by inverting the cumulative sum at `uniform`.

    scores: float32[B, V], -inf for tokens that must not be drawn.
    likeliest: int32[B], tokens of the largest scores; taken where rounding would lead to one of probability 0.
    uniform: float32[B] from [0, 1).
    """
    top = jnp.take_along_axis(scores, likeliest[:, None], axis=1)[:, 0]
    cumulative = jnp.cumsum(block_sums(scores, top), axis=1)
    target = uniform[:, None] * cumulative[:, -1:]
    block = jnp.minimum((cumulative <= target).sum(1, keepdims=True), cumulative.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(cumulative, jnp.maximum(block - 1, 0), axis=1), 0.0)
    tokens = block * _BLOCK + jnp.arange(_BLOCK)
    real = tokens < scores.shape[1]
    weights = jnp.exp(jnp.take_along_axis(scores, jnp.minimum(tokens, scores.shape[1] - 1), axis=1) - top[:, None])
    weights = jnp.where(real, weights, 0.0)
    offset = jnp.minimum((before + jnp.cumsum(weights, axis=1) <= target).sum(1, keepdims=True), _BLOCK - 1)
    # Where rounding leads past the last token that has a probability, the likeliest one is taken.
    possible = jnp.take_along_axis(weights, offset, axis=1)[:, 0] > 0
    return jnp.where(possible, (block * _BLOCK + offset)[:, 0], likeliest).astype(jnp.int32)


def masked(scores: jax.Array, masks: jax.Array | np.ndarray) -> jax.Array:
    """The scores [N, V] of tokens whose bits in `masks`, uint32[N, words of 32], are 1; -inf of others."""
    bits = jnp.asarray(masks)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed = bits.reshape(len(scores), -1)[:, : scores.shape[1]] > 0
    return jnp.where(allowed, jnp.maximum(scores, _LEAST), -jnp.inf)


def chosen_token(
    logits: jax.Array,
    vocab_size: int,
    temperature: jax.Array,
    logprob_temperature: jax.Array,
    uniform: jax.Array | None,
    masks: jax.Array | np.ndarray | None = None,
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A token of each row and its log-probability: (tokens int32[N], log-probabilities, largest logits, logarithms of
    the sum of exp((logit - largest) / logprob_temperature), float32[N] each). With the kernels, a row's results have
    the same bits beside any other rows.

      logits: [N, V or more]; columns from vocab_size on are padding.
      temperature, logprob_temperature: float32[N], divide logits before the draw, and before the log-probability.
      uniform: float32[N] from 0 to 1, decides the draw; negative or None: the most likely token, the first of several.
      masks: uint32[N, words], tokens that may be chosen, by bits; log-probabilities are among all. None: all may.
      implementation: "triton", "reference", or None: the first that supports the call.
    """
    check = Arguments("chosen_token")
    check.array("logits", logits, "N width", FLOATS)
    check.number("vocab_size", vocab_size, whole=True, least=1)
    check.array("temperature", temperature, "N", ("float32",))
    check.array("logprob_temperature", logprob_temperature, "N", ("float32",))
    if uniform is not None:
        check.array("uniform", uniform, "N", ("float32",))
    if masks is not None:
        check.array("masks", masks, f"N {-(-vocab_size // 32)}", ("uint32",))

    def compare():
        rows, size = 5, 9000
        example = normal_array(0, rows, size + 8, dtype=logits.dtype)
        temperatures, numbers = jnp.asarray([1.0, 0.7, 1.0, 1.5, 0.2]), jnp.asarray([0.0, 0.3, -1.0, 0.7, 0.99])
        draws = None if uniform is None else numbers
        words = jax.random.bits(jax.random.key(1), (rows, -(-size // 32)), "uint32")
        allowed = None if masks is None else words
        kernel, exact = (
            jax.jit(lambda logits, run=run: run(logits, size, temperatures, jnp.ones(rows), draws, allowed))
            for run in (_by_kernels, reference_chosen_token)
        )
        return list(kernel(example)), list(exact(example))

    def reason():
        call = f"{logits.dtype}, {uniform is not None}" + (", masks" if masks is not None else "")
        return compat.triton_refusal() or dispatch.first_use("chosen_token", "triton", call, compare)

    table = {"triton": reason, "reference": lambda: None}
    implementation_name = dispatch.choose("chosen_token", table, implementation)
    run = _by_kernels if implementation_name == "triton" else reference_chosen_token
    token, logprob, peak, total = run(logits, vocab_size, temperature, logprob_temperature, uniform, masks)
    if one_order.is_exact():
        of_token, _ = one_order.log_probabilities(logits, token[:, None], logprob_temperature, vocab_size)
        logprob = of_token[:, 0]
    return token, logprob, peak, total


def reference_chosen_token(logits, vocab_size: int, temperature, logprob_temperature, uniform, masks=None):
    """chosen_token in plain JAX, which defines it: (tokens, log-probabilities, largest logits, log sums), [N] each.

    logits: [N, vocab_size or more]. temperature, logprob_temperature: float32[N], above 0.
    uniform: float32[N] from 0 to 1; negative or None: the most likely token.
    """
    logits = logits[:, :vocab_size].astype(jnp.float32)
    scores = logits if masks is None else masked(logits, masks)
    token = likeliest = scores.argmax(-1).astype(jnp.int32)
    if uniform is not None:
        token = looked_up(scores / temperature[:, None], likeliest, jnp.maximum(uniform, 0.0))
        token = jnp.where(uniform >= 0, token, likeliest)
    peak, token_logit = logits.max(-1), jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    total = jnp.log(block_sums(logits / logprob_temperature[:, None], peak / logprob_temperature).sum(-1))
    return token, (token_logit - peak) / logprob_temperature - total, peak, total


def _by_kernels(logits, vocab_size: int, temperature, logprob_temperature, uniform, masks=None) -> Sequence[jax.Array]:
    from jaxtune.pallas.decode.few_rows import drawing_kernels

    count, width = logits.shape
    chunks, blocks_a_chunk = -(-vocab_size // _CHUNK), _CHUNK // _BLOCK
    draws, is_masked = int(uniform is not None), int(masks is not None)
    # Pointers that are not read stand for what there is not.
    words, numbers_drawn = temperature if masks is None else masks, temperature if uniform is None else uniform
    shape = jax.ShapeDtypeStruct((count, chunks), jnp.float32)
    blocks = jax.ShapeDtypeStruct((count, chunks * blocks_a_chunk if draws else 1), jnp.float32)
    peaks = shape if is_masked else jax.ShapeDtypeStruct((count, 1), jnp.float32)
    tops, top_tokens, sums, blocks, peaks = compat.triton_graph_call(
        drawing_kernels.chunk_kernel,
        (logits, temperature, logprob_temperature, words),
        [shape, jax.ShapeDtypeStruct(shape.shape, jnp.int32), shape, blocks, peaks],
        (chunks, count),
        warps=4,
        stages=1,
        CHUNK=_CHUNK,
        STRIDE=width,
        VOCAB=vocab_size,
        CHUNKS=chunks,
        BLOCK=_BLOCK,
        DRAWS=draws,
        MASKED=is_masked,
        LEAST=_LEAST,
    )
    numbers = jax.ShapeDtypeStruct((count,), jnp.float32)
    return compat.triton_graph_call(
        drawing_kernels.token_kernel,
        (
            *(logits, temperature, logprob_temperature, numbers_drawn, words),
            *(tops, top_tokens, sums, blocks, peaks),
        ),
        [jax.ShapeDtypeStruct((count,), jnp.int32), numbers, numbers, numbers],
        (count,),
        warps=4,
        stages=1,
        CHUNKS_PADDED=1 << (chunks - 1).bit_length(),
        BLOCKS=chunks * blocks_a_chunk,
        BLOCKS_PADDED=1 << (chunks * blocks_a_chunk - 1).bit_length(),
        STRIDE=width,
        VOCAB=vocab_size,
        CHUNKS=chunks,
        BLOCK=_BLOCK,
        DRAWS=draws,
        MASKED=is_masked,
        LEAST=_LEAST,
    )
