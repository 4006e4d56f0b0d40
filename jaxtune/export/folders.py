"""Export as Hugging Face folders for other programs: merged, in NF4, in FP8 and in MXFP4.

Each function takes weights that are made one tensor at a time (models/files/weights.py), merged where the model has an
adapter, and reads what it wrote back byte for byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtune.models import hf
from jaxtune.models.config import DecoderConfig
from jaxtune.models.files import byte_files, file_plan, shards
from jaxtune.models.files.file_plan import FileTensor, Group, Piece, Planned
from jaxtune.models.files.folders import require_space
from jaxtune.models.files.model_folder import read_config, weight_entries
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.lora import experts
from jaxtune.models.registry import config_from_hf, text_config
from jaxtune.pallas.formats import MXFP4, dense
from jaxtune.system import terminal

# Linears that stay in 16 bits: vLLM multiplies them in 16 bits whatever a file says, or they have too few outputs for
# its kernels. Published quantised models leave them in 16 bits too.
KEPT = ("shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")


def write_merged(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes the model in its own dtype; weights in four bits are decoded."""
    return write_planned(weights.dequantized(), folder, tokenizer, max_shard_bytes)


def write_bnb(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes linears in NF4 with double quantisation, as bitsandbytes stores them.

    Weights that are not yet in NF4 are made twice: files' headers contain the lengths of the quant_states, which
    contain a mean of each matrix as text.

    Raises:
      ValueError: the model has experts, which transformers 5 cannot load in four bits.
    """
    if weights.model.config.moe is not None:
        raise ValueError("bnb-4bit: transformers 5 has no experts in four bits, so it could not load the result")
    return write_planned(weights.quantized("nf4"), folder, tokenizer, max_shard_bytes)


def write_fp8(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes linears and experts in FP8 with a scale for each row, in compressed-tensors' layout, which vLLM loads.
    Linears of KEPT stay in 16 bits."""
    return write_planned(weights.quantized("fp8").dequantized(KEPT), folder, tokenizer, max_shard_bytes)


def write_mxfp4(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes gpt-oss with its experts in MXFP4, as it is published.

    Raises:
      ValueError: a model of another family.
    """
    model = weights.model
    if model.config.family != "gpt_oss":
        raise ValueError(f"mxfp4: only gpt-oss can be written, and this model is of the family {model.config.family!r}")
    planned, variables = hf.checkpoint_tensors(weights), tensors_of(model)
    for name, matrix in experts(model):
        make = functools.partial(_in_mxfp4, weights.maker(name, variables[name]), model.dtype)
        planned[name] = Group(make, (Piece(_mxfp4_tensors(name, matrix.sizes)),))
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    says = {"quantization_config": quantization}
    return write_planned(weights, folder, tokenizer, max_shard_bytes, planned, says)


def _in_mxfp4(make: Callable[[], Any], dtype: str) -> MXFP4:
    """An experts' matrix in MXFP4; `make` gives it as [E, in, out], files store it as [E, out, in]."""
    return MXFP4.encode(dense(make(), dtype).swapaxes(1, 2))


def _mxfp4_tensors(name: str, sizes: tuple[int, int, int]) -> dict[str, FileTensor]:
    """The blocks and scales that a file stores for a matrix from `_in_mxfp4`, by name."""
    count, out_size, in_size = sizes
    byte, blocks = np.dtype(np.uint8), (count, out_size, in_size // 32, 16)
    return {
        f"{name}_blocks": FileTensor(blocks, byte, lambda packed: packed.codes.reshape(blocks)),
        f"{name}_scales": FileTensor(blocks[:3], byte, lambda packed: packed.scales),
    }


def write_planned(
    weights: Weights,
    folder: Path,
    tokenizer: Any,
    max_shard_bytes: int,
    planned: Planned | None = None,
    extra: dict | None = None,
    loads: bool = True,
) -> list[str]:
    """Writes a folder and reads it back.

    Args:
      weights: the model's weights.
      folder: an empty folder.
      tokenizer: written with the model, if given.
      max_shard_bytes: weights above this size are divided into shards.
      planned: the files' tensors; None: what checkpoint_tensors gives for the model.
      extra: entries that are added to config.json.
      loads: see `verify`.
    Returns:
      notes for the user.
    """
    planned = hf.checkpoint_tensors(weights) if planned is None else planned
    model = weights.model
    require_space(folder, file_plan.size_bytes(planned))
    says = hf.hf_config_of(model, tokenizer) | (extra or {})
    written = hf.write_checkpoint(folder, planned, says, max_shard_bytes)
    hf.write_companions(folder, model, tokenizer)
    verify(folder, written, model.config, loads)
    return []


def verify(folder: Path, written: Mapping[str, shards.Written], config: DecoderConfig, loads: bool = True) -> None:
    """Reads a folder back and compares config.json, and every byte of every tensor by checksum, with what was made of
    the model. Equal files compute equal logits.

    Args:
      folder: the folder.
      written: what write_checkpoint returned, with the checksums of what was made.
      config: the model's.
      loads: whether jaxtune can load such folders itself, so that tensors are also compared with config.json.
    Raises:
      ArithmeticError: something differs.
    """
    try:
        said = text_config(read_config(folder))
        if loads:
            hf.Pretrained(folder)
        else:
            said.pop("quantization_config")
        if config_from_hf(said) != config:
            raise ArithmeticError("config.json, read back, describes another model than this one")
        entries = weight_entries(folder)
        there = [name for name in written if name in entries]
        with terminal.progress("reading it back", sum(entries[name].size_bytes for name in there)) as advanced:
            same = byte_files.all_of(lambda name: shards.is_as_written(entries[name], written[name], advanced), there)
    except (ValueError, OSError) as error:
        raise ArithmeticError(f"read back, the folder cannot be loaded: {error}") from error
    wrong = sorted(written.keys() ^ entries.keys())
    wrong += [name for name, as_written in zip(there, same, strict=True) if not as_written]
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ArithmeticError(f"{folder.name}: what was read back differs from the model: {', '.join(wrong[:8])}{more}")
