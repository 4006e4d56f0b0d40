"""Hugging Face folders for other programs: merged, in NF4, in FP8, in MXFP4; read back byte for byte.

Each takes a model whose tensors are made one at a time (models/files/weights.py), merged where there is an adapter."""

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

# Linears that vLLM multiplies in 16 bits whatever a file says, or that have too few outputs for its kernels. Published
# models in few bits leave them as they are.
KEPT = ("shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")


def write_merged(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """The model in its own dtype, what is in four bits too."""
    return write_planned(weights.dequantized(), folder, tokenizer, max_shard_bytes)


def write_bnb(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Linears in NF4 with double quantisation, as bitsandbytes writes them.

    What is not in NF4 is made twice: the lengths of quant_states, which hold a mean of each matrix as text, stand in
    the headers of files.
    """
    if weights.model.config.moe is not None:
        raise ValueError("bnb-4bit: transformers 5 has no experts in four bits, so it could not load the result")
    return write_planned(weights.quantized("nf4"), folder, tokenizer, max_shard_bytes)


def write_fp8(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Linears and experts in FP8 with a scale for each row, in compressed-tensors' layout, which vLLM loads; but for
    KEPT."""
    return write_planned(weights.quantized("fp8").dequantized(KEPT), folder, tokenizer, max_shard_bytes)


def write_mxfp4(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """gpt-oss with its experts in MXFP4, as it is published."""
    model = weights.model
    if model.config.family != "gpt_oss":
        raise ValueError(f"mxfp4: only gpt-oss is stored so, and this model is of the family {model.config.family!r}")
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
    """An experts' matrix [E, in, out], which files hold as [E, out, in]."""
    return MXFP4.encode(dense(make(), dtype).swapaxes(1, 2))


def _mxfp4_tensors(name: str, sizes: tuple[int, int, int]) -> dict[str, FileTensor]:
    """Blocks and scales of what _in_mxfp4 gives."""
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
    """Writes the folder and reads it back. planned: what is in it, by default what checkpoint_tensors says. extra: of
    config.json. loads: see verify."""
    planned = hf.checkpoint_tensors(weights) if planned is None else planned
    model = weights.model
    require_space(folder, file_plan.size_bytes(planned))
    says = hf.hf_config_of(model, tokenizer) | (extra or {})
    written = hf.write_checkpoint(folder, planned, says, max_shard_bytes)
    hf.write_companions(folder, model, tokenizer)
    verify(folder, written, model.config, loads)
    return []


def verify(folder: Path, written: Mapping[str, shards.Written], config: DecoderConfig, loads: bool = True) -> None:
    """Reads a folder and compares what config.json says, and every byte of every tensor, with what was made of the
    model: what is computed of them, and so its logits, are the same.

    Args:
      written: what write_checkpoint gave. Bytes are compared by checksums of what was made.
      loads: whether jaxtune loads such folders itself, so that tensors are compared with config.json.
    Raises:
      ArithmeticError: something is not as it was meant.
    """
    try:
        said = text_config(read_config(folder))
        if loads:
            hf.Pretrained(folder)
        else:
            said.pop("quantization_config")
        if config_from_hf(said) != config:
            raise ArithmeticError("config.json, read back, says another model than this one")
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
        raise ArithmeticError(f"{folder.name}: read back, not as the model has it: {', '.join(wrong[:8])}{more}")
