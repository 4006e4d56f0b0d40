"""Changes how the weights of a whole model are represented: quantisation, FP8 products, and quantisation-aware training
(QAT), which rounds weights to the grid of a low-bit format. Functions of a model return a new one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.lora import copy_structure, experts, freeze, has_adapter, matrices, name_matches, stop_rounding
from jaxtune.models.observed_inputs import known_scales, recorded, with_input_scales
from jaxtune.models.qat.fake_quant import STRAIGHT_THROUGH, FakeQuant
from jaxtune.models.registry import stated_layout
from jaxtune.pallas.format_names import KEPT, QAT_GROUPS
from jaxtune.pallas.formats import FORMATS, Stored, dense, format_of, kept_layout, load_in
from jaxtune.pallas.formats.layout import Config


def check_load_in(name: str | None) -> None:
    """Raises ValueError unless `name` is None or a format in which a loaded model can have weights."""
    if name is not None and name not in load_in():
        raise ValueError(f"load_in {name!r} is not supported; supported: None, {', '.join(map(repr, load_in()))}")


def require_kept(where: str, load_in: str | None, is_stored: bool) -> None:
    """Raises ValueError if weights are to stay in the codes of their files and the checkpoint stores none so.

    where: the checkpoint, for errors.
    load_in: the format asked for; only those of format_names.KEPT are checked.
    is_stored: whether files have weights in this format.
    """
    layout = kept_layout(load_in) if load_in in KEPT else None
    if layout is not None and not is_stored:
        raise ValueError(
            f"{where}: load_in = {load_in!r} keeps experts in the codes of their files, and no experts are stored so "
            f"here (as {layout.title}): take load_in = 'nf4', to which 16-bit weights are converted, or leave it out"
        )


def require_stated(where: str, hf: dict, load_in: str | None) -> None:
    """`require_kept` by config.json alone, for a model that is not loaded.

    where: the checkpoint, for errors.
    hf: config.json.
    load_in: the format asked for; None: nothing is required.
    """
    require_kept(where, load_in, load_in in KEPT and stated_layout(hf) is kept_layout(load_in))


def encode(array: jax.Array, load_in: str) -> Stored:
    """Quantises a weight [..., out, in] of 16 or 32 bits; traceable. Raises ValueError for a shape that the format
    cannot store, such as rows that are not whole blocks of NVFP4.
    """
    return FORMATS[load_in].encode(array)


def quantize(model: Decoder, load_in: str = "nf4", skip_modules: Sequence[str] = ()) -> Decoder:
    """A new model with quantised linears and experts, all tensors frozen, `qat` None. Other arrays, already quantised
    weights among them, are shared.

      load_in: a value of model.load_in, such as "nf4" (double quantisation) or "fp8" (a scale per row).
      skip_modules: names, or their last parts, of linears or experts to leave ("o_proj").

    Raises ValueError for another format, adapters, a name that matches nothing, or a matrix that the format cannot
    store.
    """
    check_load_in(load_in)
    if load_in in KEPT:
        raise ValueError(
            f"quantize: load_in = {load_in!r} is for checkpoints that store it (from_pretrained): take nf4"
        )
    if has_adapter(model):
        raise ValueError("quantize: this model has adapters: quantise the base, then add them")
    model = freeze(model)
    model.qat = None  # its weights are no longer rounded to that grid
    modules = {name: matrix for name, matrix in matrices(model) if matrix.quantizable}
    for skipped in skip_modules:
        if not any(name_matches(name, skipped) for name in modules):
            example = f"such as {next(iter(modules))}" if modules else "of which the model has none in its layers"
            raise ValueError(f"quantize: skip_modules: {skipped!r} matches no linear, {example}")
    for name, linear in modules.items():
        weight = linear.stored_weight
        if not isinstance(weight, Stored) and not any(name_matches(name, skipped) for skipped in skip_modules):
            linear.weight = linear.weight.replace(encode(weight, load_in))
    return model


def dequantize(model: Decoder, modules: Sequence[str] | None = None) -> Decoder:
    """A new model whose quantised weights are decoded to model.dtype; other arrays are shared, and frozen weights stay
    frozen. modules: names, or their last parts, of those to decode; None: all.
    """
    model = copy_structure(model)
    for name, linear in matrices(model):
        weight = linear.stored_weight
        if isinstance(weight, Stored) and (modules is None or any(name_matches(name, pattern) for pattern in modules)):
            linear.weight = linear.weight.replace(dense(weight, model.dtype))
            linear.fp8 = False
    return model


def compute_in_fp8(model: Decoder) -> Decoder:
    """A new model whose FP8 linears and experts multiply in FP8, forward and backward; activations and gradients are
    rounded for each product. Raises ValueError if no weight is in FP8.
    """
    model = copy_structure(model)
    for _, matrix in matrices(model):
        weight = matrix.stored_weight
        matrix.fp8 = isinstance(weight, Stored) and weight.compute == "fp8"
    if not computes_in_fp8(model):
        raise ValueError("model.compute = 'fp8': no linear of the model is in FP8; set model.load_in = fp8")
    return model


def computes_in_fp8(model: Decoder) -> bool:
    """Whether any linear or experts multiply in FP8."""
    return any(matrix.fp8 for _, matrix in matrices(model))


def stored_in(model: Decoder) -> str | None:
    """The format of the quantised weights (a value of model.load_in), of several the first by alphabet; None if there
    are none.
    """
    return min((format_of(weight).name for weight in _stored(model).values()), default=None)


def _stored(model: Decoder) -> dict[str, Stored]:
    weights = ((name, matrix.stored_weight) for name, matrix in matrices(model))
    return {name: weight for name, weight in weights if isinstance(weight, Stored)}


# ---- quantisation-aware training


def prepare_qat(
    model: Decoder,
    format: str = "int4",
    group_size: int | None = None,
    gradients: str = STRAIGHT_THROUGH,
    input_scales: Mapping[str, float] | None = None,
) -> Decoder:
    """A new model over the same arrays that rounds weights, and activations where the format has them, in each forward;
    gradients pass to the stored weights. With adapters the merged weight is rounded. Only linears and experts are
    rounded, and only those that the group divides.

      format: a key of fake_quant.ROUNDINGS, such as "int4".
      group_size: consecutive weights that share a scale; None: the format's default.
      gradients: "straight_through", or "clipped": none to numbers outside the range of their scale.
      input_scales: {linear: scale of its activations} (observed_scales) for nvfp4-nvfp4; None: those of an earlier QAT.

    Raises ValueError for another format, size or `gradients`, a size that divides no input, or without the scales that
    the format needs, which experts cannot have.
    """
    size = QAT_GROUPS[format][-1] if group_size is None and format in QAT_GROUPS else group_size
    scales = tuple((known_scales(model) if input_scales is None else input_scales).items())
    return rounded_by(model, FakeQuant(format, size, model.dtype, gradients=gradients, input_scales=scales))


def rounded_by(model: Decoder, spec: FakeQuant) -> Decoder:
    """prepare_qat with a given grid, whose dtype may differ from the model's: a loaded adapter must compute on the grid
    on which it was trained. An earlier rounding is removed.
    """
    model, scales = copy_structure(model), dict(spec.input_scales)
    spec = dataclasses.replace(spec, input_scales=())  # equal for all matrices
    if spec.observes and any(matrix.quantizable for _, matrix in experts(model)):
        raise ValueError(
            f"qat: {spec.format} does not round experts, each of which would need an observed scale of its own: take "
            f"{spec.format.partition('-')[0]}, or mxfp4-mxfp4"
        )
    for _, matrix in matrices(model):
        stop_rounding(matrix)
        if matrix.quantizable and spec.fits(matrix.sizes[-1]):
            matrix.fake_quant = spec
    if qat_spec(model) is None:
        inputs = sorted({matrix.sizes[-1] for _, matrix in matrices(model)})
        key = f"format = {spec.format}" if spec.group_size is None else f"group_size = {spec.group_size}"
        raise ValueError(f"qat: {key} divides no linear's input (they are {inputs}): nothing to do")
    return with_input_scales(model, scales) if spec.observes else model


def unrounded(model: Decoder) -> Decoder:
    """A new model over the same arrays that does not round its weights: undoes prepare_qat."""
    model = copy_structure(model)
    for _, matrix in matrices(model):
        stop_rounding(matrix)
    return model


def convert_qat(model: Decoder) -> Decoder:
    """A new, plain model with the rounded weights of a prepared one, and its grid in `qat`. Logits stay the same,
    unless the format rounds activations. Quantised weights become arrays in model.dtype. Raises ValueError if the model
    is not prepared, or a rounded matrix has an adapter (see merge_adapter).
    """
    spec = qat_spec(model)
    if spec is None:
        raise ValueError("convert_qat: this model is not prepared for QAT (prepare_qat)")
    model, grid = copy_structure(model), recorded(model, spec)
    for name, matrix in matrices(model):
        if matrix.fake_quant is None:
            continue
        if matrix.lora is not None:
            raise ValueError(f"convert_qat: {name} has an adapter: merge_adapter converts such a model")
        weight = dense(matrix.stored_weight, model.dtype)
        transposed = isinstance(matrix, ExpertLinear) and matrix.transposed
        matrix.weight = matrix.weight.replace(round_to_grid(weight, matrix.fake_quant, transposed))
        stop_rounding(matrix)
    model.qat = grid
    return model


@functools.partial(jax.jit, static_argnums=(1, 2))
def round_to_grid(weight: jax.Array, spec: FakeQuant, transposed: bool = False) -> jax.Array:
    """Rounds a weight as the forward of QAT does, in its own dtype; experts one at a time. Compiled for each shape and
    grid.

      weight: [..., out, in], or [..., in, out] if `transposed`.
      spec: the grid: bits, and the size of groups along the input axis.
    """

    def rounded(matrix: jax.Array) -> jax.Array:
        oriented = matrix.T if transposed else matrix
        values = spec.round(oriented).astype(matrix.dtype)
        return values.T if transposed else values

    return jax.lax.map(rounded, weight) if weight.ndim == 3 else rounded(weight)


def qat_spec(model: Decoder) -> FakeQuant | None:
    """The grid to which a prepared model rounds, without observed scales; None for weights rounded for good, whose grid
    is `qat`.
    """
    return next((matrix.fake_quant for _, matrix in matrices(model) if matrix.fake_quant is not None), None)


def not_quantized(model: Decoder, spec: FakeQuant) -> list[str]:
    """Linears and experts that QAT on this grid does not round, because the group does not divide their input size."""
    return [name for name, matrix in matrices(model) if matrix.quantizable and not spec.fits(matrix.sizes[-1])]


def qat_config(model: Decoder) -> dict[str, Any] | None:
    """config.json's entry "qat" for weights that QAT rounded, or None; `quantization_config` would make loaders look
    for packed tensors. Raises ValueError if model.dtype cannot represent the grid.
    """
    if model.qat is None:
        return None
    if not model.qat.represented_by(model.dtype):
        raise ValueError(
            f"the model is in {model.dtype}, which cannot represent weights that quantisation-aware training rounded "
            f"to {model.qat}: take {model.qat.dtype} (dtype, --dtype, --outtype)"
        )
    skipped = [model.config.head.name, *not_quantized(model, model.qat)]
    return {**model.qat.record(), "modules_to_not_convert": skipped}


def grid_of(where: str, config: Mapping[str, Any]) -> FakeQuant | None:
    """The grid in a config.json's "qat", or None. Entries of older versions have no dtype, and mean the weights'.
    where: the file, for errors. Raises ValueError for a grid that is not supported.
    """
    record = config.get("qat")
    if record is None:
        return None
    if isinstance(record, Mapping) and "dtype" not in record:  # older versions wrote none: it was the weights' dtype
        record = {**record, "dtype": config.get("dtype") or config.get("torch_dtype")}
    return FakeQuant.of_record(f"{where}: qat", record)


# ---- checkpoints


def check_stored(
    folder: Path,
    hf: dict,
    formats: Mapping[str, str],
    packed: Set[str],
    load_in: str | None,
    passthrough_formats: Set[str] = frozenset(),
) -> None:
    """Raises ValueError if weights stay quantised in another format than load_in, or if none is in the format that
    quantization_config names and that is neither load_in, nor decoded on loading, nor a passthrough tensor's.

      folder: for errors. hf: config.json. load_in: None: no format was asked for.
      formats: {weight that files store quantised: format}.
      packed: those that stay quantised in the model.
      passthrough_formats: formats of passthrough tensors.
    """
    stored = {formats[name] for name in packed}
    if load_in is not None and stored - {load_in}:
        raise ValueError(
            f"{folder}: load_in = {load_in!r}, but its weights are stored in {' and '.join(sorted(stored))}: leave "
            "load_in out, or take the 16-bit original"
        )
    require_kept(f"{folder}", load_in, bool(stored))
    layout = stated_layout(hf)
    if layout is None:
        return
    stated = format_of(layout).name
    where = f"{folder}: config.json: quantization_config says that the weights are stored in {stated}"
    if stored and stated not in {*passthrough_formats, *formats.values()}:
        raise ValueError(
            f"{where}, but they are stored in {' and '.join(sorted(stored))}: fetch config.json again, or take "
            "quantization_config out of it to load the weights as they are"
        )
    if not stored and not layout.decoded_on_load and load_in != stated and stated not in passthrough_formats:
        raise ValueError(
            f"{where}, but none is: set load_in = {stated!r} to quantise them, or take quantization_config out of "
            "config.json to load them as they are"
        )


def quantization_config(model: Decoder) -> Config | None:
    """config.json's quantization_config as transformers reads it, or None without quantised weights. Raises ValueError
    for several formats.
    """
    stored = _stored(model)
    if not stored:
        return None
    plain = [model.config.head.name, *(name for name, _ in matrices(model) if name not in stored)]
    names = sorted({format_of(weight).name for weight in stored.values()})
    if len(names) > 1:
        raise ValueError(
            f"save_pretrained: the weights are stored in {' and '.join(names)}, and config.json can say one format: "
            "merge the adapter, or use dequantize (jaxtune.models.files.quant), and save 16-bit weights"
        )
    weights = list(stored.values())
    return FORMATS[names[0]].layout(weights[0]).config(weights, plain, model.dtype)


def check_written(model: Decoder) -> None:
    """Raises ValueError if weights of one format are stored so that config.json cannot describe all, such as FP8 with
    scales of rows and of blocks.
    """
    weights = list(_stored(model).values())
    for layout in {format_of(weight).layout(weight) for weight in weights}:
        if (problem := layout.differing([w for w in weights if format_of(w).layout(w) is layout])) is not None:
            raise ValueError(
                f"save_pretrained: {problem}, and config.json can say one kind: use dequantize "
                "(jaxtune.models.files.quant), or merge the adapter, and save 16-bit weights"
            )


def parameters(state: nnx.State) -> int:
    """The number of parameters in a state of arrays or shapes; a quantised weight counts as decoded."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, Stored))
    return sum(leaf.size for leaf in leaves)


def parameter_counts(model: Decoder) -> tuple[int, int]:
    """(trainable, all) parameters, adapters included; each element of a quantised weight counts as one."""
    return parameters(nnx.state(model, nnx.Param)), parameters(nnx.state(model))
