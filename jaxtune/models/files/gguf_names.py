"""Families in GGUF files: what llama.cpp's architectures compute, the names of their tensors, the order of rows, and
rotary factors that are tensors.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np

from jaxtune.models.config import DecoderConfig, RopeConfig
from jaxtune.models.rope import rotary_frequencies

QKV, OUT, MLP = "q/k/v", "attention output", "MLP"  # projections that may have biases
# The marks of thoughts, tool calls and their results in Gemma 4's answers.
_GEMMA4_SHOWN = (
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)
_QUERY_OR_KEY = re.compile(r"\.self_attn\.([qk])_proj(\.|$)")
GATE_UP = ".experts.gate_up_proj"
# llama.cpp stores a factor of a router or of experts beside a matrix: {the factor's name: the matrix's module}.
_FACTORS = {"router.scale": "router.proj", "router.per_expert_scale": "experts.down_proj"}
ROPE_FREQUENCIES, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
HEADS = ("token_embd.weight", "output.weight")
_UNTURNED = 1e30  # llama.cpp divides a pair's angle by it, so that the pair is not rotated


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How llama.cpp ("it" below) computes the models of one family, where its architectures differ."""

    name: str  # general.architecture of the file
    # rotary pairs are the neighbours (2i, 2i + 1) of a head, and those of Hugging Face's model are not, so rows of q
    # and k are reordered; False: the pairs are the same in both
    permuted: bool = False
    # projections whose biases it reads, of "q/k/v", "attention output" and "MLP"; a model with other biases is refused
    biases: frozenset[str] = frozenset()
    # layers whose number, from 1, is a multiple of it have full attention, and the others a sliding window; None: it
    # has no windows, or the file says which layers have one (by_layer)
    period: int | None = None
    split_heads: bool = False  # it assumes that a head has hidden_size / num_attention_heads dimensions
    ropes: tuple[str, ...] = ("default", "linear", "yarn")  # kinds of RopeConfig that it computes
    own_output: bool = False  # the file must contain the head as a tensor, even if it is tied to the embedding
    tied_output: bool = False  # the head must be tied to the embedding
    # with this number of layers, scores are scaled by (hidden_size / heads)^-0.5 in place of head_dim^-0.5 (Gemma 27B)
    wide_scale_layers: int | None = None
    # layers whose number, from 1, is a multiple of it have no position encoding; None: all layers have one
    nope_period: int | None = None
    # the rotary embedding may cover only the first dimensions of each head; else it covers all, except in the kind
    # "proportional"
    partial: bool = False
    factors: bool = False  # it reads factors on embedding, scores, layers and logits (that of the logits divides them)
    gemma: bool = False  # the embedding is scaled by the square root of its size, and the activation is GELU, not SiLU
    fused_experts: bool = False  # gate and up of experts are one tensor of the file, gate first
    # the file says of each layer its heads, window and MLP, as in Gemma 4; no pattern is hard-coded. Scores
    # are then not scaled, and logits may have a soft cap
    by_layer: bool = False
    # (llama.cpp's key of an end token, the token's text), for end tokens it does not recognise by text
    ends: tuple[tuple[str, str], ...] = ()
    # texts of special tokens that it is to write into an answer, where whoever reads thoughts and tool calls finds them
    shown_tokens: tuple[str, ...] = ()


_LLAMA = Architecture(
    "llama", permuted=True, biases=frozenset({QKV, OUT, MLP}), ropes=("default", "linear", "llama3", "yarn")
)
_GEMMA4 = Architecture(
    "gemma4",
    ropes=("default", "proportional"),
    gemma=True,
    fused_experts=True,
    by_layer=True,
    ends=(("eot", "<turn|>"),),
    shown_tokens=_GEMMA4_SHOWN,
)
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Architecture("qwen2", biases=frozenset({QKV}), split_heads=True),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe"),
    "qwen2_moe": Architecture("qwen2moe", biases=frozenset({QKV}), split_heads=True, own_output=True),
    "gemma": Architecture("gemma", tied_output=True, gemma=True),
    "gemma2": Architecture("gemma2", period=2, tied_output=True, wide_scale_layers=46, ropes=("default",), gemma=True),
    "gemma3_text": Architecture("gemma3", period=6, wide_scale_layers=62, ropes=("default", "linear"), gemma=True),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "phi3": Architecture("phi3", split_heads=True, ropes=("default", "longrope"), partial=True),
    "olmo2": Architecture("olmo2", split_heads=True, own_output=True),
    "gpt_oss": Architecture("gpt-oss", biases=frozenset({QKV, OUT}), period=2, own_output=True),
    "smollm3": Architecture("smollm3", permuted=True, split_heads=True, nope_period=4),
    "seed_oss": Architecture("seed_oss", biases=frozenset({QKV})),
    "granite": dataclasses.replace(_LLAMA, name="granite", factors=True),
    "glm4": Architecture(
        "glm4", biases=frozenset({QKV}), partial=True, ends=(("eot", "<|user|>"), ("eom", "<|observation|>"))
    ),
    "cohere2": Architecture("cohere2", period=4, nope_period=4, split_heads=True, tied_output=True, ropes=("default",)),
}


class Names:
    """llama.cpp's names of Hugging Face's tensors, by the tables of the gguf package."""

    def __init__(self, arch: Architecture, layers: int):
        import gguf

        architecture_ids = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self._map = gguf.get_tensor_name_map(architecture_ids[arch.name], layers)

    def find(self, name: str) -> str | None:
        """llama.cpp's name or None; without .weight or .bias, of a weight or factor."""
        suffix = next((end for end in (".weight", ".bias") if name.endswith(end)), "")
        module = name.removesuffix(suffix)
        for factor, matrix in _FACTORS.items():
            if module.endswith(f".{factor}"):
                module, suffix = module.removesuffix(factor) + matrix, ".scale"
        gguf_name = self._map.get_name(module)
        return None if gguf_name is None else gguf_name + (suffix or ".weight")

    def __call__(self, name: str) -> str:
        """llama.cpp's name; raises ValueError if it has none."""
        gguf_name = self.find(name)
        if gguf_name is None:
            raise ValueError(f"gguf: {name} has no name in llama.cpp's files")
        return gguf_name


def interleaved[Rows: (np.ndarray, jax.Array)](array: Rows, heads: int) -> Rows:
    """Rows [heads * D, ...] of a q or k projection, such that pairs (i, i + D / 2) of a head become neighbours."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def in_halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Undoes `interleaved`."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def heads_of(config: DecoderConfig, arch: Architecture, name: str) -> int | None:
    """The number of heads of a q or k tensor whose rows llama.cpp has `interleaved`; None for all other tensors.

    config: of the model.
    arch: its architecture in GGUF.
    name: Hugging Face's name of the tensor.
    """
    match = _QUERY_OR_KEY.search(name)
    if match is None or not arch.permuted:
        return None
    return config.num_heads if match[1] == "q" else config.num_kv_heads


def gate_and_up(alternating: bool, half: int) -> tuple[slice, slice]:
    """(rows of gate, rows of up) in gate_up_proj, alternating as in gpt-oss or gate's `half` rows first."""
    return (slice(0, None, 2), slice(1, None, 2)) if alternating else (slice(None, half), slice(half, None))


def _frequency_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32[head size / 2], divisors of the pairs' angles in Gemma 4's global layers."""
    half = (rope.head_dim or head_dim) // 2
    turning = int(rope.partial_rotary_factor * half)
    return np.asarray([rope.factor] * turning + [_UNTURNED] * (half - turning), np.float32)


def rope_factors(config: DecoderConfig) -> dict[str, np.ndarray]:
    """{tensor: divisors of the rotary frequencies, float32[rotary dims / 2]} (proportional: [head size / 2])."""
    rope = config.rotary[0]
    if rope.kind == "proportional":
        return {ROPE_FREQUENCIES: _frequency_factors(rope, config.head_dim)}
    if rope.kind == "longrope":
        return {
            ROPE_LONG: np.asarray(rope.long_factor, np.float32),
            ROPE_SHORT: np.asarray(rope.short_factor, np.float32),
        }
    if rope.kind == "llama3":
        plain = dataclasses.replace(rope, kind="default")
        base = rotary_frequencies(plain, config.head_dim, config.max_position_embeddings).short
        scaled = rotary_frequencies(rope, config.head_dim, config.max_position_embeddings).short
        return {ROPE_FREQUENCIES: (base / scaled).astype(np.float32)}
    return {}
