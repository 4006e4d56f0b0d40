"""Exports as Hugging Face folders. Weights make one tensor at a time and merge an adapter on the way; what was written
is read back, and every byte compared by checksum.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtune.export import grids
from jaxtune.models import hf
from jaxtune.models.config import DecoderConfig
from jaxtune.models.files import byte_files, file_plan, shards
from jaxtune.models.files.file_plan import Group, Piece, Planned
from jaxtune.models.files.model_folder import read_config, weight_entries
from jaxtune.models.files.quant import stored_in
from jaxtune.models.files.weights import Weights, not_whole, tensors_of
from jaxtune.models.lora import experts, matrices, name_matches
from jaxtune.models.registry import config_from_hf, text_config
from jaxtune.pallas.formats import FORMATS, Format, Layout, Stored
from jaxtune.pallas.formats.layout import Config
from jaxtune.system import terminal
from jaxtune.system.disk import require_room


def write_merged(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes the model in its own dtype, quantised weights decoded. Errors as of write_planned.

    weights: the model, adapters merged.
    folder: exists and is empty.
    tokenizer: a Hugging Face tokenizer; None: none is written.
    max_shard_bytes: of one file.
    """
    return write_planned(weights.dequantized(), folder, tokenizer, max_shard_bytes)


def write_stored(
    format: Format,
    weights: Weights,
    folder: Path,
    tokenizer: Any,
    max_shard_bytes: int,
    edit_config: Callable[[Config], Config] | None = None,
    input_scales: Mapping[str, float] = types.MappingProxyType({}),
) -> list[str]:
    """Writes linears and experts in a quantised format: notes on matrices that stay in the model's dtype. A model in
    the format without `qat` is not quantised further. If the header contains values of weights (double-quantised NF4),
    they are quantised twice, for header and data.

      format: the quantised format.
      weights: the model, adapters merged.
      folder: exists and is empty.
      tokenizer: a Hugging Face tokenizer; None: none is written.
      max_shard_bytes: of one file.
      edit_config: changes the entry quantization_config.
      input_scales: {linear: scale of activations} of NVFP4.

    Raises ValueError for experts that readers do not support, no matrix of whole blocks, or weights that left QAT's
    grid, and as write_planned does.
    """
    assert format.export is not None
    if format.export.without_experts is not None and weights.model.config.moe is not None:
        raise ValueError(f"{format.export.name}: {format.export.without_experts}")
    changed, odd_rows = grids.quantized(weights, format.name), not_whole(weights, format.name)
    changed = changed.changed(
        {name: functools.partial(format.kinds[0].with_input_scale, scale=scale) for name, scale in input_scales.items()}
    )
    plain = [
        name
        for name, matrix in matrices(changed.model)
        if matrix.quantizable and not isinstance(matrix.stored_weight, Stored) and name not in odd_rows
    ]
    plain = [name for name in plain if not any(name_matches(name, pattern) for pattern in format.export.keeps)]
    changed = changed.dequantized(format.export.keeps) if format.export.keeps else changed
    if odd_rows and stored_in(changed.model) is None:
        raise ValueError(
            f"{format.export.name}: no linear has rows of whole blocks of {format.kinds[0].row_block}; take fp8"
        )
    config = hf.hf_config_of(changed.model, tokenizer) if edit_config is not None else {}
    extra = {"quantization_config": edit_config(config["quantization_config"])} if edit_config is not None else None
    write_planned(changed, folder, tokenizer, max_shard_bytes, extra=extra)
    reasons = (
        (odd_rows, f"their rows are not whole blocks of {format.kinds[0].row_block}"),
        (
            plain,
            f"the model has them so beside its weights in {format.name} (the first is {plain[0] if plain else ''})",
        ),
    )
    return [f"{len(names)} matrices are kept in {weights.model.dtype}: {why}" for names, why in reasons if names]


def write_nvfp4_activations(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes a model of QAT in nvfp4-nvfp4 as NVFP4 with activations rounded too (W4A4), the scale of X's inputs as
    `X.input_global_scale`. Raises ValueError without such scales, and as write_stored does.

      weights: the model, adapters merged.
      folder: exists and is empty.
      tokenizer: a Hugging Face tokenizer; None: none is written.
      max_shard_bytes: of one file.
    """
    qat = weights.model.qat
    if qat is None or not qat.input_scales:
        raise ValueError(
            "nvfp4-nvfp4: the model has no ranges of activations, which quantisation-aware training observes (qat: "
            "nvfp4-nvfp4); take nvfp4, or mxfp4-mxfp4"
        )
    return write_stored(
        FORMATS["nvfp4"], weights, folder, tokenizer, max_shard_bytes, input_scales=dict(qat.input_scales)
    )


def write_mxfp4(
    weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int, activations: bool = False
) -> list[str]:
    """Writes MXFP4 as compressed-tensors stores it, or gpt-oss as it is published, its linears unquantised. Returns
    notes.

      weights: the model, adapters merged.
      folder: exists and is empty.
      tokenizer: a Hugging Face tokenizer; None: none is written.
      max_shard_bytes: of one file.
      activations: servers round activations, too.

    Raises ValueError for gpt-oss with `activations`, or experts that left QAT's grid, and as write_stored does.
    """
    model, layouts = weights.model, FORMATS["mxfp4"].layouts
    layout = next((candidate for candidate in layouts if candidate.families == (model.config.family,)), None)
    if layout is None:
        of_all = next(candidate for candidate in layouts if candidate.families is None)
        config_edit = of_all.rounding_activations if activations else None
        return write_stored(FORMATS["mxfp4"], weights, folder, tokenizer, max_shard_bytes, config_edit)
    if activations:
        raise ValueError("mxfp4-mxfp4: gpt-oss as it is published says nothing of activations; take mxfp4")
    plain = weights.dequantized()
    plain.model.qat = None  # the format itself says what the experts' numbers are
    planned, variables = hf.checkpoint_tensors(plain), tensors_of(plain.model)
    for name, matrix in experts(plain.model):
        encode = functools.partial(_encoded, layout, name, model.qat is not None)
        shapes = jax.eval_shape(layout.encode, jax.ShapeDtypeStruct(matrix.weight.shape, model.dtype))
        tensors = {name + key: tensor for key, tensor in layout.tensors(shapes, None).items()}
        planned[name] = Group(functools.partial(_made, plain.maker(name, variables[name]), encode), (Piece(tensors),))
    config_edit = {"quantization_config": layout.config((), [], model.dtype)}
    return write_planned(plain, folder, tokenizer, max_shard_bytes, planned, config_edit)


def _made(make: Callable[[], jax.Array], encode: Callable[[jax.Array], Stored]) -> Stored:
    return encode(make())


def _encoded(layout: Layout, name: str, trained: bool, array: jax.Array) -> Stored:
    """gpt-oss's experts [E, in, out] in codes. ValueError if QAT `trained` them and they left its grid."""
    if trained:
        grids.exactly(name, "mxfp4", array.swapaxes(1, 2))
    return layout.encode(array)


def write_planned(
    weights: Weights,
    folder: Path,
    tokenizer: Any,
    max_shard_bytes: int,
    planned: Planned | None = None,
    extra: dict | None = None,
    loads: bool = True,
) -> list[str]:
    """Writes weights, config.json and tokenizer, and reads them back. Returns [].

      weights: the model, adapters merged.
      folder: exists and is empty.
      tokenizer: a Hugging Face tokenizer; None: none is written.
      max_shard_bytes: of one file.
      planned: {tensor of the model: Group}; None: the weights as they are.
      extra: entries that replace config.json's.
      loads: whether jaxtune can load such a folder; else `extra` needs a quantization_config.

    Raises ValueError for a full disk or what hf.checkpoint_tensors cannot write, ArithmeticError for a difference.
    """
    planned = hf.checkpoint_tensors(weights) if planned is None else planned
    model = weights.model
    require_room(folder, file_plan.size_bytes(planned))
    config_json = hf.hf_config_of(model, tokenizer) | (extra or {})
    written = hf.write_checkpoint(folder, planned, config_json, max_shard_bytes)
    hf.write_companions(folder, model, tokenizer)
    verify(folder, written, model.config, loads)
    return []


def verify(folder: Path, written: Mapping[str, shards.Written], config: DecoderConfig, loads: bool = True) -> None:
    """Raises ArithmeticError unless a folder has the written config, names and bytes; no logits are computed.

    written: {tensor's name: what shards.write_file returned}.
    config: that the folder must describe.
    loads: also compares names and shapes with config.json; else its quantization_config is ignored (KeyError without).
    """
    try:
        config_json = text_config(read_config(folder))
        if loads:
            hf.Pretrained(folder)
        else:
            config_json.pop("quantization_config")
        if config_from_hf(config_json) != config:
            raise ArithmeticError("config.json, read back, describes another model than this one")
        entries = weight_entries(folder)
        present = [name for name in written if name in entries]
        with terminal.progress("reading it back", sum(entries[name].size_bytes for name in present)) as advanced:
            matches = byte_files.all_of(
                lambda name: shards.is_as_written(entries[name], written[name], advanced), present
            )
    except (ValueError, OSError) as error:
        raise ArithmeticError(f"read back, the folder cannot be loaded: {error}") from error
    wrong = sorted(written.keys() ^ entries.keys())
    wrong += [name for name, as_written in zip(present, matches, strict=True) if not as_written]
    if wrong:
        suffix = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ArithmeticError(
            f"{folder.name}: what was read back differs from the model: {', '.join(wrong[:8])}{suffix}"
        )
