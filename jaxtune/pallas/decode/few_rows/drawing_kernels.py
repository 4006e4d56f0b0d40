"""Triton kernels that choose a token by its logits: sums over chunks of CHUNK tokens, in blocks of BLOCK, and what a
row makes of them, without reading other rows.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _masked(numbers, masks, row, tokens, VOCAB: tl.constexpr, LEAST: tl.constexpr):
    """The logits of tokens that the row's mask allows, at least LEAST; -inf of others."""
    words = tl.load(masks + row.to(tl.int64) * ((VOCAB + 31) // 32) + tokens // 32, mask=tokens < VOCAB, other=0)
    return tl.where((words >> (tokens % 32).to(tl.uint32)) & 1 > 0, tl.maximum(numbers, LEAST), float("-inf"))


@triton.jit
def chunk_kernel(
    logits,
    temperature,
    logprob_temperature,
    masks,
    tops,
    top_tokens,
    sums,
    blocks,
    peaks,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
    MASKED: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Reads one chunk of a row's logits. Grid: (CHUNKS, rows).

    logits: [rows, STRIDE], the first VOCAB of a row being the vocabulary's.
    masks: uint32[rows, words], a bit of each token that may be chosen, if MASKED.
    tops, top_tokens: [rows, CHUNKS], the chunk's largest logit that may be chosen, and the first token that has it.
    peaks, sums: float32[rows, CHUNKS], the chunk's largest logit, written if MASKED, and the sum of
      exp((logit - peak) / logprob_temperature).
    blocks: float32[rows, CHUNKS * CHUNK / BLOCK], sums of exp((logit - top) / temperature), if DRAWS.
    temperature, logprob_temperature: float32[rows]; `temperature` is read only if DRAWS.
    CHUNKS, CHUNK, BLOCK: chunks of a row; tokens of a chunk and of a block, which divides it.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    chunk_logits = tl.load(logits + row.to(tl.int64) * STRIDE + tokens, mask=tokens < VOCAB, other=float("-inf"))
    chunk_logits = chunk_logits.to(tl.float32)
    top = tl.max(chunk_logits, 0)
    cell = row * CHUNKS + chunk
    # Instructions decide here beside memory: a division for each number would cost as much as all else.
    logprob_temp = tl.load(logprob_temperature + row)
    if MASKED:
        least = tl.where(top == float("-inf"), 0.0, top)
        tl.store(peaks + cell, top)
        tl.store(sums + cell, tl.sum(tl.exp2((chunk_logits - least) * (_LOG2E / logprob_temp)), 0))
        chunk_logits = _masked(chunk_logits, masks, row, tokens, VOCAB, LEAST)
        top = tl.max(chunk_logits, 0)
    top_token = tl.min(tl.where(chunk_logits == top, tokens, VOCAB - 1), 0)  # a token even where all numbers are NaN
    least = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + cell, top)
    tl.store(top_tokens + cell, top_token)
    weights = tl.exp2((chunk_logits - least) * (_LOG2E / logprob_temp))
    if not MASKED:
        tl.store(sums + cell, tl.sum(weights, 0))
    if DRAWS:
        count: tl.constexpr = CHUNK // BLOCK
        temp = tl.load(temperature + row)
        if temp != logprob_temp:
            weights = tl.exp2((chunk_logits - least) * (_LOG2E / temp))
        tl.store(blocks + cell * count + tl.arange(0, count), tl.sum(tl.reshape(weights, [count, BLOCK]), 1))


@triton.jit
def token_kernel(
    logits,
    temperature,
    logprob_temperature,
    uniform,
    masks,
    tops,
    top_tokens,
    sums,
    blocks,
    peaks,
    token,
    logprob,
    peak,
    total,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    DRAWS: tl.constexpr,
    MASKED: tl.constexpr,
    LEAST: tl.constexpr,
):
    """A row's token, its log-probability, the largest logit, and the logarithm of the sum of exp((logit - peak) /
    logprob_temperature). Grid: (rows,).

      uniform: float32[rows], decides the draw, if DRAWS; negative: the most likely token.
      CHUNKS_PADDED, BLOCKS_PADDED: CHUNKS and BLOCKS, all of a row, as powers of two.
      logits: [rows, STRIDE], the first VOCAB of a row being the vocabulary's.
      temperature, logprob_temperature: float32[rows].
      masks: as chunk_kernel's.
      tops, top_tokens, sums, blocks, peaks: from chunk_kernel, whose CHUNKS and BLOCK these are. BLOCKS: of a row.
      token, logprob, peak, total: the four results, [rows]: int32, float32.
    """
    row = tl.program_id(0)
    line = row.to(tl.int64) * STRIDE
    chunks = tl.arange(0, CHUNKS_PADDED)
    real = chunks < CHUNKS
    highs = tl.load(tops + row * CHUNKS + chunks, mask=real, other=float("-inf"))
    top, chunk = tl.max(highs, 0, return_indices=True)
    likeliest = tl.minimum(tl.load(top_tokens + row * CHUNKS + chunk), VOCAB - 1)
    logprob_temp = tl.load(logprob_temperature + row)
    if MASKED:
        highs = tl.load(peaks + row * CHUNKS + chunks, mask=real, other=float("-inf"))
    peak_of_row = tl.max(highs, 0)
    total_weight = tl.sum(
        tl.load(sums + row * CHUNKS + chunks, mask=real, other=0.0) * tl.exp((highs - peak_of_row) / logprob_temp), 0
    )
    next_token = likeliest
    if DRAWS:
        target = tl.load(uniform + row)
        if target >= 0.0:
            temp = tl.load(temperature + row)
            numbers = tl.arange(0, BLOCKS_PADDED)
            exists = numbers < BLOCKS
            high = tl.load(tops + row * CHUNKS + numbers // (BLOCKS // CHUNKS), mask=exists, other=float("-inf"))
            block_weights = tl.load(blocks + row * BLOCKS + numbers, mask=exists, other=0.0) * tl.exp(
                (high - top) / temp
            )
            cumulative = tl.cumsum(block_weights, 0)
            target = target * tl.max(cumulative, 0)
            block = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), BLOCKS - 1)
            before = tl.sum(tl.where(numbers == block - 1, cumulative, 0.0), 0)
            tokens = block * BLOCK + tl.arange(0, BLOCK)
            block_logits = tl.load(logits + line + tokens, mask=tokens < VOCAB, other=float("-inf")).to(tl.float32)
            if MASKED:
                block_logits = _masked(block_logits, masks, row, tokens, VOCAB, LEAST)
            weights = tl.exp((block_logits - top) / temp)
            offset = tl.sum((before + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
            offset = tl.minimum(offset, BLOCK - 1)
            # Where rounding leads past the last token that has a probability, the likeliest one is taken.
            possible = tl.sum(tl.where(tl.arange(0, BLOCK) == offset, weights, 0.0), 0) > 0.0
            next_token = tl.where(possible, block * BLOCK + offset, likeliest)
    tl.store(token + row, next_token)
    logit = tl.load(logits + line + next_token).to(tl.float32)
    tl.store(logprob + row, (logit - peak_of_row) / logprob_temp - tl.log(total_weight))
    tl.store(peak + row, peak_of_row)
    tl.store(total + row, tl.log(total_weight))
