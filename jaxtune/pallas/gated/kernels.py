"""Triton kernel of experts' gated backward, and the device functions of gated activations."""

import triton
import triton.language as tl

from jaxtune.pallas.triton_parts import INTERPRETED

# 1 / (1 + 2^(x * -log2 e)), without the steps that Triton's own exponential and division take for numbers near the ends
# of float32's range.
_SIGMOID = tl.constexpr("""{
  .reg .f32 t;
  mul.f32 t, $1, 0fBFB8AA3B;
  ex2.approx.ftz.f32 t, t;
  add.f32 t, t, 0f3F800000;
  rcp.approx.ftz.f32 $0, t;
}""")


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST == 0 or INTERPRETED:
        return tl.sigmoid(x)
    # Not pure, so that it is computed once where the result is needed in two layouts of registers.
    return tl.inline_asm_elementwise(_SIGMOID, "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def share_of(x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, FAST: tl.constexpr):
    """(s(x), s'(x)) of float32 x; the activation is x s(x).

    ACTIVATION: 0: sigmoid of ALPHA x (silu if ALPHA is 1); 1: tanh approximation of the normal distribution function.
    FAST: 0: Triton's sigmoid; else four instructions with an error below 2^-21.
    """
    if ACTIVATION == 0:
        share = _sigmoid(ALPHA * x, FAST)
        slope = ALPHA * share * (1.0 - share)
    else:
        square = x * x  # (1 + tanh(z / 2)) / 2 is the sigmoid of z
        share = _sigmoid(x * (1.5957691216057308 + 0.07135481282052938 * square), FAST)
        slope = share * (1.0 - share) * (1.5957691216057308 + 0.21406443846158813 * square)
    return share, slope


@triton.jit
def limit_slope(x, LIMIT: tl.constexpr):
    """Derivative of min(x, LIMIT): 1 below the limit, half at it, as JAX has it, 0 above."""
    return tl.where(x < LIMIT, 1.0, tl.where(x == LIMIT, 0.5, 0.0))


@triton.jit
def clipped(x, y, CLIPPED: tl.constexpr, LIMIT: tl.constexpr):
    """gate and up of an expert's activation: with CLIPPED min(x, LIMIT), and y clipped to +-LIMIT, plus 1; else x and
    y.

      x, y: gate and up, float32. LIMIT: not used unless CLIPPED.
    """
    if CLIPPED:
        x, y = tl.minimum(x, LIMIT), tl.minimum(tl.maximum(y, -LIMIT), LIMIT) + 1.0
    return x, y


@triton.jit
def row_gradients(
    x,
    y,
    dout,
    weight,
    CLIPPED: tl.constexpr,
    LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    FAST: tl.constexpr,
):
    """(an expert's inner rows, gradients of gate and of up), float32, of gate x, up y, the rows' weights and dout, the
    gradient of the weighted inner rows.

      weight: float32, the rows'. CLIPPED, LIMIT: of `clipped`. ACTIVATION, ALPHA, FAST: of `share_of`.
    """
    dx_within, dy_within = 1.0, 1.0
    if CLIPPED:
        dx_within = limit_slope(x, LIMIT)
        dy_within = limit_slope(y, LIMIT) * limit_slope(-y, LIMIT)
    x, y = clipped(x, y, CLIPPED, LIMIT)
    share, slope = share_of(x, ACTIVATION, ALPHA, FAST)
    active = x * share
    dout *= weight
    return active * y, dout * y * (share + x * slope) * dx_within, dout * active * dy_within


@triton.jit
def gated_rows_gradient_kernel(
    gate_up,
    weights,
    dgated,
    dgate_up,
    gated,
    dweights,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLIPPED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Backward of experts' gated activation for BLOCK_ROWS rows, in float32. Grid: (ROWS / BLOCK_ROWS, rounded up,).
    dgate_up may be gate_up's memory, and gated dgated's: a program reads a block before it writes it.

      gate_up, dgate_up: [ROWS, 2 SIZE], gate before up; INTERLEAVED: gate in the even columns, up in the odd ones.
      dgated: [ROWS, SIZE], gradient of gated, the inner rows times the weights.
      BLOCK: columns of gate, and of up, computed at once.
      weights, dweights: float32[ROWS], the router's, and their gradient. gated: [ROWS, SIZE], weighted inner rows.
      ACTIVATION, ALPHA: 0: x times sigmoid of ALPHA x; 1: tanh approximation of gelu.
      CLIPPED, LIMIT: 1: gate and up are clipped at LIMIT, and 1 is added to up.
    """
    DTYPE: tl.constexpr = gated.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = rows < ROWS
    weight = tl.load(weights + rows, mask=row_mask, other=0.0)[:, None]
    # Added up over the columns at the end only, as threads must wait for each other to do so.
    sums = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        real = row_mask[:, None] & (columns < SIZE)[None, :]
        inner = rows[:, None] * SIZE + columns[None, :]
        pairs = 2 * start + tl.arange(0, 2 * BLOCK)
        paired = rows[:, None] * (2 * SIZE) + pairs[None, :]
        real_pairs = row_mask[:, None] & (pairs < 2 * SIZE)[None, :]
        first = rows[:, None] * (2 * SIZE) + columns[None, :]
        if INTERLEAVED:
            gate_up_pairs = tl.load(gate_up + paired, mask=real_pairs, other=0.0)
            x, y = tl.split(tl.reshape(gate_up_pairs, [BLOCK_ROWS, BLOCK, 2]))
        else:
            x = tl.load(gate_up + first, mask=real, other=0.0)
            y = tl.load(gate_up + SIZE + first, mask=real, other=0.0)
        dout = tl.load(dgated + inner, mask=real, other=0.0).to(tl.float32)
        x, y = x.to(tl.float32), y.to(tl.float32)
        product, dx, dy = row_gradients(x, y, dout, weight, CLIPPED, LIMIT, ACTIVATION, ALPHA, 0)
        sums += dout * product
        tl.store(gated + inner, (product * weight).to(DTYPE), mask=real)
        if INTERLEAVED:
            tl.store(dgate_up + paired, tl.interleave(dx.to(DTYPE), dy.to(DTYPE)), mask=real_pairs)
        else:
            tl.store(dgate_up + first, dx.to(DTYPE), mask=real)
            tl.store(dgate_up + SIZE + first, dy.to(DTYPE), mask=real)
    tl.store(dweights + rows, tl.sum(sums, 1), mask=row_mask)
