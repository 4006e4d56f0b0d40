"""Shapes, bytes and attention FLOPs of operators in a Chrome trace that was taken with record_shapes=True."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

# Position of the argument is_causal in ATen's attention operators.
_IS_CAUSAL = {
    "flash_attention_backward": 11,
    "flash_attention_for_cpu_backward": 7,
    "cudnn_attention_backward": 14,
    "efficient_attention_backward": 11,
    "flash_attention": 4,
    "cudnn_attention": 6,
    "efficient_attention": 6,
}
# Bytes of an element, by the name that ATen gives a dtype: floating-point types, then all types.
FLOATS = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1}
ELEMENT_BYTES = {**FLOATS, "int": 4, "long int": 8, "bool": 1, "unsigned char": 1, "signed char": 1}
SHORT_DTYPES = {
    "c10::BFloat16": "bf16",
    "c10::Half": "f16",
    "float": "f32",
    "double": "f64",
    "long int": "s64",
    "int": "s32",
}


def operand_arrays(args: dict[str, Any]) -> list[tuple[list[int], str, int]]:
    """(dimensions, torch's dtype, bytes that a read takes) of an operator's array arguments of known dtypes.

    An expanded dimension (stride 0) is read once. [] if shapes were not recorded.
    """
    columns = (args.get(name, []) for name in ("Input Dims", "Input type", "Input Strides"))
    out = []
    for dims, kind, strides in itertools.zip_longest(*columns):
        if kind in ELEMENT_BYTES and isinstance(dims, list) and dims and all(isinstance(x, int) for x in dims):
            stored = [size for size, stride in zip(dims, strides or [1] * len(dims)) if stride]
            out.append((dims, kind, ELEMENT_BYTES[kind] * math.prod(stored)))
    return out


def in_words(dims: Sequence[int], kind: str) -> str:
    """ "bf16[8,128]"; `kind` is torch's dtype, such as "c10::BFloat16"."""
    return f"{SHORT_DTYPES.get(kind, kind)}[{','.join(map(str, dims))}]"


def attention_flops(name: str, dims: list[list[int]], args: dict[str, Any]) -> float:
    """2 * B * H * T * S * D for each product, 2 in the forward and 5 in the backward, half of that if causal; 0 without
    query and key [B, H, T, D].

      dims: of the array arguments, in a backward after the output's gradient.
      args: whose "Concrete Inputs" say whether it is causal; if they do not, it is not.
      name: of the operator in the trace.
    """
    backward = name.endswith("_backward")
    query_and_key = dims[1:3] if backward else dims[:2]
    if [len(shape) for shape in query_and_key] != [4, 4]:
        return 0.0
    query, key = query_and_key
    flops = (5 if backward else 2) * 2.0 * math.prod(query) * key[2]
    concrete = args.get("Concrete Inputs", [])
    position = next((i for operator, i in _IS_CAUSAL.items() if operator in name), None)
    causal = position is not None and position < len(concrete) and str(concrete[position]) == "True"
    return flops / 2 if causal else flops
