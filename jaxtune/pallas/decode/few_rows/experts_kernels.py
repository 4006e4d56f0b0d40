"""Product of few tokens with the matrices of their experts."""

import triton
import triton.language as tl

from jaxtune.pallas.gated.kernels import share_of


@triton.jit
def expert_kernel(
    x,
    weight,
    choice,
    factors,
    a,
    b,
    out,
    COUNT: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    SLOTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    RANK: tl.constexpr,
    A_RANK: tl.constexpr,
    READ_RANK: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Products of tokens with the matrices of the experts that they chose. Grid: (SIZE / ROWS, EXPERTS + 1).

    A program of expert e finds the tokens that chose e and multiplies ROWS rows of its matrix by them, without a read
    if there are none. The programs behind the last expert write zeros for choices that are no expert. A token is one
    column of the tensor cores' product, so its bits depend on no other token.

      x, weight, out: ACTIVATION 0: [COUNT * CHOICES, INNER], [EXPERTS, SIZE, INNER], [CHOICES, COUNT, SIZE], float32
        or rounded. 1 (silu) or 2 (gelu_tanh): [COUNT, INNER], [EXPERTS, 2 * SIZE, INNER] (gate before up), [COUNT *
        CHOICES, SIZE] = activation(gate) * up * factor, gate and up rounded to x's dtype, the rest float32.
      choice: int32[COUNT, CHOICES], a token's experts, all different; numbers outside of 0 to EXPERTS - 1 are none.
      factors: float32[COUNT, CHOICES]; not read if ACTIVATION is 0.
      a, b: [EXPERTS, A_RANK, INNER], [EXPERTS, SIZE or 2 * SIZE, A_RANK] in x's dtype, for W + SCALE B A in place of
        each matrix W; A x, and then SCALE A x, is rounded to x's dtype. None if RANK is 0.
      TOKENS, PLACES: COUNT and CHOICES as powers of two, TOKENS at least 16.
      SLOTS: tokens multiplied at once; the matrix is read again for each further SLOTS.
      READ_RANK: A's rows and B's columns that are read; others are 0.
      RANK: 0 or 64, the rows that a warp group multiplies; those from READ_RANK on are 0.
      DEPTH, STAGES: columns that are multiplied in a step, and steps in flight.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    begin, expert = tl.program_id(0) * ROWS, tl.program_id(1)
    rows = begin + tl.arange(0, ROWS)
    tokens, choice_index = tl.arange(0, TOKENS), tl.arange(0, PLACES)
    if expert == EXPERTS:
        for index in range(CHOICES):
            experts_at_index = tl.load(choice + tokens * CHOICES + index, mask=tokens < COUNT, other=0)
            none = (experts_at_index < 0) | (experts_at_index >= EXPERTS)
            empty = tokens * CHOICES + index if ACTIVATION else index * COUNT + tokens
            zeros = tl.zeros([TOKENS, ROWS], out.dtype.element_ty)
            tl.store(out + empty[:, None] * SIZE + rows[None, :], zeros, mask=none[:, None])
    else:
        # The pair of token and choice of each token that chose this expert, and its number among them.
        real = (tokens < COUNT)[:, None] & (choice_index < CHOICES)[None, :]
        experts_of_tokens = tl.load(choice + tokens[:, None] * CHOICES + choice_index[None, :], mask=real, other=-1)
        choice_of_token = tl.max(tl.where(experts_of_tokens == expert, choice_index[None, :], -1), axis=1)
        member = (choice_of_token >= 0).to(tl.int32)
        count, number = tl.sum(member), tl.cumsum(member) - 1
        SIDES: tl.constexpr = 2 if ACTIVATION else 1
        expert64 = expert.to(tl.int64)
        matrix = weight + expert64 * (SIDES * SIZE * INNER)
        if RANK > 0:
            ranks = tl.arange(0, RANK)
            thin_lines = a + expert64 * (A_RANK * INNER) + ranks[:, None] * INNER
            b_pointers = b + expert64 * (SIDES * SIZE * A_RANK) + rows[:, None] * A_RANK + ranks[None, :]
            exists = ranks < READ_RANK
        for first in range(0, count, SLOTS):
            slots = first + tl.arange(0, SLOTS)
            in_slot = (member > 0)[:, None] & (number[:, None] == slots[None, :])
            pairs = tl.sum(tl.where(in_slot, (tokens * CHOICES + choice_of_token)[:, None], 0), axis=0)
            occupied = slots < count
            lines = pairs // CHOICES if ACTIVATION else pairs
            total = tl.zeros([ROWS, SLOTS], tl.float32)
            up = tl.zeros([ROWS, SLOTS], tl.float32)
            if RANK > 0:
                inner = tl.zeros([RANK, SLOTS], tl.float32)
            for step in tl.range(0, INNER // DEPTH, num_stages=STAGES):
                columns = step * DEPTH + tl.arange(0, DEPTH)
                token_block = tl.load(x + lines[None, :] * INNER + columns[:, None], mask=occupied[None, :], other=0.0)
                tile = matrix + rows[:, None] * INNER + columns[None, :]
                total = tl.dot(tl.load(tile, eviction_policy="evict_first"), token_block, total)
                if ACTIVATION:
                    up = tl.dot(tl.load(tile + SIZE * INNER, eviction_policy="evict_first"), token_block, up)
                if RANK > 0:
                    thin = tl.load(thin_lines + columns[None, :], mask=exists[:, None], other=0.0)
                    inner = tl.dot(thin, token_block, inner)
            if RANK > 0:
                scaled = (inner.to(DTYPE).to(tl.float32) * SCALE).to(DTYPE)
                total = tl.dot(tl.load(b_pointers, mask=exists[None, :], other=0.0), scaled, total)
                if ACTIVATION:
                    up_b = tl.load(b_pointers + SIZE * A_RANK, mask=exists[None, :], other=0.0)
                    up = tl.dot(up_b, scaled, up)
            line = pairs % CHOICES * COUNT + pairs // CHOICES
            if ACTIVATION:
                line = pairs
                gate = total.to(DTYPE).to(tl.float32)
                share, _ = share_of(gate, ACTIVATION - 1, 1.0, 1)  # as kernels of many rows round it
                factor = tl.load(factors + pairs, mask=occupied, other=0.0)
                total = gate * share * up.to(DTYPE).to(tl.float32) * factor[None, :]
            result = tl.trans(total).to(out.dtype.element_ty)
            tl.store(out + line[:, None] * SIZE + rows[None, :], result, mask=occupied[:, None])
