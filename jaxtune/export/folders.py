"""Exports as Hugging Face folders (safetensors, config.json, tokenizer) for other programs.

`write_merged` decodes quantised weights and writes the model in its own dtype; `write_stored` writes linears and
experts in a quantised format such as NF4 or FP8, to which it quantises a model that is not stored in it;
`write_nvfp4_activations` does so in NVFP4 with scales of activations, and `write_mxfp4` in MXFP4, with gpt-oss as it is
published (`_encoded` encodes its experts). All end in `write_planned`, as w4a16.write does,
which writes the files and calls `verify`: it reads the folder back and compares every byte by checksum. Their caller
(api.py) passes Weights (models/files/weights.py), which makes one tensor at a time and merges the model's adapter, if
it has one, on the way. All pass on the ArithmeticError of a merge that is wrong.
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
from jaxtune.models.files.folders import require_space
from jaxtune.models.files.model_folder import read_config, weight_entries
from jaxtune.models.files.quant import stored_in
from jaxtune.models.files.weights import Weights, not_whole, tensors_of
from jaxtune.models.lora import experts, matrices, name_matches
from jaxtune.models.registry import config_from_hf, text_config
from jaxtune.pallas.formats import FORMATS, Format, Layout, Stored
from jaxtune.pallas.formats.layout import Config
from jaxtune.system import terminal


def write_merged(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes the model as a Hugging Face folder in its own dtype, to which quantised weights are decoded, and verifies
    it by reading it back. Returns [], as there are no notes for the user.

    Args:
      weights: the model's weights; if it has an adapter, the merged ones.
      folder: an empty folder.
      tokenizer: written too; None: none is written.
      max_shard_bytes: weights above this size are divided into several files.
    Raises:
      ValueError: the disk has no room, and the other errors of write_planned.
      ArithmeticError: what was read back differs from what was written.
    """
    return write_planned(weights.dequantized(), folder, tokenizer, max_shard_bytes)


def write_stored(
    to: Format,
    weights: Weights,
    folder: Path,
    tokenizer: Any,
    max_shard_bytes: int,
    says: Callable[[Config], Config] | None = None,
    input_scales: Mapping[str, float] = types.MappingProxyType({}),
) -> list[str]:
    """Writes a Hugging Face folder with the linears and experts in a quantised format. Returns notes for the user: on
    how many matrices stay in the model's dtype because their rows are not whole blocks of the format, and on how many
    because the model has them so; [] if there are none. api.py calls it for most formats; `write_nvfp4_activations` and
    `write_mxfp4` call it too.

    A model that is stored in the format already, and has no `qat`, is not quantised further: linears that it has in 16
    bits stay so. If a file's header contains values of a weight (double-quantised NF4: a mean of each
    matrix, as text), weights that are not yet in the format are quantised twice: first for the header, then for the
    data.

    Args:
      to: the format. Its field `export` says what its readers cannot load: experts (`without_experts`), or linears of
        certain names (`keeps`), which are decoded and written in the model's dtype. `export` must not be None.
      weights: the model's weights, in any format or none.
      folder: an empty folder.
      tokenizer: written too; None: none is written.
      max_shard_bytes: weights above this size are divided into several files.
      says: takes the entry quantization_config of config.json and returns the one that is written; None: it stays as
        it is.
      input_scales: {name of a linear: the scale of activations that is stored beside its weight}, of NVFP4.
    Raises:
      ValueError: the model has experts, and the format's readers do not support them; no matrix has rows of whole
        blocks; weights that the model says QAT rounded to the format were changed since; the other errors of
        write_planned.
      ArithmeticError: what was read back differs from what was written.
    """
    assert to.export is not None
    if to.export.without_experts is not None and weights.model.config.moe is not None:
        raise ValueError(f"{to.export.name}: {to.export.without_experts}")
    changed, left = grids.quantized(weights, to.name), not_whole(weights, to.name)
    changed = changed.changed(
        {name: functools.partial(to.kinds[0].with_input_scale, scale=scale) for name, scale in input_scales.items()}
    )
    own = [
        name
        for name, matrix in matrices(changed.model)
        if matrix.quantizable and not isinstance(matrix.stored_weight, Stored) and name not in left
    ]
    own = [name for name in own if not any(name_matches(name, each) for each in to.export.keeps)]
    changed = changed.dequantized(to.export.keeps) if to.export.keeps else changed
    if left and stored_in(changed.model) is None:
        raise ValueError(f"{to.export.name}: no linear has rows of whole blocks of {to.kinds[0].row_block}; take fp8")
    config = hf.hf_config_of(changed.model, tokenizer) if says is not None else {}
    extra = {"quantization_config": says(config["quantization_config"])} if says is not None else None
    write_planned(changed, folder, tokenizer, max_shard_bytes, extra=extra)
    reasons = (
        (left, f"their rows are not whole blocks of {to.kinds[0].row_block}"),
        (own, f"the model has them so beside its weights in {to.name} (the first is {own[0] if own else ''})"),
    )
    return [f"{len(kept)} matrices are kept in {weights.model.dtype}: {why}" for kept, why in reasons if kept]


def write_nvfp4_activations(weights: Weights, folder: Path, tokenizer: Any, max_shard_bytes: int) -> list[str]:
    """Writes a model that quantisation-aware training in nvfp4-nvfp4 rounded, as a Hugging Face folder in NVFP4 whose
    activations servers round too (W4A4): the weights as `write_stored` writes them, and beside each linear X that has
    one the scale under which training rounded its inputs (`X.input_global_scale`). Returns notes for the user, as
    write_stored does.

    Args:
      weights: the model's weights.
      folder: an empty folder.
      tokenizer: written too; None: none is written.
      max_shard_bytes: weights above this size are divided into several files.
    Raises:
      ValueError: the model has no scales of activations, because it was not trained so; the errors of write_stored.
      ArithmeticError: what was read back differs from what was written.
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
    """Writes a model as a Hugging Face folder in MXFP4: linears and experts as compressed-tensors stores them, or, of
    gpt-oss, the experts as it is published, and the linears unquantised. Returns notes for the user, as write_stored
    does: how many matrices stay unquantised because of their rows; of gpt-oss [].

    Args:
      weights: the model's weights, in any format or none, which write_stored encodes. The experts of gpt-oss are
        encoded here, and its other weights decoded.
      folder: an empty folder.
      tokenizer: written too; None: none is written.
      max_shard_bytes: weights above this size are divided into several files.
      activations: True: config.json says that servers round activations to MXFP4 too; False: they do not.
    Raises:
      ValueError: gpt-oss with `activations`, which its layout cannot say, or with experts that the model says QAT
        rounded to MXFP4 and that were changed since; the errors of write_stored, or, of gpt-oss, of write_planned.
      ArithmeticError: what was read back differs from what was written.
    """
    model, layouts = weights.model, FORMATS["mxfp4"].layouts
    layout = next((each for each in layouts if each.families == (model.config.family,)), None)
    if layout is None:
        of_all = next(each for each in layouts if each.families is None)
        says = of_all.rounding_activations if activations else None
        return write_stored(FORMATS["mxfp4"], weights, folder, tokenizer, max_shard_bytes, says)
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
    says = {"quantization_config": layout.config((), [], model.dtype)}
    return write_planned(plain, folder, tokenizer, max_shard_bytes, planned, says)


def _made(make: Callable[[], jax.Array], encode: Callable[[jax.Array], Stored]) -> Stored:
    """A matrix of all experts of a layer of gpt-oss in MXFP4: what `encode` makes of the matrix that `make` returns. It
    is called when the matrix is written, so that one matrix is in memory at a time."""
    return encode(make())


def _encoded(layout: Layout, name: str, trained: bool, array: jax.Array) -> Stored:
    """Encodes weights of gpt-oss's E experts, [E, in, out] as its models have them, in MXFP4 as its published files
    store them (`layout`).

    name: the matrix's name. trained: whether the model says that QAT rounded it to MXFP4; a matrix that is not on that
    grid then raises ValueError. array: the weights, of which `in` must be a multiple of 32.
    """
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
    """Writes a Hugging Face folder (weights, config.json, tokenizer) and reads it back (`verify`). All functions that
    export a whole model as such a folder end here.

    Args:
      weights: the model's weights.
      folder: an empty folder.
      tokenizer: written too; None: none is written.
      max_shard_bytes: weights above this size are divided into several files.
      planned: the tensors of the files and how they are made, {name of a tensor of the model: Group}; None: the model's
        weights as they are.
      extra: entries of config.json that are added to those of the model, or replace them; None: none.
      loads: True: jaxtune can load such a folder itself, and the check of the written files includes that names and
        shapes of tensors are those of config.json. False: it cannot, and `extra` must have a quantization_config.
    Returns:
      [], always: the notes for the user that an export function returns, of which there are none here.
    Raises:
      ValueError: the disk has no room; max_shard_bytes is not positive; what hf.checkpoint_tensors cannot write.
      ArithmeticError: what was read back differs from what was written.
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
    """Reads a folder back and compares it with what was written: the model's config that config.json describes, the
    names of the tensors, and every byte of every tensor by checksum. No logits are computed, because equal files give
    equal ones. write_planned calls it.

    Args:
      folder: the folder.
      written: {tensor's name: its checksums}, which write_checkpoint returned when it wrote the folder.
      config: the model's, which config.json must describe.
      loads: True: jaxtune can load such folders itself, so the names and shapes of the tensors are also compared with
        config.json. False: they are not, and config.json must have an entry quantization_config, which is left out of
        the comparison.
    Raises:
      ArithmeticError: something differs, or the folder cannot be read.
      KeyError: `loads` is False, and config.json has no quantization_config.
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
