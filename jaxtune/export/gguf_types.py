"""The type in which each tensor of a GGUF file is stored: OUTTYPES, from which the user chooses one for a file, and
`stored_types`, by which exports give each tensor its type: float32 if it must stay so, else one by the outtype and, in
q4_k_m and q6_k, by llama.cpp's rules (`_k_type`), or one of smaller blocks that fit its rows (`_of_rows`). `is_short`
and `not_trained` find tensors about which the user gets a note."""

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
    """The type in which each tensor is stored in a file of type `outtype`, as {tensor's name: gguf's name of the type}.

    In q4_0, embedding and head are stored in Q8_0: they are read once a token, and their errors reach the logits
    undamped. In q4_k_m and q6_k, the types are those that llama-quantize of llama.cpp gives to the same tensors. A
    tensor whose rows are not whole blocks gets a type of smaller blocks, or f16 if its rows are no multiple of 32
    either. A tensor that must stay in float32 (Tensor.plain) has F32. gguf_file.write calls it, and the export before,
    for its notes and the size that the disk needs.

    Args:
      tensors: all tensors of the file.
      outtype: one of OUTTYPES.
      architecture: general.architecture of the file.
      fields: the file's metadata, of which `_k_type` reads the numbers of layers, heads and experts.
    """
    kind = OUTTYPES[outtype][0]
    by_name = _k_type(tensors, kind, architecture, fields) if outtype in ("q4_k_m", "q6_k") else lambda _: kind
    found = {}
    for tensor in tensors:
        wanted = "Q8_0" if outtype == "q4_0" and tensor.name in HEADS else by_name(tensor.name)
        found[tensor.name] = "F32" if tensor.plain else _of_rows(wanted, tensor.shape[-1])
    return found


def is_short(tensor: Tensor, outtype: str) -> bool:
    """Whether a tensor cannot be stored in the type that `outtype` names, because its rows are not whole blocks of that
    type; False for types without blocks and for tensors that stay in float32. The user gets a note about such tensors.
    outtype: the type of the file's weights, one of OUTTYPES."""
    block = gguf_blocks.BLOCK_TYPES.get(OUTTYPES[outtype][0])
    return block is not None and not tensor.plain and tensor.shape[-1] % block.numbers != 0


def not_trained(tensors: Sequence[Tensor], kinds: Mapping[str, str]) -> list[str]:
    """Names of the tensors that a file rounds to a quantised type though quantisation-aware training, which rounded
    others to the type of the file, did not round them, such as embedding and head. The export names them in a note to
    the user. Empty without such training, and for files of plain numbers. kinds: {tensor's name: gguf's name of the
    type in which it is stored}."""
    if not any(tensor.grid for tensor in tensors):
        return []
    return [each.name for each in tensors if each.grid is None and kinds[each.name] in gguf_blocks.BLOCK_TYPES]


def _of_rows(kind: str, columns: int) -> str:
    """The type in which rows of this many columns are stored where the type `kind` is wanted: `kind`, if the rows are
    whole blocks of it or it has no blocks; else, for types with blocks of 256, one with blocks of 32; else F16. Both
    are gguf's names."""
    if kind in gguf_blocks.BLOCK_TYPES and columns % gguf_blocks.block_size(kind):
        return _of_rows(_SHORTER[kind], columns) if kind in _SHORTER else "F16"
    return kind


def _k_type(
    tensors: Sequence[Tensor], kind: str, architecture: str, fields: Mapping[str, object]
) -> Callable[[str], str]:
    """llama.cpp's rule for files whose default type is `kind`, Q4_K (q4_k_m) or Q6_K: a function from a tensor's name
    to its type, for rows of any length.

    The head has Q6_K, and so has the embedding where it is the head. In q4_k_m the matrices of v, or q/k/v in one, and
    down have Q6_K in the first and last eighth of the layers that have them and every third between. In the 70B models,
    whose v is small, v has at least Q5_K. In models of eight experts k and v have Q8_0, in q4_k_m and in q6_k; the
    attention's output has Q5_K in q4_k_m only.

    Args:
      tensors: all tensors of the file, which show whether the head is the embedding.
      kind: the default type.
      architecture: general.architecture of the file, the prefix of its keys.
      fields: the file's metadata, which has the numbers of layers, heads and experts.
    """

    def number(key: str) -> int:
        found = fields.get(f"{architecture}.{key}")
        return found if isinstance(found, int) else 0

    layers, eight = number("block_count"), number("expert_count") == 8
    # Layers that share values, or take the keys for them, have no v: llama.cpp counts those that have one.
    parts = [layer for tensor in tensors if (layer := _LAYER.fullmatch(tensor.name))]
    with_v = sorted(int(layer[1]) for layer in parts if layer[2] in _VALUES)
    grouped = number("attention.head_count") != number("attention.head_count_kv")
    large = layers == 80 and not eight and (architecture == "qwen2" or (architecture == "llama" and grouped))
    head = HEADS[1] if any(tensor.name == HEADS[1] for tensor in tensors) else HEADS[0]

    def of(name: str) -> str:
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return "Q6_K" if name == head else kind
        at, part = int(layer[1]), layer[2]
        place, count = (with_v.index(at), len(with_v)) if part in _VALUES else (at, layers)
        sensitive = place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2
        more = "Q6_K" if sensitive else kind
        if part in _VALUES:
            return "Q8_0" if eight else "Q5_K" if large and more == "Q4_K" else more
        if part == "attn_k.weight" and eight:
            return "Q8_0"
        if part == "attn_output.weight" and eight and kind == "Q4_K":
            return "Q5_K"
        return more if part.startswith("ffn_down") else kind

    return of
