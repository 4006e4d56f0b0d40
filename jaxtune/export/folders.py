"""Hugging Face folders for other programs: merged, in NF4, in FP8, in MXFP4; read back byte for byte."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models import hf, shards
from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.folders import require_space
from jaxtune.models.lora import experts
from jaxtune.models.model_folder import read_config, weight_entries
from jaxtune.models.quant import dequantize, is_quantized, quantize, stored_in
from jaxtune.models.registry import config_from_hf, text_config
from jaxtune.pallas.formats import MXFP4, dense

# Linears that vLLM multiplies in 16 bits whatever a file says, or that have too few outputs for its kernels. Published
# models in few bits leave them as they are.
KEPT = ("shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba")


def write_merged(model: Decoder, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """The model in its own dtype, what is in four bits too."""
    model = dequantize(model) if is_quantized(model) else model
    return write_planned(model, folder, tokenizer, max_shard_bytes, hf.checkpoint_tensors(model))


def write_bnb(model: Decoder, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Linears in NF4 with double quantisation, as bitsandbytes writes them."""
    if model.config.moe is not None:
        raise ValueError("bnb-4bit: transformers 5 has no experts in four bits, so it could not load the result")
    model = _stored_in(model, "nf4")
    return write_planned(model, folder, tokenizer, max_shard_bytes, hf.checkpoint_tensors(model))


def write_fp8(model: Decoder, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Linears and experts in FP8 with a scale for each row, in compressed-tensors' layout, which vLLM loads; but for
    KEPT."""
    model = dequantize(_stored_in(model, "fp8"), KEPT)
    return write_planned(model, folder, tokenizer, max_shard_bytes, hf.checkpoint_tensors(model))


def _stored_in(model: Decoder, load_in: str) -> Decoder:
    """The model in a format of quant.LOAD_IN; as it is, where it is in that already."""
    if stored_in(model) == load_in:
        return model
    return quantize(dequantize(model) if is_quantized(model) else model, load_in)


def write_mxfp4(model: Decoder, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """gpt-oss with its experts in MXFP4, as it is published."""
    if model.config.family != "gpt_oss":
        raise ValueError(f"mxfp4: only gpt-oss is stored so, and this model is of the family {model.config.family!r}")
    planned = hf.checkpoint_tensors(model)
    for name, matrix in experts(model):
        planned[name] = _mxfp4_tensors(name, functools.partial(dense, matrix.stored_weight, model.dtype), matrix.sizes)
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    }  # fmt: skip
    return write_planned(model, folder, tokenizer, max_shard_bytes, planned, {"quantization_config": quantization})


def _mxfp4_tensors(name: str, weight, sizes: tuple[int, int, int]) -> dict[str, tuple]:
    """Blocks and scales of an experts' matrix [E, in, out], which files hold as [E, out, in]."""
    count, out_size, in_size = sizes

    @functools.cache
    def encoded() -> MXFP4:
        return MXFP4.encode(weight().swapaxes(1, 2))

    def part(which: str):
        packed = encoded()
        if which == "scales":
            encoded.cache_clear()  # the second of the two that a file asks for
            return packed.scales
        return packed.codes.reshape(count, out_size, in_size // 32, 16)

    byte = np.dtype(np.uint8)
    return {
        f"{name}_blocks": ((count, out_size, in_size // 32, 16), byte, functools.partial(part, "blocks")),
        f"{name}_scales": ((count, out_size, in_size // 32), byte, functools.partial(part, "scales")),
    }


def write_planned(
    model: Decoder,
    folder: Path,
    tokenizer: Any,
    max_shard_bytes: int,
    planned: hf.Planned,
    extra: dict | None = None,
    loads: bool = True,
) -> list[str]:
    """Writes the folder and reads it back. extra: of config.json. loads: see verify."""
    require_space(folder, hf.checkpoint_bytes(planned))
    hf.write_checkpoint(folder, planned, hf.hf_config_of(model, tokenizer) | (extra or {}), max_shard_bytes)
    hf.write_companions(folder, model, tokenizer)
    verify(folder, planned, model.config, loads)
    return []


def verify(folder: Path, planned: hf.Planned, config: DecoderConfig, loads: bool = True) -> None:
    """Reads a folder and compares what config.json says, and every byte of every tensor, with the model's: what is
    computed of them, and so its logits, are the same.

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
        wanted = {name: part for parts in planned.values() for name, part in parts.items()}
        wrong = sorted(wanted.keys() ^ entries.keys())
        for name, (shape, dtype, fetch) in wanted.items():
            if name in entries and not _same(entries[name], shape, dtype, fetch):
                wrong.append(name)
    except (ValueError, OSError) as error:
        raise ArithmeticError(f"read back, the folder cannot be loaded: {error}") from error
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ArithmeticError(f"{folder.name}: read back, not as the model has it: {', '.join(wrong[:8])}{more}")


def _same(entry: shards.TensorEntry, shape: tuple[int, ...], dtype: np.dtype, fetch) -> bool:
    expected = np.ascontiguousarray(jax.device_get(fetch()))
    found = shards.read_tensor(entry)
    if found.shape != tuple(shape) or found.dtype != jnp.dtype(dtype):
        return False
    return np.array_equal(found.reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8))
