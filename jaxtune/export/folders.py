"""Export as Hugging Face folders for other programs: merged, or in a quantised format.

Each function takes weights that are made one tensor at a time (models/files/weights.py), merged where the model has an
adapter, and reads what it wrote back byte for byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtune.models import hf
from jaxtune.models.config import DecoderConfig
from jaxtune.models.files import byte_files, file_plan, shards
from jaxtune.models.files.file_plan import Group, Piece, Planned
from jaxtune.models.files.folders import require_space
from jaxtune.models.files.model_folder import read_config, weight_entries
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.lora import experts
from jaxtune.models.registry import config_from_hf, text_config
from jaxtune.pallas.formats import FORMATS, Format, Stored, dense
from jaxtune.system import terminal


def write_merged(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes the model as a Hugging Face folder in its own dtype; quantised weights are decoded to it. tokenizer:
    written with it, if given; max_shard_bytes: larger weights are divided into shards. Returns notes for the user."""
    return write_planned(weights.dequantized(), folder, tokenizer, max_shard_bytes)


def write_stored(to: Format, weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes a Hugging Face folder with the linears and experts in the quantised format `to`, in the way that the
    format's `export` declares. The other arguments and the result are those of write_planned.

    If a file's header contains values of a weight (double-quantised NF4: a mean of each matrix, as text), weights that
    are not yet in the format are made twice.

    Raises:
      ValueError: the model has experts, and the format's readers do not support them.
    """
    assert to.export is not None
    if to.export.without_experts is not None and weights.model.config.moe is not None:
        raise ValueError(f"{to.export.name}: {to.export.without_experts}")
    changed = weights.quantized(to.name)
    return write_planned(
        changed.dequantized(to.export.keeps) if to.export.keeps else changed, folder, tokenizer, max_shard_bytes
    )


def write_mxfp4(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes gpt-oss as a Hugging Face folder with its experts in MXFP4, as it is published. Arguments and result are
    those of write_planned.

    Raises:
      ValueError: a model of another family.
    """
    model = weights.model
    if model.config.family != "gpt_oss":
        raise ValueError(f"mxfp4: only gpt-oss can be written, and this model is of the family {model.config.family!r}")
    planned, variables = hf.checkpoint_tensors(weights), tensors_of(model)
    (layout,) = FORMATS["mxfp4"].layouts
    for name, matrix in experts(model):
        make = functools.partial(_in_mxfp4, weights.maker(name, variables[name]), model.dtype)
        count, out_size, in_size = matrix.sizes
        shapes = jax.eval_shape(_encoded_transposed, jax.ShapeDtypeStruct((count, in_size, out_size), model.dtype))
        tensors = {name + key: tensor for key, tensor in layout.tensors(shapes, None).items()}
        planned[name] = Group(make, (Piece(tensors),))
    says = {"quantization_config": layout.config((), [], model.dtype)}
    return write_planned(weights, folder, tokenizer, max_shard_bytes, planned, says)


def _in_mxfp4(make: Callable[[], Any], dtype: str) -> Stored:
    """An experts' matrix in MXFP4; `make` gives it as [E, in, out], files store it as [E, out, in]."""
    return _encoded_transposed(dense(make(), dtype))


def _encoded_transposed(array: jax.Array) -> Stored:
    """An array [E, in, out] encoded in MXFP4 as [E, out, in]."""
    return FORMATS["mxfp4"].encode(array.swapaxes(1, 2))


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
      loads: whether jaxtune can load such a folder itself, so that the check of the written files may load it.
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
