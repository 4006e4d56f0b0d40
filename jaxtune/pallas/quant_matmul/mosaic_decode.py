"""How a warpgroup decodes weights in four bits, chunk by chunk: runs of consecutive numbers of the flat weight, of
lines with 512 bytes of codes for 1,024 numbers.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtune.pallas import lanes
from jaxtune.pallas.formats import Stored, mxfp4
from jaxtune.pallas.formats.four_bit import NESTED_BLOCK, FourBit
from jaxtune.pallas.formats.mxfp4 import MXFP4
from jaxtune.pallas.formats.nvfp4 import E4M3_VALUES, NVFP4
from jaxtune.pallas.mosaic_modules import fragmented_array, plgpu
from jaxtune.pallas.quant_matmul import scale_lanes

_LINE = 512  # bytes of codes that a warpgroup takes at once, four per lane
SMALLEST = 2 * _LINE  # numbers of a chunk of one line

# By how scales are stored: numbers of a line, and the lanes that have the same one.
_SPREAD = {"absmax": (16, 8), "powers": (32, 4), "bytes": (64, 2)}


def absmax_operands(weight: FourBit) -> list[jax.Array]:
    """[float32 absmax], or with double quantisation [uint8 absmax, map float32[256], nested absmax float32, offset
    float32[1]].
    """
    if weight.nested_map is None or weight.nested_absmax is None or weight.offset is None:
        return [weight.absmax]
    return [weight.absmax, weight.nested_map, weight.nested_absmax, weight.offset.reshape(1)]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How a weight is divided into chunks, and how a warpgroup decodes one; static in a kernel."""

    # 1,024 numbers each, how many a chunk has; a power of two, so that a chunk's blocks are within one nested block
    lines: int
    count: int  # the number of chunks of the weight
    table: bytes  # the values of the 16 codes, float32[16], as bytes
    # how scales are stored: "absmax" of NF4 and FP4 (float32, or uint8 with double quantisation), MXFP4's "powers" of
    # two, or NVFP4's "bytes": e4m3 numbers, which are looked up in a table
    scales: str
    dtype: np.dtype  # of the result, bfloat16 or float16
    divides: bool = False  # for NVFP4. True: scales are divided by the tensor's scale; False: multiplied by it

    @staticmethod
    def decodes(weight: Stored) -> bool:
        """Whether the weight is NF4 or FP4, MXFP4 that is not `swapped`, or NVFP4 with one tensor scale."""
        supported = isinstance(weight, FourBit | MXFP4) or (isinstance(weight, NVFP4) and weight.tensor_scale.size == 1)
        return supported and not weight.swapped

    @staticmethod
    def of(weight: Stored, dtype, unit_size: int) -> Chunks:
        """The chunks of a weight: the largest power of two of lines, at most 8 (4 for NVFP4), that divides `unit_size`,
        the numbers of the weight or of an expert that is decoded separately. dtype: of the decoded numbers.
        """
        assert isinstance(weight, FourBit | MXFP4 | NVFP4)
        # Measured (notes/quant_matmul.md): more lines leave small weights too few programs, fewer load too little.
        largest = 4 if isinstance(weight, NVFP4) else 8
        lines = next(n for n in (8, 4, 2, 1) if n <= largest and unit_size % (n * SMALLEST) == 0)
        scales = "absmax" if isinstance(weight, FourBit) else "powers" if isinstance(weight, MXFP4) else "bytes"
        table = (weight.table if isinstance(weight, FourBit) else mxfp4.TABLE).tobytes()
        divides = isinstance(weight, NVFP4) and weight.divides
        return Chunks(lines, weight.size // (lines * SMALLEST), table, scales, jnp.dtype(dtype), divides)

    @property
    def scales_layout(self):
        """The register layout of a chunk's scales: each lane has those of its codes."""
        numbers, lanes_of_each = _SPREAD[self.scales]
        tiling = fragmented_array.Tiling(((numbers,), (numbers // 4,), (1,)))
        lane_dims = (-2, fragmented_array.Replicated(lanes_of_each))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=lane_dims, vector_dim=-1)

    @property
    def low_first(self) -> bool:
        """Whether a byte's first number is in its low four bits."""
        return self.scales != "absmax"

    @property
    def numbers(self) -> int:
        """Elements of a chunk."""
        return self.lines * SMALLEST

    @property
    def out_layout(self):
        """The register layout of a decoded chunk: a lane has runs of eight numbers (16 bytes)."""
        return plgpu.Layout.WG_STRIDED((self.numbers,), 8)

    def operands(self, weight: Stored) -> list[jax.Array]:
        """The arrays of a kernel: codes and scales [count, those of a chunk]; the table float32[16]; and of uint8
        absmax the map float32[256], nested absmax and offset float32[1]; of NVFP4 float32[256], each byte as e4m3, and
        the tensor's scale float32[1].
        """
        assert isinstance(weight, FourBit | MXFP4 | NVFP4)
        if isinstance(weight, FourBit):
            scales, *nested = absmax_operands(weight)
        elif isinstance(weight, MXFP4):
            scales, nested = weight.scales, []
        else:
            scales = lax.bitcast_convert_type(weight.scales, jnp.uint8)
            nested = [jnp.asarray(E4M3_VALUES), weight.tensor_scale.reshape(1)]
        table = jnp.asarray(np.frombuffer(self.table, np.float32))
        return [weight.codes.reshape(self.count, -1), scales.reshape(self.count, -1), table, *nested]

    def load(self, refs, chunk):
        """(codes, scales) of chunk `chunk` in registers; apart from `values`, so that it can run while the chunk before
        is decoded.
        """
        codes_ref, scales_ref, *_ = refs
        codes_layout = plgpu.Layout.WG_STRIDED((self.lines * _LINE,), 4)
        codes = plgpu.load(codes_ref.at[chunk], layout=codes_layout, optimized=False)
        return codes, plgpu.load(scales_ref.at[chunk], layout=self.scales_layout, optimized=False)

    def values(self, refs, chunk, loaded, interpreted: bool, *, beside_products: bool = False):
        """A loaded chunk decoded: `dtype`[numbers], in registers of `out_layout`.

        beside_products: look codes up by byte permutations, without shared memory, which tensor cores read at the
        same time; False: by warp shuffles, fewer instructions.
        refs: of `operands`, in their order. chunk: int32[], its number. loaded: what `load` returned for it.
        """
        _, _, table_ref, *nested_refs = refs
        codes, scales = loaded
        scales_layout = self.scales_layout
        if self.scales == "powers" and interpreted:
            scales = lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
        elif self.scales == "powers":
            scales = scale_lanes.powers_of_two(scales, scales_layout)
        elif self.scales == "bytes":
            values_ref, tensor_scale = nested_refs[0], nested_refs[1][0]
            if interpreted:
                e4m3 = values_ref[...][scales]
                scales = e4m3 / tensor_scale if self.divides else e4m3 * tensor_scale
            elif self.divides:
                scales = scale_lanes.divided_scales(scales, tensor_scale, values_ref, scales_layout)
            else:
                scales = scale_lanes.table_scales(scales, tensor_scale, jnp.float32(0.0), values_ref, scales_layout)
        elif nested_refs:
            map_ref, nested_ref, offset_ref = nested_refs
            nested, offset = nested_ref[lax.div(chunk * scales.shape[0], jnp.int32(NESTED_BLOCK))], offset_ref[0]
            if interpreted:
                scales = map_ref[...][scales] * nested + offset
            else:
                scales = scale_lanes.table_scales(scales, nested, offset, map_ref, scales_layout)
        if interpreted:
            halves = [codes & 15, codes >> 4] if self.low_first else [codes >> 4, codes & 15]
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
            low_first=self.low_first,
            beside_products=beside_products,
        )
