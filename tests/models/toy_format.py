"""A whole format of weights, as docs/extending.md shows it: eight bits in blocks of 32 along a row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtune.pallas.formats.layout import Format, FoundWeight, Layout, file_tensor
from jaxtune.pallas.formats.stored import Stored

BLOCK = 32  # numbers of a row that share a scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Q8(Stored):
    """A tensor [..., out, in] as int8; in is a multiple of 32. A number is its code times the scale of its block."""

    codes: jax.Array  # int8[..., out, in]
    scales: jax.Array  # float32[..., out, in / 32]
    dtype_name: str = dataclasses.field(metadata=dict(static=True))  # what decode gives by default

    @staticmethod
    def encode(array):
        if array.shape[-1] % BLOCK:
            raise ValueError(f"Q8.encode: rows of {array.shape[-1]} are not whole blocks of {BLOCK}")
        blocks = jnp.asarray(array, jnp.float32).reshape(*array.shape[:-1], -1, BLOCK)
        scales = jnp.maximum(jnp.abs(blocks).max(-1), 1e-30) / 127
        codes = jnp.round(blocks / scales[..., None]).astype(jnp.int8).reshape(array.shape)
        return Q8(codes, scales, str(array.dtype))

    @property
    def shape(self):
        return tuple(self.codes.shape)

    def problem(self):
        wanted = (*self.shape[:-1], self.shape[-1] // BLOCK)
        return None if self.scales.shape == wanted else f"scales are {self.scales.shape}; they must be {wanted}"

    def block_length(self, axis):  # between whole blocks along the last axis, and anywhere along the others
        return BLOCK if axis == self.ndim - 1 else 1

    def _decode(self, dtype):
        return (self.codes * jnp.repeat(self.scales, BLOCK, axis=-1)).astype(dtype or self.dtype)


class Q8Files(Layout):
    """Beside `X.weight` int8[out, in] there is `X.weight_scale_32` float32[out, in / 32]."""

    title = "Q8"
    codes, codes_dtype = ".weight", "I8"
    scale_keys = (".weight_scale_32",)

    def recognises(self, settings):  # of quantization_config in config.json
        return settings.get("quant_method") == "q8"

    def describe(self, name, tensors, read):
        codes, scales = tensors[".weight"], tensors.get(".weight_scale_32")
        wanted = (codes.shape[0], codes.shape[1] // BLOCK)
        if scales is None or (scales.dtype, scales.shape) != ("F32", wanted):
            raise ValueError(f"{codes.file}: {name} must have {name}_scale_32, F32{list(wanted)}")
        return FoundWeight(name, tensors, codes.shape)

    def read(self, found, arrays, dtype_name):
        return Q8(arrays[".weight"], arrays[".weight_scale_32"], dtype_name)

    def tensors(self, weight, number):
        scales = file_tensor(weight.scales, lambda w: w.scales)
        return {".weight": file_tensor(weight.codes, lambda w: w.codes), ".weight_scale_32": scales}

    def config(self, weights, plain, dtype):
        return {"quant_method": "q8", "modules_to_not_convert": plain}


FORMAT = Format("q8", "in eight bits (Q8)", (Q8,), (Q8Files(),), flag="load_in_q8")
