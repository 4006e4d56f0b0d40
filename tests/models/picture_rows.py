"""Packed rows of documents with pictures, made by the words of the contract, and a tiny model that reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxtune.models.vision.pictures import Pictures

MERGE, NUMBERS = 2, 3 * 2 * 4 * 4  # patches of a feature's side; numbers of a patch
PICTURE = 120  # the picture token

HF = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "vision_config": {
        "model_type": "qwen3_5_vision",
        "depth": 2,
        "hidden_size": 48,
        "num_heads": 2,  # heads of 24: no power of two, as 72 is none
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 104,
        "in_channels": 3,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": MERGE,
        "out_hidden_size": 64,
        "num_position_embeddings": 49,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    },
    "image_token_id": PICTURE,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
    "tie_word_embeddings": False,
    "dtype": "float32",
}

# Full attention alone, without gates, and features after two of the tower's layers for the first two of the text's.
QWEN3_VL = HF | {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "vision_config": HF["vision_config"]
    | {"model_type": "qwen3_vl_vision", "depth": 3, "deepstack_visual_indexes": [0, 2]},
}

# Of the E2B's kind: clamped linears in the tower, a mean of 3 x 3 patches, embeddings of each layer, shared keys.
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 128,
        "vocab_size_per_layer_input": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "global_head_dim": 64,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 5.0,
        "hidden_size_per_layer_input": 24,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "pad_token_id": 125,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 48,
        "intermediate_size": 104,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 40,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "use_clipped_linears": True,
        "standardize": True,
    },
    "audio_config": None,
    "image_token_id": PICTURE,
    "video_token_id": 1000,  # beyond what a tiny model writes
    "audio_token_id": 1001,
    "boi_token_id": 123,
    "eoi_token_id": 124,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


# Without a tower; in its layers with a window a picture's tokens see each other.
UNIFIED = GEMMA4 | {
    "architectures": ["Gemma4UnifiedForConditionalGeneration"],
    "model_type": "gemma4_unified",
    "text_config": {
        key: value
        for key, value in GEMMA4["text_config"].items()
        if key not in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "use_double_wide_mlp")
    }
    | {
        "model_type": "gemma4_unified_text",
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "model_type": "gemma4_unified_vision",
        "patch_size": 2,
        "pooling_kernel_size": 2,
        "mm_embed_dim": 56,
        "output_proj_dims": 56,
        "mm_posemb_size": 40,
        "rms_norm_eps": 1e-6,
    },
}
# As the 31B: a tower without clamped linears, and the same mask.
WIDE = UNIFIED | {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": UNIFIED["text_config"] | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0},
    "vision_config": GEMMA4["vision_config"] | {"use_clipped_linears": False, "num_key_value_heads": 2},
}


# In all its layers a picture's tokens see each other; every picture has 6 x 6 patches and 9 features.
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_theta": 100000.0,
        "rope_local_base_freq": 1000.0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 48,
        "intermediate_size": 104,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 24,
        "patch_size": 4,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 9,
    "image_token_index": PICTURE,
    "boi_token_index": 123,
    "eoi_token_index": 124,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


@dataclasses.dataclass(frozen=True)
class Form:
    """How a family's pictures are cut and counted."""

    merge: int
    numbers: int  # of a patch
    axes: int = 1  # of positions
    sides: tuple[int, int] = (1, 3)  # the fewest and most features of a picture's side


QWEN, OF_GEMMA4, OF_UNIFIED = Form(MERGE, NUMBERS, 3), Form(3, 3 * 4 * 4), Form(1, 3 * 4 * 4)
OF_GEMMA3 = Form(2, 3 * 4 * 4, sides=(3, 3))

Piece = int | np.ndarray  # a token, or a picture's patches float32[height, width, NUMBERS]


def grid_of(sides: tuple[int, int], form: Form) -> tuple[int, int]:
    """Patches of a picture of as many features a side, as near as it may have."""
    least, most = form.sides
    height, width = (form.merge * min(max(side, least), most) for side in sides)
    return height, width


def picture(draw: np.random.Generator, height: int, width: int, form: Form = QWEN) -> np.ndarray:
    return draw.standard_normal((height, width, form.numbers), np.float32)


def document(draw: np.random.Generator, *shape: int | tuple[int, int], form: Form = QWEN) -> list[Piece]:
    """document(draw, 3, (4, 2), 1): three random tokens, a picture of 4 x 2 patches, a token."""
    pieces: list[Piece] = []
    for part in shape:
        pieces += draw.integers(1, PICTURE, part).tolist() if isinstance(part, int) else [picture(draw, *part, form)]
    return pieces


def in_blocks(array: np.ndarray, form: Form = QWEN) -> np.ndarray:
    """[height, width, ...] -> [height * width, ...] in blocks of merge x merge."""
    (height, width, *numbers), merge = array.shape, form.merge
    blocks = array.reshape(height // merge, merge, width // merge, merge, *numbers).swapaxes(1, 2)
    return blocks.reshape(height * width, *numbers)


def packed(
    rows: Sequence[Sequence[Sequence[Piece]]],
    length: int,
    patches: int,
    most: int | None = None,
    form: Form = QWEN,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Pictures]:
    """(tokens, segment_ids, positions, pictures) of rows of documents, one token and one patch at a time.

    length, patches: the room of a row. most: Pictures.max_pictures.
    """
    count, merge = len(rows), form.merge
    tokens, segments = np.zeros((2, count, length), np.int32)
    positions, features = np.zeros((count, length, 3), np.int32), np.full((count, length), -1, np.int32)
    values = np.zeros((count, patches, form.numbers), np.float32)
    numbers, grids, coordinates = (np.zeros((count, patches, *tail), np.int32) for tail in ((), (2,), (2,)))
    for row, documents in enumerate(rows):
        at = patch = seen = 0
        for number, pieces in enumerate(documents, 1):
            now = 0
            for piece in pieces:
                if isinstance(piece, int):
                    tokens[row, at], segments[row, at], positions[row, at] = piece, number, now
                    at, now = at + 1, now + 1
                    continue
                height, width = piece.shape[:2]
                place, seen = slice(patch, patch + height * width), seen + 1
                index = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), -1)
                values[row, place], coordinates[row, place] = in_blocks(piece, form), in_blocks(index, form)
                numbers[row, place], grids[row, place] = seen, (height, width)
                for block_row in range(height // merge):
                    for block_column in range(width // merge):
                        tokens[row, at], segments[row, at] = PICTURE, number
                        positions[row, at] = now, now + block_row, now + block_column
                        if form.axes == 1:
                            positions[row, at], now = now, now + 1
                        features[row, at] = patch // merge**2
                        at, patch = at + 1, patch + merge**2
                now += max(height, width) // merge if form.axes > 1 else 0
    positions = positions if form.axes > 1 else positions[..., 0]
    return tokens, segments, positions, Pictures(values, numbers, grids, coordinates, features, most)


def size(pieces: Sequence[Piece], form: Form = QWEN) -> tuple[int, int]:
    """(tokens, patches) of a document."""
    pictures = [piece.shape[0] * piece.shape[1] for piece in pieces if not isinstance(piece, int)]
    return len(pieces) - len(pictures) + sum(pictures) // form.merge**2, sum(pictures)
