"""Kernels for four-bit weights, in Pallas Mosaic GPU for Hopper: `dequantize` decodes a whole weight (NF4, FP4, MXFP4
or NVFP4), and `small_matmul` multiplies a few tokens by NF4 or FP4 without writing the decoded weight to memory.

Up to 16 tokens are line_matmul.py's where a measurement on the GPU says so, else a single one is row_matmul.py's if it
can, and the others are this file's; 17 to 64 are triton.py's, in NF4 and bfloat16 alone. Refusals include the check at
first use.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxtune.pallas import dispatch, gpu_kernel, lanes, tuning
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.formats.four_bit import BLOCK, NESTED_BLOCK, NF4, FourBit
from jaxtune.pallas.mosaic_modules import fragmented_array, plgpu
from jaxtune.pallas.quant_matmul import line_matmul, row_matmul, triton
from jaxtune.pallas.quant_matmul.mosaic_decode import SMALLEST, Chunks, absmax_operands
from jaxtune.pallas.quant_matmul.reference import exact_product

MAX_TOKENS = 16  # the most tokens of the Mosaic kernels; small_matmul passes more to Triton's
_AHEAD = 1  # chunks that are loaded while one is multiplied; more take registers, and so allow fewer programs
_ROWS = lanes.ROWS_OF_A_WARP


def refusal(weight: Stored, dtype) -> str | None:
    """The reason why `dequantize` cannot decode this weight to `dtype`, or None."""
    if (reason := gpu_kernel.refusal()) is not None:
        return reason
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {jnp.dtype(dtype)}"
    if not Chunks.decodes(weight):
        return f"a weight in {type(weight).__name__}"
    if weight.size % SMALLEST:
        return f"{weight.size} elements, no multiple of {SMALLEST}"
    return _first_use(weight, jnp.dtype(dtype))


def _first_use(weight: Stored, dtype) -> str | None:

    def compare():
        draw = np.random.default_rng(0)
        small = weight.random_like((48, 1024), draw)
        return [dequantize(small, dtype)], [small.decode(jnp.float32)]

    return dispatch.first_use("quant_matmul", "mosaic", f"{weight.kind} to {dtype.name}", compare)


def small_refusal(weight: Stored, dtype, tokens: int) -> str | None:
    """The reason why `small_matmul` cannot multiply this number of tokens in `dtype` by this weight, or None."""
    if not isinstance(weight, FourBit):
        return f"a weight in {type(weight).__name__}"
    if tokens > MAX_TOKENS:
        return few_refusal(weight, dtype, tokens)
    rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
    if rows % _ROWS or columns % 512 or columns < 1024:
        return f"weight {weight.shape}; wants multiples of {_ROWS} and 512, and 1024 columns or more"
    reason = refusal(weight, dtype)
    if reason is not None or gpu_kernel.interpreter() is not None:
        return reason
    plan = _plan(rows, columns, tokens)

    def compare():
        draw = np.random.default_rng(0)
        # Some programs have a tile more than others, and some warpgroups a chunk more; the plan is the same.
        shape = (_ROWS * (plan.programs + 3), 3 * plan.chunk)
        small, x = weight.random_like(shape, draw), jnp.asarray(draw.standard_normal((tokens, shape[1])), dtype)
        return [_small_matmul(x, small, None, None)], [exact_product(x, small)]

    call = f"{jnp.dtype(dtype).name}, {weight.kind}, {tokens} tokens, {plan}"
    return dispatch.first_use("quant_matmul", "mosaic, few tokens", call, compare)


def few_refusal(weight: Stored, dtype, tokens: int) -> str | None:
    """As `small_refusal`, for more than 16 tokens. dtype: of x.

    weight: only NF4 is supported.
    """
    reason = triton.few_refusal(weight, dtype, tokens)
    if reason is not None:
        return reason
    assert isinstance(weight, NF4), "few_refusal refuses all others"
    double = weight.nested_absmax is not None

    def compare():
        keys = jax.random.split(jax.random.key(0), 2)
        small = NF4.encode(jax.random.normal(keys[0], (128, weight.shape[1])), double)
        x = jax.random.normal(keys[1], (tokens, weight.shape[1])).astype(dtype)
        return [triton.few_matmul(x, small)], [exact_product(x, small)]

    quantised = "quantised" if double else "float32"
    call = f"{jnp.dtype(dtype).name}, {quantised} absmax, {tokens} tokens, {weight.shape[1]} columns"
    return dispatch.first_use("quant_matmul", "triton, few tokens", call, compare)


def _kernel(body, name: str, interpret, **options):
    """gpu_kernel.kernel of a body that also gets `interpreted`, as the interpreter cannot run inline PTX."""
    return gpu_kernel.kernel(functools.partial(body, interpreted=interpret is not None), name, interpret, **options)


# ---- the dequantising pass


def _dequantize_kernel(*refs, chunks: Chunks, interpreted: bool):
    """Each program, one warpgroup, decodes one chunk. refs: chunks.operands, and the output [chunks, elements of a
    chunk].
    """
    *operands, out_ref = refs
    chunk = lax.axis_index("chunk")
    out_ref.at[chunk][...] = chunks.values(operands, chunk, chunks.load(operands, chunk), interpreted)


def dequantize(weight: Stored, dtype) -> jax.Array:
    """The weight in bfloat16 or float16, bit for bit as weight.decode, but MXFP4's numbers below 2^-126 are not zero.
    Only if `refusal` is None.
    """
    return _dequantize(weight, jnp.dtype(dtype), gpu_kernel.interpreter())


@functools.partial(jax.jit, static_argnums=(1, 2))
def _dequantize(weight: Stored, dtype, interpret) -> jax.Array:
    """Jitted apart, so that a program compiles it once for all weights of a shape."""
    chunks = Chunks.of(weight, dtype, weight.size)
    values = _kernel(
        functools.partial(_dequantize_kernel, chunks=chunks),
        "dequantise",
        interpret,
        out_type=jax.ShapeDtypeStruct((chunks.count, chunks.numbers), dtype),
        grid=(chunks.count,),
        grid_names=("chunk",),
    )(*chunks.operands(weight))
    return values.reshape(weight.shape)


# ---- the product with a few tokens


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How `small_matmul` divides its work for 1 to 16 tokens: program p computes tiles p, p + programs,
    ... of 16 rows.
    """

    # 1 or 2: of each row's codes in a chunk, each of the 4 warps reads `runs` times 64 bytes; 2 reads whole memory
    # lines of 128 bytes, but leaves room for at most 4 tokens
    runs: int
    width: int  # the N of the tensor-core product, 8 or 16: room for tokens times `runs`; not a size of the weight
    warpgroups: int  # the number of warpgroups in a program
    # the most programs in the grid: how many run at the same time on 132 multiprocessors, which registers limit
    programs: int

    @property
    def chunk(self) -> int:
        """Elements of a row that a warpgroup multiplies in one step."""
        return 512 * self.runs

    @property
    def codes(self):
        """The register layout of a chunk's codes, uint8[16 rows, chunk / 2]: `runs` times 64 bytes of
        every row a warp.
        """
        rows, own_bytes = 8 // self.runs, 64 * self.runs
        tiling = fragmented_array.Tiling(((rows, 4 * own_bytes), (rows, own_bytes), (16,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


def _plan(rows: int, columns: int, tokens: int) -> _Plan:
    """The division that was fastest on an H200, whose 132 multiprocessors are written in."""
    if tokens <= 4 and columns % 1024 == 0 and columns >= 2048:
        warpgroups = 1 if rows // _ROWS >= 4 * 132 else 2
        return _Plan(runs=2, width=8, warpgroups=warpgroups, programs=4 * 132 // warpgroups)
    if tokens <= 8:
        return _Plan(runs=1, width=8, warpgroups=2, programs=3 * 132)
    return _Plan(runs=1, width=16, warpgroups=2, programs=2 * 132)


def _written_out_product(acc, codes, pairs, scales, x, runs):
    """lanes.small_product in jnp. acc: float32[64 runs, n]; codes: uint8[16, 256 runs]; x: [tokens, columns]."""
    rows_per_group = 8 // runs
    tokens = acc.shape[1] // runs
    values = pairs[codes.astype(jnp.int32)].astype(jnp.float32).reshape(runs, 2, rows_per_group, 4, runs, 2, BLOCK)
    x = jnp.pad(x.astype(jnp.float32), ((0, tokens - x.shape[0]), (0, 0))).reshape(
        -1, rows_per_group, 4, runs, 2, BLOCK
    )
    scales = scales.reshape(*values.shape[:-1])[..., None, None]
    blocks = jnp.einsum("siawhbk,etwhbk->siawhbet", values, x) * scales
    partial = jnp.einsum("siawhbet,hg->swiahegt", blocks, jnp.eye(runs))
    return acc + partial.reshape(acc.shape)


def _written_out_sums(partial, tokens, runs):
    """lanes.store_sums in jnp, for the interpreter: float32[tokens, 16]."""
    rows_per_group = 8 // runs
    sums = partial.reshape(partial.shape[0], runs, 4, 2, rows_per_group, runs, -1, runs, rows_per_group)
    total = jnp.einsum("pswiahegt,hg->etsia", sums, jnp.eye(runs))
    return total.reshape(-1, _ROWS)[:tokens]


def _small_kernel(x_ref, codes_ref, absmax_ref, pairs_ref, *refs, dtype, plan: _Plan, interpreted):
    """Program p of n multiplies the tiles p, p + n, ... of 16 rows of the weight by all tokens.

    absmax_ref: uint8 or float32[rows, columns / 64].
    pairs_ref: the two elements of each byte: uint32[256], or `dtype`[256, 2] if interpreted.
    refs: map, nested absmax and offset of a uint8 absmax; the output [tokens, rows]; shared memory and barriers.
    """
    *nested_refs, out_ref, pairs_smem, scales_smem, partial_smem, ready, finished = refs
    wg, program = lax.axis_index("wg"), lax.axis_index("program")
    programs = lax.axis_size("program")
    columns = x_ref.shape[1]
    chunk_size, warpgroups = plan.chunk, plan.warpgroups
    blocks = columns // BLOCK
    chunks = columns // chunk_size
    steps = lax.div(chunks - wg + (warpgroups - 1), warpgroups)  # the steps of this warpgroup over a tile
    tiles = lax.div(codes_ref.shape[0] // _ROWS - program + (programs - 1), programs)  # the tiles of this program

    def row_of(number):
        return (program + jnp.minimum(number, tiles - 1) * programs) * _ROWS

    def load_absmax(number):
        if not interpreted:
            nested = nested_refs[1] if nested_refs else None
            return lanes.absmax_share(absmax_ref, nested, row_of(number), _ROWS, warpgroups)
        values = absmax_ref[pl.ds(row_of(number), _ROWS)]
        if not nested_refs:
            return (values,)
        position = (jnp.arange(_ROWS)[:, None] + row_of(number)) * blocks + jnp.arange(blocks)
        return values, nested_refs[1][...][position // NESTED_BLOCK]

    def keep_scales(share, scales):
        if not interpreted:
            lanes.keep_scales(share, nested_refs[::2], scales, blocks, warpgroups)
            return

        @pl.when(wg == 0)  # interpreted, one warpgroup has them all; on a GPU each writes its share
        def _():
            if nested_refs:
                scales[:, pl.ds(0, blocks)] = nested_refs[0][...][share[0]] * share[1] + nested_refs[2][0]
            else:
                scales[:, pl.ds(0, blocks)] = share[0]

    def chunk_of(step):
        return lax.rem(step, steps) * warpgroups + wg

    def load_codes(step):
        """The codes of a step, uint8[16, chunk / 2]; steps are numbered over all tiles of the program."""
        return plgpu.load(
            codes_ref.at[
                pl.ds(row_of(lax.div(step, steps)), _ROWS), pl.ds(chunk_of(step) * (chunk_size // 2), chunk_size // 2)
            ],
            layout=plan.codes,
            optimized=False,
        )

    def multiply(step, scales, acc, codes):
        chunk = chunk_of(step)
        if interpreted:
            own_scales = scales[:, pl.ds(chunk * (chunk_size // BLOCK), chunk_size // BLOCK)]
            x = x_ref[:, pl.ds(chunk * chunk_size, chunk_size)]
            return _written_out_product(acc, codes, pairs_ref[...], own_scales, x, plan.runs)
        x = lanes.x_fragments(chunk, x_ref, plan.width, plan.runs)
        return lanes.small_product(acc, codes, x, chunk, pairs_smem, scales, (plgpu.Layout.WGMMA, plan.codes), dtype)

    def one_tile(number, state):
        share, next_codes = state
        scales = scales_smem.at[lax.rem(number, 2)]  # other warpgroups may still read the previous tile's
        keep_scales(share, scales)
        share = load_absmax(number + 1)
        # Every warpgroup has written its part of the scales and finished the previous tile.
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)

        def one_step(index, state):
            acc, (codes, *next_codes) = state
            step = number * steps + index
            next_codes = (*next_codes, load_codes(step + _AHEAD))
            return multiply(step, scales, acc, codes), next_codes

        acc = plgpu.layout_cast(jnp.zeros(partial_smem.shape[1:], jnp.float32), plgpu.Layout.WGMMA)
        acc, next_codes = lax.fori_loop(0, steps, one_step, (acc, next_codes))
        partial_smem.at[wg][...] = acc
        plgpu.barrier_arrive(finished)

        @pl.when(wg == 0)
        def _():
            plgpu.barrier_wait(finished)
            if interpreted:
                total = _written_out_sums(partial_smem[...], x_ref.shape[0], plan.runs)
                out_ref[:, pl.ds(row_of(number), _ROWS)] = total.astype(dtype)
            else:
                lanes.store_sums(partial_smem, out_ref, row_of(number), dtype)

        return share, next_codes

    share = load_absmax(0)
    next_codes = tuple(load_codes(jnp.int32(step)) for step in range(_AHEAD))
    if not interpreted:
        lanes.fill_banks(pairs_ref, pairs_smem, warpgroups)
    lax.fori_loop(0, tiles, one_tile, (share, next_codes))


@functools.cache
def _pairs(table: bytes, dtype) -> np.ndarray:
    """`dtype`[256, 2]: the two elements of each byte of codes, which one look-up gives. Cached: do not change it."""
    entries = np.frombuffer(table, np.float32).astype(dtype)
    byte = np.arange(256)
    return np.stack([entries[byte >> 4], entries[byte & 15]], axis=1)


def small_bucket(weight: FourBit, tokens: int) -> str:
    """The name under which tile sizes are measured, such as "4096 x 4096, tokens=4"; tokens are rounded up to 1, 4, 8
    or 16.
    """
    rows, columns = weight.shape
    return f"{rows} x {columns}, tokens={next(n for n in (1, 4, 8, 16) if tokens <= n)}"


def line_tile(weight: FourBit, dtype, tokens: int) -> line_matmul.Tile | None:
    """line_matmul's tile if it was measured to be the fastest kernel for such products and can run; else None. dtype:
    of x.

      weight, tokens: [out, in], and 1 to 16.
    """
    measured = tuning.tuned("small_matmul", small_bucket(weight, tokens), dtype, line_matmul.Tile)
    if not measured or line_refusal(tile := line_matmul.Tile(**measured), weight, dtype, tokens) is not None:
        return None
    return tile


def line_refusal(tile: line_matmul.Tile, weight: FourBit, dtype, tokens: int) -> str | None:
    """Why line_matmul with this tile cannot multiply 1 to 16 tokens by weight [out, in], or None."""
    reason = small_refusal(weight, dtype, tokens)
    reason = reason or line_matmul.refusal(tile, weight.shape[0], weight.shape[1], tokens)
    if reason is not None or gpu_kernel.interpreter() is not None:
        return reason

    def compare():
        keys = jax.random.split(jax.random.key(0), 2)
        rows, columns = tile.rows + 16, 1024 * tile.warpgroups * tile.splits + 1024
        small = NF4.encode(jax.random.normal(keys[0], (rows, columns)), weight.nested_absmax is not None)
        x = jax.random.normal(keys[1], (tokens, columns)).astype(dtype)
        return [small_matmul(x, small, tile)], [exact_product(x, small)]

    quantised = "quantised" if weight.nested_absmax is not None else "float32"
    call = f"{jnp.dtype(dtype).name}, {quantised} absmax, {tokens} tokens, {tile}"
    return dispatch.first_use("quant_matmul", "mosaic, by lines", call, compare)


def row_refusal(weight: FourBit, dtype) -> str | None:
    """The reason why row_matmul cannot multiply one token, or None."""
    rows, columns = weight.shape if len(weight.shape) == 2 else (0, 0)
    sizes = row_matmul.plan(rows, columns)
    if sizes is None:
        return f"weight {weight.shape}; wants columns in multiples of 1,024, up to 28,672, and an even number of rows"
    reason = refusal(weight, dtype)
    if reason is not None or gpu_kernel.interpreter() is not None:
        return reason

    def compare():
        keys = jax.random.split(jax.random.key(0), 2)
        # Each of two programs has more chunks than stages, and the first has one more than the second.
        small = (2 * sizes.pairs * (2 * sizes.stages + 3), columns)
        stored = NF4.encode(jax.random.normal(keys[0], small), weight.nested_absmax is not None)
        x = jax.random.normal(keys[1], (1, columns)).astype(dtype)
        return [_row_matmul(x, stored, 2, None)], [exact_product(x, stored)]

    quantised = "quantised" if weight.nested_absmax is not None else "float32"
    call = f"{jnp.dtype(dtype).name}, {quantised} absmax, {sizes.slices} slices, {sizes.pairs} pairs"
    return dispatch.first_use("quant_matmul", "mosaic, by rows", call, compare)


def small_matmul(x: jax.Array, weight: FourBit, tile: line_matmul.Tile | None = None) -> jax.Array:
    """x weight^T, [tokens, out] in x's dtype, without writing the decoded weight. Only if `small_refusal` is None.

    For up to 16 tokens the table's values are rounded to x's dtype, and each block's float32 sum is multiplied by its
    absmax; for more, decoded elements are multiplied.

      tile: for up to 16 tokens, use line_matmul with it; None: the fastest kernel.
    """
    if x.shape[0] > MAX_TOKENS:
        return triton.few_matmul(x, weight)
    tile = tile or line_tile(weight, x.dtype, x.shape[0])
    if tile is None and x.shape[0] == 1 and row_refusal(weight, x.dtype) is None:
        return _row_matmul(x, weight, row_matmul.PROGRAMS, gpu_kernel.interpreter())
    return _small_matmul(x, weight, tile, gpu_kernel.interpreter())


@functools.partial(jax.jit, static_argnums=(2, 3))
def _row_matmul(x: jax.Array, weight: FourBit, programs: int, interpret) -> jax.Array:
    pairs = _pairs(weight.table.tobytes(), jnp.dtype(x.dtype))
    absmax, *nested = absmax_operands(weight)
    return row_matmul.matmul(x, weight.codes, absmax, nested, pairs, weight.shape[0], _kernel, interpret, programs)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _small_matmul(x: jax.Array, weight: FourBit, tile: line_matmul.Tile | None, interpret) -> jax.Array:
    """line_matmul, or without a tile this module's kernel."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    plan = _plan(rows, columns, tokens)
    pairs = _pairs(weight.table.tobytes(), jnp.dtype(x.dtype))
    absmax, *nested = absmax_operands(weight)
    if tile is not None:
        codes, absmax = weight.codes.reshape(rows, -1), absmax.reshape(rows, -1)
        return line_matmul.matmul(x, codes, absmax, nested, pairs, tile, _kernel, interpret)
    return _kernel(
        functools.partial(_small_kernel, dtype=x.dtype, plan=plan),
        "small_matmul",
        interpret,
        out_type=jax.ShapeDtypeStruct((tokens, rows), x.dtype),
        grid=(min(rows // _ROWS, plan.programs),),
        grid_names=("program",),
        num_threads=plan.warpgroups,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((256, 32), jnp.uint32),
            # Rows have 4 more than a multiple of 8 elements, so that pairs of rows are read from different banks.
            plgpu.SMEM((2, _ROWS, columns // BLOCK + 4), jnp.float32),
            plgpu.SMEM((plan.warpgroups, 64 * plan.runs, plan.width), jnp.float32),
            plgpu.Barrier(num_arrivals=plan.warpgroups),
            plgpu.Barrier(num_arrivals=plan.warpgroups),
        ],
    )(
        x,
        weight.codes.reshape(rows, -1),
        absmax.reshape(rows, -1),
        jnp.asarray(pairs if interpret is not None else pairs.view(np.uint32).reshape(-1)),
        *nested,
    )
