"""Shapes and bytes of operators' arrays (`operand_arrays`, `in_words`), and FLOPs of attention (`attention_flops`), in
a Chrome trace of PyTorch's profiler taken with record_shapes=True. The reader of such traces (chrome.py) uses them; it
computes the FLOPs of matrix products itself. ELEMENT_BYTES has the bytes of one element of each known dtype, FLOATS
those of the floating-point types among them, and SHORT_DTYPES the names that reports show."""

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
    """Reads the shapes of an operator's array arguments from `args`, the entry "args" of its trace event, and returns a
    list of (dimensions, dtype as torch names it, bytes that a read takes). An expanded dimension (stride 0) is read
    once: it counts as 1 in the bytes. Scalars, lists of arrays, and arrays of a dtype that is not in ELEMENT_BYTES are
    left out. The list is empty if shapes were not recorded. Bytes and FLOPs of the operator's kernels are computed from
    it."""
    given = (args.get(name, []) for name in ("Input Dims", "Input type", "Input Strides"))
    out = []
    for dims, kind, strides in itertools.zip_longest(*given):
        if kind in ELEMENT_BYTES and isinstance(dims, list) and dims and all(isinstance(x, int) for x in dims):
            stored = [size for size, stride in zip(dims, strides or [1] * len(dims)) if stride]
            out.append((dims, kind, ELEMENT_BYTES[kind] * math.prod(stored)))
    return out


def in_words(dims: Sequence[int], kind: str) -> str:
    """Writes an array as reports do, such as "bf16[8,128]". dims: its dimensions. kind: its dtype as torch names it,
    such as "c10::BFloat16"; one without a short name is written as it is. Kernels' shapes are made of such words."""
    return f"{SHORT_DTYPES.get(kind, kind)}[{','.join(map(str, dims))}]"


def attention_flops(name: str, dims: list[list[int]], args: dict[str, Any]) -> float:
    """FLOPs of one attention operator on [B, H, T, D] tensors: 2 * B * H * T * S * D (H: the query's heads, S: the
    number of keys) for each of 2 products in the forward and 5 in the backward, half of that if the call is causal; 0
    if query or key is missing or has not four dimensions. chrome.py books them on the operator's main kernel.

    Args:
      name: the ATen operator's; that of a backward ends with "_backward".
      dims: the dimensions of its array arguments: query, key and so on, in a backward after the output's gradient.
      args: the entry "args" of its trace event. Its "Concrete Inputs" says whether the call is causal; if it does not,
        or the place of is_causal in the operator's arguments is not known, the call counts as not causal.
    """
    backward = name.endswith("_backward")
    own = dims[1:3] if backward else dims[:2]
    if [len(one) for one in own] != [4, 4]:
        return 0.0
    query, key = own
    flops = (5 if backward else 2) * 2.0 * math.prod(query) * key[2]
    concrete = args.get("Concrete Inputs", [])
    place = next((i for part, i in _IS_CAUSAL.items() if part in name), None)
    causal = place is not None and place < len(concrete) and str(concrete[place]) == "True"
    return flops / 2 if causal else flops
