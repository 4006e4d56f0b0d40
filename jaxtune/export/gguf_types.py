"""The type in which each tensor of a GGUF file is stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from jaxtune.export import gguf_blocks
from jaxtune.export.gguf_tensors import Tensor
from jaxtune.models.files.gguf_names import HEADS

# {outtype: (gguf's name of the type, the number of general.file_type)}
OUTTYPES = {
    "f32": ("F32", 0),
    "f16": ("F16", 1),
    "bf16": ("BF16", 32),
    "q8_0": ("Q8_0", 7),
    "q6_k": ("Q6_K", 18),
    "q4_k_m": ("Q4_K", 15),
    "q4_0": ("Q4_0", 2),
}
# Types of 32 numbers a block that take the place of those of 256 where rows are no multiple of 256.
_SHORTER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_VALUES = ("attn_v.weight", "attn_qkv.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(.*)")


def stored_types(
    tensors: Sequence[Tensor], outtype: str, architecture: str, fields: Mapping[str, object]
) -> dict[str, str]:
    """{tensor: gguf's name of its type} in a file. In q4_0, embedding and head are Q8_0: they are read once a token,
    and their errors reach the logits undamped. In q4_k_m and q6_k types are llama-quantize's. Rows that are not whole
    blocks get a type of smaller blocks, or f16 if they are no multiple of 32.

      tensors: in the order of the file.
      outtype: the file's type, a key of OUTTYPES.
      architecture: gguf's name of it.
      fields: the file's metadata, by GGUF's keys.
    """
    kind = OUTTYPES[outtype][0]
    by_name = _k_type(tensors, kind, architecture, fields) if outtype in ("q4_k_m", "q6_k") else lambda _: kind
    types = {}
    for tensor in tensors:
        preferred = "Q8_0" if outtype == "q4_0" and tensor.name in HEADS else by_name(tensor.name)
        types[tensor.name] = "F32" if tensor.plain else _of_rows(preferred, tensor.shape[-1])
    return types


def is_short(tensor: Tensor, outtype: str) -> bool:
    """Whether the tensor's rows are not whole blocks of `outtype`."""
    block = gguf_blocks.BLOCK_TYPES.get(OUTTYPES[outtype][0])
    return block is not None and not tensor.plain and tensor.shape[-1] % block.numbers != 0


def not_trained(tensors: Sequence[Tensor], kinds: Mapping[str, str]) -> list[str]:
    """Tensors that a file rounds although QAT, which rounded others to its type, did not.

    tensors: of the file.
    kinds: {tensor: gguf's name of its type}.
    """
    if not any(tensor.grid for tensor in tensors):
        return []
    return [
        candidate.name
        for candidate in tensors
        if candidate.grid is None and kinds[candidate.name] in gguf_blocks.BLOCK_TYPES
    ]


def _of_rows(kind: str, columns: int) -> str:
    """`kind`, or for rows that are not whole blocks a type of 32, or F16."""
    if kind in gguf_blocks.BLOCK_TYPES and columns % gguf_blocks.block_size(kind):
        return _of_rows(_SHORTER[kind], columns) if kind in _SHORTER else "F16"
    return kind


def _k_type(
    tensors: Sequence[Tensor], kind: str, architecture: str, fields: Mapping[str, object]
) -> Callable[[str], str]:
    """llama.cpp's rule for q4_k_m and q6_k: a tensor's name -> its type, for rows of any length."""

    def number(key: str) -> int:
        value = fields.get(f"{architecture}.{key}")
        return value if isinstance(value, int) else 0

    layers, eight = number("block_count"), number("expert_count") == 8
    # Layers that share values, or take the keys for them, have no v: llama.cpp counts those that have one.
    layer_matches = [layer for tensor in tensors if (layer := _LAYER.fullmatch(tensor.name))]
    with_v = sorted(int(layer[1]) for layer in layer_matches if layer[2] in _VALUES)
    grouped = number("attention.head_count") != number("attention.head_count_kv")
    large = layers == 80 and not eight and (architecture == "qwen2" or (architecture == "llama" and grouped))
    head = HEADS[1] if any(tensor.name == HEADS[1] for tensor in tensors) else HEADS[0]

    def of(name: str) -> str:
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return "Q6_K" if name == head else kind
        index, suffix = int(layer[1]), layer[2]
        rank, count = (with_v.index(index), len(with_v)) if suffix in _VALUES else (index, layers)
        sensitive = rank < count // 8 or rank >= 7 * count // 8 or (rank - count // 8) % 3 == 2
        preferred = "Q6_K" if sensitive else kind
        if suffix in _VALUES:
            return "Q8_0" if eight else "Q5_K" if large and preferred == "Q4_K" else preferred
        if suffix == "attn_k.weight" and eight:
            return "Q8_0"
        if suffix == "attn_output.weight" and eight and kind == "Q4_K":
            return "Q5_K"
        return preferred if suffix.startswith("ffn_down") else kind

    return of
