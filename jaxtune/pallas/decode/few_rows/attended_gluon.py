"""Kernel of `attended` for many rows of head dim 128, in Gluon; one warp computes one key/value head of one row.

Caches in e4m3 are multiplied in float16, which one instruction makes of two codes. Which 16 columns the tensor cores
multiply together is free, so no code changes its lane: a query's numbers are read, and the result's written, in the
order of `_query_column` and `_value_column`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from jaxtune.pallas.decode.few_rows.attended_kernels import _in_log2
from jaxtune.pallas.decode.few_rows.triton_kernels import _loaded, _normed_and_rotated, _sum

# What later versions of Triton call async_load has another name in 3.6.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_MASKED = gl.constexpr(-1e30)
# How far, in log2, scores may exceed the subtracted maximum before it is raised: weights are up to 2**8 then, which
# float16 holds. _LAZY is this number's float32 as an integer: positive floats compare as their bits do.
_LAZY = gl.constexpr(0x41000000)
# The accumulator of a product of 16 rows and 8 columns: thread 4 g + t has rows g and g + 8 of columns 2 t and 2 t + 1.
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _SUMS, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _SUMS, 2))
_RING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # 8 rows of 16 bytes lie in different banks
_WORD_RING = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))  # the same of words
# Inline PTX: the four codes of $2 to four float16, $0 and $1.
_FOUR_PTX = gl.constexpr(
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
# Each code of $4 beside that of $5, to two float16 each: $0 to $3.
_PAIRS_PTX = gl.constexpr(
    "{ .reg .b16 a, b, c, d; .reg .b32 x, y; prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; "
    "mov.b32 {a, b}, x; mov.b32 {c, d}, y; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; "
    "cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }"
)


@gluon.constexpr_function
def _key_words(keys):
    """[keys, 8, 4] words as a left operand: lane 4 g + t has word t of each four, of keys g and g + 8 of each 16."""
    return gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0]] + [[8 << i, 0, 0] for i in range((keys // 8).bit_length() - 1)],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [],
        [],
        [keys, 8, 4],
    )


@gluon.constexpr_function
def _value_words(keys):
    """[keys / 16, 2, 4, 2, 4, 8] words: lane 4 g + t has word g of each eight, of keys 2 t, 2 t + 1, 2 t + 8 and
    2 t + 9 of each 16.
    """
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0, 1, 0, 0, 0, 0]]
        + [[1 << i, 0, 0, 0, 0, 0] for i in range((keys // 16).bit_length() - 1)],
        [[0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 4]],
        [],
        [],
        [keys // 16, 2, 4, 2, 4, 8],
    )


@gluon.jit
def _query_column(index, FP8: gl.constexpr):
    """The column of a head that a query's number `index` is multiplied as: of 16, four that follow each other are those
    of a lane."""
    if FP8:
        return index // 16 * 16 + index % 8 // 2 * 4 + index % 16 // 8 * 2 + index % 2
    else:
        return index


@gluon.jit
def _value_column(index, FP8: gl.constexpr):
    """The column of a head that row `index` of the product with values is."""
    if FP8:
        return index // 64 * 64 + index % 16 // 8 * 32 + index % 8 * 4 + index // 16 % 4
    else:
        return index


@gluon.jit
def _halves(word):
    """The two float16 of a word."""
    return word.to(gl.int16).to(gl.float16, bitcast=True), (word >> 16).to(gl.int16).to(gl.float16, bitcast=True)


@gluon.jit
def _keys_of(keys, STEP: gl.constexpr, FP8: gl.constexpr):
    """The left operand [STEP, 128] of keys in shared memory, [STEP, 128] or [STEP, 32] words."""
    if FP8:
        words = keys.reshape([STEP, 8, 4]).load(_key_words(STEP))
        pair, second_pair = gl.inline_asm_elementwise(
            _FOUR_PTX, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        a, b = _halves(pair)
        c, d = _halves(second_pair)
        tile = gl.join(gl.join(a, b), gl.join(c, d)).permute([0, 1, 4, 2, 3]).reshape([STEP, 128])
        return gl.convert_layout(tile, _LEFT, assert_trivial=True)
    else:
        return keys.load(_LEFT)


@gluon.jit
def _values_of(values, STEP: gl.constexpr, FP8: gl.constexpr):
    """The left operand [128, STEP] of values in shared memory, [STEP, 128] or [STEP, 32] words."""
    if FP8:
        words = values.reshape([STEP // 16, 2, 4, 2, 4, 8]).load(_value_words(STEP))
        even, odd = gl.split(words.permute([0, 1, 2, 4, 5, 3]))
        first, second, third, fourth = gl.inline_asm_elementwise(
            _PAIRS_PTX,
            "=r,=r,=r,=r,r,r",
            [even, odd],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        a, b = _halves(first)
        c, d = _halves(second)
        low = gl.join(gl.join(a, b), gl.join(c, d))
        a, b = _halves(third)
        c, d = _halves(fourth)
        tile = gl.join(low, gl.join(gl.join(a, b), gl.join(c, d)))
        tile = tile.reshape([STEP // 16, 2, 4, 2, 2, 8, 2, 2, 2]).permute([3, 8, 7, 4, 5, 0, 1, 2, 6])
        return gl.convert_layout(tile.reshape([128, STEP]), _LEFT, assert_trivial=True)
    else:
        return values.permute([1, 0]).load(_LEFT)


@gluon.jit
def _transposed(x, ROWS: gl.constexpr):
    """16-bit x [ROWS, 8] from an accumulator's layout (_SUMS) to a right operand's (_RIGHT)."""
    x = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
    )
    x = x.reshape([ROWS // 8, 8, 8]).permute([0, 2, 1]).reshape([ROWS, 8])
    return gl.convert_layout(x, _RIGHT, assert_trivial=True)


@gluon.jit
def _tile_places(STEP: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Indices i, j, column of a tile's numbers, or words, as [STEP / ROWS, ROWS, COLUMNS]; a number is in row ROWS i +
    j.
    """
    SHARDS: gl.constexpr = gl.BlockedLayout(
        [STEP // ROWS, 1, COLUMNS * ROWS // 32], [1, ROWS, 32 // ROWS], [1, 1, 1], [2, 1, 0]
    )
    i = gl.arange(0, STEP // ROWS, gl.SliceLayout(1, gl.SliceLayout(2, SHARDS)))[:, None, None]
    j = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SHARDS)))[None, :, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, SHARDS)))[None, None, :]
    return i, j, column


@gluon.jit
def _copied(
    key_lines,
    value_lines,
    key_ring,
    value_ring,
    slot,
    begin,
    end,
    STEP: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    MASKS: gl.constexpr,
):
    """Starts to copy a tile of STEP keys and values into shared memory, without a wait.

    key_lines, value_lines: pointers [1, ROWS, COLUMNS] to the head's first keys and values.
    key_ring, value_ring: [STAGES, STEP, COLUMNS]; begin: index in the cache of the tile's first key.
    end: with MASKS, keys that have been written; the tile has zeros from there on.
    """
    VECTOR: gl.constexpr = COLUMNS * ROWS // 32
    i, j, column = _tile_places(STEP, ROWS, COLUMNS)
    # The offset of i is constant in each register, and becomes a part of the instruction.
    keys = (key_lines + begin * COLUMNS + i * (ROWS * COLUMNS)).reshape([STEP, COLUMNS])
    values = (value_lines + begin * COLUMNS + i * (ROWS * COLUMNS)).reshape([STEP, COLUMNS])
    keys = gl.max_contiguous(gl.multiple_of(keys, [16, 16]), [1, VECTOR])
    values = gl.max_contiguous(gl.multiple_of(values, [16, 16]), [1, VECTOR])
    if MASKS:
        written = (begin + ROWS * i + j + 0 * column < end).reshape([STEP, COLUMNS])
        written = gl.max_constancy(written, [1, VECTOR])
        _copy(key_ring.index(slot), keys, mask=written)
        _copy(value_ring.index(slot), values, mask=written)
    else:
        _copy(key_ring.index(slot), keys)
        _copy(value_ring.index(slot), values)


@gluon.jit
def _seen(
    keys,
    values,
    query,
    top,
    total,
    acc,
    begin,
    newest,
    visible_tokens,
    SCALE: gl.constexpr,
    CAP: gl.constexpr,
    CAPACITY: gl.constexpr,
    STEP: gl.constexpr,
    FP8: gl.constexpr,
    MASKS: gl.constexpr,
):
    """Adds a tile of keys and values to the attention; returns top, total, acc.

    keys, values: [STEP, 128] in shared memory, or with FP8 [STEP, 32] words; query: [128, 8], a right operand.
    top: float32[8], about the largest score so far in log2, subtracted from all.
    total: float32[STEP, 8], sums of weights, not yet added over the first axis; acc: float32[128, 8].
    begin, newest: indices in the cache of the first key and of the new token, which sees `visible_tokens`.
    MASKS: 0: all keys are visible.
    """
    scores = mma_v2(_keys_of(keys, STEP, FP8), query, gl.full([STEP, 8], 0.0, gl.float32, _SUMS))
    if CAP > 0.0:
        scores = _in_log2(scores, SCALE, CAP)
    else:
        scores = scores * (SCALE * 1.4426950408889634)
    if MASKS:
        age = newest - begin - gl.arange(0, STEP, gl.SliceLayout(1, _SUMS))
        age = gl.where(age < 0, age + CAPACITY, age)
        scores = gl.where((age < visible_tokens)[:, None], scores, _MASKED)
    above = scores - top[None, :]
    # The largest number of all threads is found by one instruction if they are integers.
    if gl.max(above.to(gl.int32, bitcast=True).reshape([STEP * 8]), 0) > _LAZY:
        new_top = gl.maximum(top, gl.max(scores, 0))
        fade = gl.exp2(top - new_top)[None, :]
        total, acc, top = total * fade, acc * fade, new_top
        above = scores - top[None, :]
    weights = gl.exp2(above)
    if MASKS:  # a head without visible keys so far has _MASKED as its maximum
        weights = gl.where((age < visible_tokens)[:, None], weights, 0.0)
    total += weights
    weights = _transposed(weights.to(query.dtype), STEP)
    return top, total, mma_v2(_values_of(values, STEP, FP8), weights, acc)


@gluon.jit
def _in_float16(numbers):
    """Limited to the largest number; NaN stays."""
    numbers = numbers.to(gl.float32)
    limited = gl.maximum(gl.minimum(numbers, 65504.0), -65504.0)
    return gl.where(numbers == numbers, limited, numbers).to(gl.float16)


@gluon.jit
def _own_parts(
    partial_sums,
    q_weight,
    k_weight,
    rotations,
    keys,
    values,
    row,
    head,
    newest,
    COUNT: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SPLITS: gl.constexpr,
    NORMS: gl.constexpr,
    ROTATES: gl.constexpr,
    EPS: gl.constexpr,
    OFFSET: gl.constexpr,
    FLOAT32: gl.constexpr,
    DTYPE: gl.constexpr,
    FP8: gl.constexpr,
    SHARDS: gl.constexpr,
):
    """Norms and rotates the new token's heads of one key/value head of one row, writes its key and value into the
    caches at `newest`, and returns the queries as a right operand [128, 8] in DTYPE, with FP8 in float16.
    """
    STORED: gl.constexpr = keys.dtype.element_ty
    ALL: gl.constexpr = HEADS + 2 * KV_HEADS
    OWN: gl.constexpr = HEADS // KV_HEADS
    stride: gl.constexpr = COUNT * ALL * 128
    half = gl.arange(0, 64, gl.BlockedLayout([2], [32], [1], [0]))
    column = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
    q_half = gl.arange(0, 64, gl.SliceLayout(1, _RIGHT))[:, None]
    member = gl.arange(0, 8, gl.SliceLayout(0, _RIGHT))[None, :]
    real = (member < OWN) & (q_half < 64)
    q_half = _query_column(q_half, FP8)
    KV_OF_SHARD: gl.constexpr = KV_HEADS // SHARDS
    before, kv_head = row * ALL, head
    if SHARDS > 1:
        shard = head // KV_OF_SHARD
        before, kv_head = (shard * COUNT + row) * (ALL // SHARDS), head - shard * KV_OF_SHARD
    offsets = (before + kv_head * OWN + member) * 128 + q_half
    key_offset = (before + HEADS // SHARDS + kv_head) * 128

    # All is read before anything that threads exchange, as a program waits for memory only once then.
    k_rotation = _loaded(rotations, rotations + 64, row * 128 + half, ROTATES)
    q_rotation = _loaded(rotations, rotations + 64, row * 128 + q_half, ROTATES)
    k_norm = _loaded(k_weight, k_weight + 64, half, NORMS)
    q_norm = _loaded(q_weight, q_weight + 64, q_half, NORMS)
    k_low = _sum(partial_sums, key_offset + half, half < 64, stride, SPLITS, DTYPE)
    k_high = _sum(partial_sums, key_offset + 64 + half, half < 64, stride, SPLITS, DTYPE)
    value = _sum(partial_sums, key_offset + KV_OF_SHARD * 128 + column, column < 128, stride, SPLITS, DTYPE)
    q_low = _sum(partial_sums, offsets, real, stride, SPLITS, DTYPE)
    q_high = _sum(partial_sums, offsets + 64, real, stride, SPLITS, DTYPE)

    inverse = gl.rsqrt((gl.sum(k_low * k_low, 0) + gl.sum(k_high * k_high, 0)) / 128 + EPS)
    k_low, k_high = _normed_and_rotated(
        k_low, k_high, inverse, k_norm, k_rotation, NORMS, ROTATES, OFFSET, FLOAT32, DTYPE
    )
    cache_offset = ((row * KV_HEADS + head).to(gl.int64) * CAPACITY + newest) * 128
    gl.store(keys + cache_offset + half, k_low.to(DTYPE).to(STORED))
    gl.store(keys + cache_offset + 64 + half, k_high.to(DTYPE).to(STORED))
    gl.store(values + cache_offset + column, value.to(DTYPE).to(STORED))
    inverse = gl.rsqrt((gl.sum(q_low * q_low, 0) + gl.sum(q_high * q_high, 0)) / 128 + EPS)[None, :]
    q_low, q_high = _normed_and_rotated(
        q_low, q_high, inverse, q_norm, q_rotation, NORMS, ROTATES, OFFSET, FLOAT32, DTYPE
    )
    q_low, q_high = q_low.to(DTYPE), q_high.to(DTYPE)
    if FP8:
        q_low, q_high = _in_float16(q_low), _in_float16(q_high)
    query = gl.join(q_low, q_high).permute([2, 0, 1]).reshape([128, 8])
    return gl.convert_layout(query, _RIGHT, assert_trivial=True)


@gluon.jit
def many_kernel(
    partial_sums,
    q_weight,
    k_weight,
    rotations,
    positions,
    sinks,
    input_keys,
    input_values,
    out,
    keys,
    values,
    COUNT: gl.constexpr,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SPLITS: gl.constexpr,
    NORMS: gl.constexpr,
    ROTATES: gl.constexpr,
    EPS: gl.constexpr,
    OFFSET: gl.constexpr,
    FLOAT32: gl.constexpr,
    WINDOW: gl.constexpr,
    SCALE: gl.constexpr,
    CAP: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    SHARDS: gl.constexpr,
):
    """attended_kernel for head dim 128 and at most 8 query heads a key/value head, a warp a program. Grid: (KV_HEADS,
    COUNT).

    Keys and values are the left operands, queries and weights the right ones: a tensor core multiplies at least 16 rows
    on the left, but 8 columns on the right. The last tile has the new token, and alone needs masks, unless there is a
    window.

      STEP, STAGES: keys of a tile, and tiles in shared memory, of which one is multiplied. Others: of attended_kernel.
    """
    DTYPE: gl.constexpr = out.dtype.element_ty
    OWN: gl.constexpr = HEADS // KV_HEADS
    head, row = gl.program_id(0), gl.program_id(1)
    position = gl.load(positions + row)
    FP8: gl.constexpr = keys.dtype.element_ty == gl.float8e4nv
    KIND: gl.constexpr = gl.int32 if FP8 else DTYPE
    COLUMNS: gl.constexpr = 32 if FP8 else 128
    ROWS: gl.constexpr = 4 if FP8 else 2
    LINES: gl.constexpr = _WORD_RING if FP8 else _RING
    key_ring = gl.allocate_shared_memory(KIND, [STAGES, STEP, COLUMNS], LINES)
    value_ring = gl.allocate_shared_memory(KIND, [STAGES, STEP, COLUMNS], LINES)
    half = _value_column(gl.arange(0, 128, gl.SliceLayout(1, _RIGHT)), FP8)[:, None]
    member = gl.arange(0, 8, gl.SliceLayout(0, _RIGHT))[None, :]
    result = out + (row * HEADS + head * OWN + member) * 128 + half
    if position < 0:
        gl.store(result, gl.full([128, 8], 0.0, DTYPE, _RIGHT), mask=member < OWN)
    else:
        newest = position % CAPACITY
        length = position + 1
        visible_tokens = gl.minimum(length, WINDOW) if WINDOW > 0 else length
        end = gl.minimum(length, CAPACITY)
        # A row that fits the cache has its keys in order. In a longer one every key of the ring may be visible; the
        # oldest ones come first, and those in the tile of the new token last.
        last = newest // STEP * STEP
        first = (length - visible_tokens) // STEP * STEP
        before = (last - first) // STEP
        if length > CAPACITY:
            first = gl.where(last + STEP == CAPACITY, 0, last + STEP)
            before = CAPACITY // STEP - 1

        _, j, column = _tile_places(STEP, ROWS, COLUMNS)
        cache = (row * KV_HEADS + head).to(gl.int64) * (CAPACITY * COLUMNS)
        all_keys, all_values = keys, values
        if FP8:
            all_keys = keys.to(gl.pointer_type(gl.int32), bitcast=True)
            all_values = values.to(gl.pointer_type(gl.int32), bitcast=True)
        key_lines = all_keys + cache + (j * COLUMNS + column)
        value_lines = all_values + cache + (j * COLUMNS + column)
        ahead = first
        # The copies of each tile are a group. The last group of the first tiles is closed after the own parts, because
        # the tile of the new token may belong to it.
        for index in gl.static_range(STAGES - 1):
            if index > 0:
                async_copy.commit_group()
            if index < before:
                _copied(key_lines, value_lines, key_ring, value_ring, index, ahead, end, STEP, ROWS, COLUMNS, 0)
            ahead = gl.where(ahead + STEP == CAPACITY, 0, ahead + STEP)

        query = _own_parts(
            partial_sums,
            q_weight,
            k_weight,
            rotations,
            keys,
            values,
            row,
            head,
            newest,
            COUNT,
            HEADS,
            KV_HEADS,
            CAPACITY,
            SPLITS,
            NORMS,
            ROTATES,
            EPS,
            OFFSET,
            FLOAT32,
            DTYPE,
            FP8,
            SHARDS,
        )
        tl.debug_barrier()  # the key and value are written before another thread copies them
        if before < STAGES - 1:
            _copied(key_lines, value_lines, key_ring, value_ring, before, last, end, STEP, ROWS, COLUMNS, 1)
        async_copy.commit_group()

        heads = gl.arange(0, 8, gl.SliceLayout(0, _SUMS))
        if sinks is None:
            sink = gl.full([8], _MASKED, gl.float32, gl.SliceLayout(0, _SUMS))
        else:
            sink = gl.load(sinks + head * OWN + heads, mask=heads < OWN, other=_MASKED)
        top, total = sink, gl.full([STEP, 8], 0.0, gl.float32, _SUMS)
        acc = gl.full([128, 8], 0.0, gl.float32, _SUMS)
        slot, begin = 0, first
        for index in range(before):
            async_copy.wait_group(STAGES - 2)  # all groups but those of tiles after this one
            free_slot = gl.where(slot == 0, STAGES - 1, slot - 1)
            if index + (STAGES - 1) < before:
                _copied(key_lines, value_lines, key_ring, value_ring, free_slot, ahead, end, STEP, ROWS, COLUMNS, 0)
            else:
                if index + (STAGES - 1) == before:
                    _copied(key_lines, value_lines, key_ring, value_ring, free_slot, last, end, STEP, ROWS, COLUMNS, 1)
            async_copy.commit_group()
            top, total, acc = _seen(
                key_ring.index(slot),
                value_ring.index(slot),
                query,
                top,
                total,
                acc,
                begin,
                newest,
                visible_tokens,
                SCALE,
                CAP,
                CAPACITY,
                STEP,
                FP8,
                WINDOW,
            )
            ahead = gl.where(ahead + STEP == CAPACITY, 0, ahead + STEP)
            begin = gl.where(begin + STEP == CAPACITY, 0, begin + STEP)
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        async_copy.wait_group(0)
        top, total, acc = _seen(
            key_ring.index(slot),
            value_ring.index(slot),
            query,
            top,
            total,
            acc,
            last,
            newest,
            visible_tokens,
            SCALE,
            CAP,
            CAPACITY,
            STEP,
            FP8,
            1,
        )
        total = gl.sum(total, 0)
        if sinks is not None:
            total += gl.where(sink > _MASKED, gl.exp2(sink - top), 0.0)
        acc = acc * (1.0 / gl.maximum(total, 1e-30))[None, :]
        gl.store(result, _transposed(acc.to(DTYPE), 128), mask=member < OWN)
