"""How a warpgroup decodes weights in four bits, chunk by chunk, for the dequantising pass (mosaic.py) and for products
that decode ahead (grouped_matmul/mosaic_ahead.py).

A chunk is `lines` lines of 512 bytes of codes, 1,024 numbers each, whatever rows of the weight they belong to.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import lanes
from jaxtune.pallas.formats import Stored, mxfp4
from jaxtune.pallas.formats.four_bit import NESTED_BLOCK, FourBit
from jaxtune.pallas.formats.mxfp4 import MXFP4

_LINE = 512  # bytes of codes that a warpgroup takes at once, four per lane
SMALLEST = 2 * _LINE  # numbers of a chunk of one line

# Layout of [lines x 16] absmax: the lanes 8 i to 8 i + 7 of a warpgroup have number i of a line.
_SCALES = plgpu.Layout.TILED(Tiling(((16,), (4,), (1,))), warp_dims=(-3,), lane_dims=(-2, Replicated(8)), vector_dim=-1)
# Layout of MXFP4's [lines x 32] scales: lanes 4 i to 4 i + 3 have number i.
_POWERS = plgpu.Layout.TILED(Tiling(((32,), (8,), (1,))), warp_dims=(-3,), lane_dims=(-2, Replicated(4)), vector_dim=-1)


def absmax_operands(weight: FourBit) -> list[jax.Array]:
    """A weight's absmax, or its codes, map, nested absmax and offset."""
    if weight.nested_map is None or weight.nested_absmax is None or weight.offset is None:
        return [weight.absmax]
    return [weight.absmax, weight.nested_map, weight.nested_absmax, weight.offset.reshape(1)]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a weight is decoded."""

    lines: int  # of a chunk; a power of two, so that the blocks of a chunk are within one nested block
    count: int  # number of chunks
    table: bytes  # float32[16], as bytes
    powers: bool  # whether scales are MXFP4's powers of two, or absmax
    dtype: np.dtype  # of the result, bfloat16 or float16

    @staticmethod
    def decodes(weight: Stored) -> bool:
        """Whether a weight is in a format that is decoded here."""
        return isinstance(weight, FourBit | MXFP4)

    @staticmethod
    def of(weight: Stored, dtype, whole: int) -> Chunks:
        """The chunks of a weight; `whole` is a number of elements that a chunk must divide, a multiple of SMALLEST,
        such as those of an expert."""
        lines = next(n for n in (8, 4, 2, 1) if whole % (n * SMALLEST) == 0)
        assert isinstance(weight, FourBit | MXFP4)
        powers = isinstance(weight, MXFP4)
        table = (mxfp4.TABLE if isinstance(weight, MXFP4) else weight.table).tobytes()
        return Chunks(lines, weight.size // (lines * SMALLEST), table, powers, jnp.dtype(dtype))

    @property
    def numbers(self) -> int:
        """The number of elements of a chunk."""
        return self.lines * SMALLEST

    @property
    def out_layout(self):
        """The layout of a decoded chunk."""
        return plgpu.Layout.WG_STRIDED((self.numbers,), 8)

    def operands(self, weight: Stored) -> list[jax.Array]:
        """A kernel's operands: codes and scales by chunk, the table, and for quantised absmax the nested arrays."""
        assert isinstance(weight, FourBit | MXFP4)
        scales, *nested = [weight.scales] if isinstance(weight, MXFP4) else absmax_operands(weight)
        table = jnp.asarray(np.frombuffer(self.table, np.float32))
        return [weight.codes.reshape(self.count, -1), scales.reshape(self.count, -1), table, *nested]

    def load(self, refs, at):
        """What chunk `at` is decoded from, out of `operands`, in registers."""
        codes_ref, scales_ref, *_ = refs
        codes_layout = plgpu.Layout.WG_STRIDED((self.lines * _LINE,), 4)
        codes = plgpu.load(codes_ref.at[at], layout=codes_layout, optimized=False)
        return codes, plgpu.load(scales_ref.at[at], layout=_POWERS if self.powers else _SCALES, optimized=False)

    def values(self, refs, at, loaded, interpreted: bool, *, beside_products: bool = False):
        """`dtype`[numbers] of a loaded chunk, in `out_layout`; beside_products as in lanes.table_values."""
        _, _, table_ref, *nested_refs = refs
        codes, scales = loaded
        scales_layout = _POWERS if self.powers else _SCALES
        if self.powers and interpreted:
            scales = lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
        elif self.powers:
            scales = lanes.powers_of_two(scales, scales_layout)
        elif nested_refs:
            map_ref, nested_ref, offset_ref = nested_refs
            nested, offset = nested_ref[lax.div(at * scales.shape[0], jnp.int32(NESTED_BLOCK))], offset_ref[0]
            if interpreted:
                scales = map_ref[...][scales] * nested + offset
            else:
                scales = lanes.block_scales(scales, nested, offset, map_ref, scales_layout)
        if interpreted:
            halves = [codes & 15, codes >> 4] if self.powers else [codes >> 4, codes & 15]
            nibbles = jnp.stack(halves, axis=1).reshape(-1)
            return (table_ref[...][nibbles] * jnp.repeat(scales, nibbles.size // scales.size)).astype(self.dtype)
        codes_layout = plgpu.Layout.WG_STRIDED(codes.shape, 4)
        return lanes.table_values(
            codes,
            scales,
            self.table,
            table_ref,
            codes_layout,
            scales_layout,
            self.out_layout,
            self.dtype,
            low_first=self.powers,
            beside_products=beside_products,
        )
