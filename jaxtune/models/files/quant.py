"""Changes how the weights of a whole model are represented. `quantize` and `dequantize` quantise and decode them
(`encode` a single one), and `compute_in_fp8` lets FP8 weights multiply in FP8. `prepare_qat` and `rounded_by` prepare a
model for quantisation-aware training (QAT), which computes with weights that are rounded to the grid of a low-bit
format; `unrounded` undoes that, and `convert_qat` rounds the weights for good, by `round_to_grid`. Each of these
functions of a model returns a new one and leaves the given one as it was.

Other functions say how a model's weights are: `stored_in`, `computes_in_fp8`, `qat_spec`, `not_quantized` and
`parameters`. `quantization_config` and `qat_config` write what config.json says about quantisation and QAT;
`check_load_in`, `check_stored` and `grid_of` check and read such settings, and `check_written` checks that
config.json can describe the weights of a model that is saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import STRAIGHT_THROUGH, FakeQuant
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.lora import copy_structure, experts, freeze, has_adapter, matrices, name_matches, stop_rounding
from jaxtune.models.observed_inputs import known_scales, recorded, with_input_scales
from jaxtune.models.registry import stated_layout
from jaxtune.pallas.format_names import KEPT, QAT_GROUPS
from jaxtune.pallas.formats import FORMATS, Stored, dense, format_of, kept_layout, load_in
from jaxtune.pallas.formats.layout import Config


def check_load_in(name: str | None) -> None:
    """Raises ValueError if `name` is not a format in which a loaded model can have weights (such as "nf4"); the error
    lists the formats. None, which means that nothing is quantised, is allowed. The loader and `quantize` call it first,
    so that a wrong name is refused before a file is looked for."""
    if name is not None and name not in load_in():
        raise ValueError(f"load_in {name!r} is not supported; supported: None, {', '.join(map(repr, load_in()))}")


def require_kept(where: str, load_in: str | None, there: bool) -> None:
    """Raises ValueError if weights are to stay in the format `load_in`, to which loading quantises nothing
    (format_names.KEPT), and the checkpoint `where` stores none in the layout that allows it. there: whether it does, as
    check_stored knows from the tensors, and require_stated from config.json. Other formats, and None, raise nothing."""
    layout = kept_layout(load_in) if load_in in KEPT else None
    if layout is not None and not there:
        raise ValueError(
            f"{where}: load_in = {load_in!r} keeps experts in the codes of their files, and no experts are stored so "
            f"here (as {layout.title}): take load_in = 'nf4', to which 16-bit weights are converted, or leave it out"
        )


def require_stated(where: str, hf: dict, load_in: str | None) -> None:
    """Checks, for a model that is not loaded, that its config.json allows `load_in`; raises ValueError as require_kept
    does. Plans and shapes of teachers need it, because they make a model from its config.json alone. where: the model's
    folder or name. hf: its parsed config.json."""
    require_kept(where, load_in, load_in in KEPT and stated_layout(hf) is kept_layout(load_in))


def encode(array: jax.Array, load_in: str) -> Stored:
    """Quantises a 16- or 32-bit weight, `array` [..., out, in], to the format that `load_in` names (a value of
    model.load_in, such as "nf4"); the caller has checked the name (check_load_in). Returns it as a Stored, a pytree
    with the codes and scales. The function may be traced, for example to derive the shapes (jax.eval_shape). Weights
    are quantised by it when a model is loaded, saved in a format, or changed in memory (quantize). Raises ValueError
    for a shape that the format cannot store, such as rows that are not whole blocks of NVFP4."""
    return FORMATS[load_in].encode(array)


def quantize(model: Decoder, load_in: str = "nf4", skip_modules: Sequence[str] = ()) -> Decoder:
    """Quantises the linears and experts in the layers of a model that is in memory. Loading with load_in does not call
    it (each tensor is quantised as it is read); the planner derives from it the shapes of a teacher. `model` itself
    keeps its weights, and the arrays that are not quantised are shared with it.

    Embeddings, head, norms, routers and biases keep their dtype, and so do weights that are quantised already, whatever
    their format is.

    Args:
      load_in: a format that model.load_in can name, such as "nf4" (with double quantisation) or "fp8" (a scale per
        row).
      skip_modules: names, or last parts of names, of linears or experts that are not quantised ("o_proj").
    Returns:
      a new model whose tensors are all frozen: quantised weights are trained through adapters (get_peft_model). Its
        `qat` is None, because its weights are no longer on a grid to which QAT rounded them.
    Raises:
      ValueError: another format, or one in which weights only stay ("mxfp4"); a model with adapters; a name in
        skip_modules that matches nothing; a matrix that the format cannot store (encode).
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
            there = f"such as {next(iter(modules))}" if modules else "of which the model has none in its layers"
            raise ValueError(f"quantize: skip_modules: {skipped!r} matches no linear, {there}")
    for name, linear in modules.items():
        weight = linear.stored_weight
        if not isinstance(weight, Stored) and not any(name_matches(name, skipped) for skipped in skip_modules):
            linear.weight = linear.weight.replace(encode(weight, load_in))
    return model


def dequantize(model: Decoder, modules: Sequence[str] | None = None) -> Decoder:
    """A new model whose quantised weights are decoded to model.dtype, for example to save 16-bit weights:
    save_pretrained writes quantised weights as they are. jaxtune itself does not call it; its exports that
    need 16-bit weights decode one at a time (Weights.dequantized). All other arrays, adapters included, are shared with
    `model`, and frozen weights stay frozen.

    modules: names, or last parts of names, of the linears and experts that are decoded; a name that matches none has no
    effect. None: all are decoded.
    """
    model = copy_structure(model)
    for name, linear in matrices(model):
        weight = linear.stored_weight
        if isinstance(weight, Stored) and (modules is None or any(name_matches(name, each) for each in modules)):
            linear.weight = linear.weight.replace(dense(weight, model.dtype))
            linear.fp8 = False
    return model


def compute_in_fp8(model: Decoder) -> Decoder:
    """A new model over the same arrays whose FP8 linears and experts multiply in FP8, forward and backward
    (model.compute = fp8), which saves the time of decoding them and of 16-bit products.

    Their weights are then multiplied as they are stored by activations and gradients that are rounded to FP8 for each
    product. All else, such as adapters, norms, routers, embeddings, the head and weights in other formats, computes as
    before.

    Raises:
      ValueError: no weight of the model is stored in FP8.
    """
    model = copy_structure(model)
    for _, matrix in matrices(model):
        weight = matrix.stored_weight
        matrix.fp8 = isinstance(weight, Stored) and weight.compute == "fp8"
    if not computes_in_fp8(model):
        raise ValueError("model.compute = 'fp8': no linear of the model is in FP8; set model.load_in = fp8")
    return model


def computes_in_fp8(model: Decoder) -> bool:
    """Whether any linear or experts of the model multiply in FP8 (their attribute fp8, which compute_in_fp8 sets). Runs
    and adapters record it, so that the adapter is loaded over a base that computes in the same way."""
    return any(matrix.fp8 for _, matrix in matrices(model))


def stored_in(model: Decoder) -> str | None:
    """The name of the format of the model's quantised weights, such as "nf4" (a value of model.load_in). If they are in
    several formats, it is the first in alphabetical order; None if no weight is quantised. Exports ask it whether
    weights still have to be quantised, the planner whether a teacher is quantised, and the report of a teacher and the
    config of compat's trainer name the format by it."""
    return min((format_of(weight).name for weight in _stored(model).values()), default=None)


def _stored(model: Decoder) -> dict[str, Stored]:
    """{name of its linear or experts: weight} of all quantised weights of the model, in its order; {} if it has none.
    Weights that are arrays are left out. stored_in and quantization_config call it."""
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
    """A new model over the same arrays whose layers compute with fake-quantised weights, and with fake-quantised
    activations where the format has them (fake_quant.py): they are rounded in each forward, and gradients pass to the
    weights, which are stored and trained as before.

    Where there are adapters, the merged weight is rounded. Linears and experts whose input size is not a multiple of
    the numbers that share a scale are not rounded (`not_quantized` names them), nor are routers, embeddings, head and
    norms. Values are rounded in model.dtype. Runs with qat.format call it before training.

    Args:
      format: a key of fake_quant.ROUNDINGS, such as "int4".
      group_size: how many consecutive weights of a row share a scale; None: the format's default, which is 128 for the
        int4 formats, and for others what the format itself says.
      gradients: "straight_through": they pass unchanged; "clipped": not to numbers outside the range of their scale.
      input_scales: {name of a linear: scale under which its activations are rounded}, from observed_scales, for formats
        that observe scales (nvfp4-nvfp4); None: those that the model has from an earlier QAT. Other formats ignore it.
    Raises:
      ValueError: another format, size or `gradients`; a size that divides no matrix's input; a format that observes
        scales, and a linear without one, or a model with experts.
    """
    size = QAT_GROUPS[format][-1] if group_size is None and format in QAT_GROUPS else group_size
    scales = tuple((known_scales(model) if input_scales is None else input_scales).items())
    return rounded_by(model, FakeQuant(format, size, model.dtype, gradients=gradients, input_scales=scales))


def rounded_by(model: Decoder, spec: FakeQuant) -> Decoder:
    """A new model over the same arrays whose linears and experts round to the grid `spec` when they compute;
    prepare_qat makes a grid and calls it. The grid's dtype may differ from the model's here, because an adapter that is
    loaded again must compute on the grid on which it was trained, which its file records. An earlier rounding is
    removed. Routers, and matrices whose input size is no multiple of the numbers that share a scale, are not rounded.

    Raises:
      ValueError: a size that divides no matrix's input; a grid whose format observes scales of activations and that
        lacks one in `input_scales`, or such a format and a model with experts.
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
    """A new model over the same arrays that computes with its weights without rounding them: undoes prepare_qat.
    Training calls it on the model that it is given, so that the run's config alone decides whether weights are
    rounded."""
    model = copy_structure(model)
    for _, matrix in matrices(model):
        stop_rounding(matrix)
    return model


def convert_qat(model: Decoder) -> Decoder:
    """A new model whose weights are the rounded ones that a prepared model computes with. Its logits are the same,
    unless the format rounds activations: the result is a plain model, which does not.

    Weights keep their dtype, except that quantised ones become plain arrays in model.dtype; matrices that are not
    rounded stay as they are. The grid is recorded in the new model's `qat`, from which config.json gets it
    (qat_config). A run that trains the weights themselves ends with it; a model with adapters is converted by
    merge_adapter.

    Raises:
      ValueError: a model that is not prepared for QAT, or in which a matrix that is rounded has an adapter.
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
    """Rounds a weight [..., out, in], or [..., in, out] if `transposed`, to the grid `spec` as the forward of QAT does;
    the result has the weight's own shape and dtype. Weights are rounded with it for good when QAT ends (convert_qat,
    merge_adapter), experts one at a time. It is compiled for each shape and grid."""

    def rounded(matrix: jax.Array) -> jax.Array:
        """One matrix, rounded along its input axis."""
        oriented = matrix.T if transposed else matrix
        values = spec.round(oriented).astype(matrix.dtype)
        return values.T if transposed else values

    return jax.lax.map(rounded, weight) if weight.ndim == 3 else rounded(weight)


def qat_spec(model: Decoder) -> FakeQuant | None:
    """The grid to which a model that is prepared for QAT rounds its weights when it computes, without observed scales
    of activations, which the linears have (observed_inputs.recorded adds them); None for other models, also for one
    whose weights were rounded for good (its `qat` has the grid). Exports, reports and adapters' files ask it."""
    return next((matrix.fake_quant for _, matrix in matrices(model) if matrix.fake_quant is not None), None)


def not_quantized(model: Decoder, spec: FakeQuant) -> list[str]:
    """Names of the linears and experts that QAT with the grid `spec` does not round because their input size is not a
    multiple of the numbers that share a scale, in the model's order, for reports and config.json. Routers, which are
    never rounded, are left out. The model need not be prepared for QAT."""
    return [name for name, matrix in matrices(model) if matrix.quantizable and not spec.fits(matrix.sizes[-1])]


def qat_config(model: Decoder) -> dict[str, Any] | None:
    """The entry "qat" of config.json for a model whose weights QAT rounded to a grid (model.qat); None for other
    models. From it `grid_of` reads the grid when the model is loaded again.

    It records format, group size, the dtype of values and scales, observed scales of activations if there are any, and
    modules that are not rounded (modules_to_not_convert: the head and what `not_quantized` names). There is no standard
    key for this: the weights are plain arrays, and with `quantization_config` loaders would look for packed tensors.

    Raises:
      ValueError: model.dtype cannot represent the grid's values exactly (FakeQuant.represented_by), such as float16
        where the grid is in bfloat16, or a 16-bit dtype where it is in float32.
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
    """The grid that a config.json records for its weights under "qat" (qat_config); None where it has no such entry. If
    the entry has no dtype, as those of older versions, the grid has the dtype of the weights by the same file. The
    loader sets the model's `qat` to it, unless it quantises weights, which are then not on the grid.

    Args:
      where: the file's name, for errors.
      config: the parsed config.json.
    Raises:
      ValueError: a grid that is not supported, or an entry that is no object.
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
    beside: Set[str] = frozenset(),
) -> None:
    """Refuses a checkpoint whose weights are not stored as load_in or its own config.json says: quantised weights in
    another format than load_in, or none in the format that quantization_config names. If no weight stays quantised, the
    latter is allowed where load_in is that format, because the weights are then quantised to it, and where the format
    is one that is decoded on loading. Also, passthrough tensors may be the ones that are in it, and other weights may
    be in further formats. Weights without a quantization_config may be in any format, and plain ones may have any
    load_in. The loader calls it before it reads any weight.

    Args:
      folder: the checkpoint, for errors.
      hf: its config.json, parsed.
      formats: {name of a weight that its files store quantised: name of its format}.
      packed: those of these names whose weights stay quantised in the model; empty if there are none.
      load_in: the format that is asked for, or None, with which quantised weights may be in any format.
      beside: names of the formats of passthrough tensors, with which the model does not compute, such as a vision
        tower's.
    Raises:
      ValueError: with the folder, what is wrong about its weights, and the fix.
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
    said = format_of(layout).name
    where = f"{folder}: config.json: quantization_config says that the weights are stored in {said}"
    if stored and said not in {*beside, *formats.values()}:
        raise ValueError(
            f"{where}, but they are stored in {' and '.join(sorted(stored))}: fetch config.json again, or take "
            "quantization_config out of it to load the weights as they are"
        )
    if not stored and not layout.decoded_on_load and load_in != said and said not in beside:
        raise ValueError(
            f"{where}, but none is: set load_in = {said!r} to quantise them, or take quantization_config out of "
            "config.json to load them as they are"
        )


def quantization_config(model: Decoder) -> Config | None:
    """The entry "quantization_config" of config.json for a model, as transformers reads it: the format of its quantised
    weights, and the names of the linears and experts that are not quantised, the head's included. None where no weight
    is quantised. Saving a model calls it; exports in int4 (export/w4a16.py) have a function of their own.

    Raises:
      ValueError: weights in several formats, which config.json cannot say.
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
    """Refuses a model that is to be saved if its quantised weights, although all in one format, are stored so that
    quantization_config in config.json cannot describe all of them (Layout.differing), such as FP8 with scales of rows
    and of blocks. hf.checkpoint_tensors calls it before files are written. Such a model can be loaded and trained over,
    so quantization_config, which compat calls for models that are not saved, does not refuse it.

    Raises:
      ValueError: such weights, with how they differ and the fix.
    """
    weights = list(_stored(model).values())
    for layout in {format_of(weight).layout(weight) for weight in weights}:
        if (problem := layout.differing([w for w in weights if format_of(w).layout(w) is layout])) is not None:
            raise ValueError(
                f"save_pretrained: {problem}, and config.json can say one kind: use dequantize "
                "(jaxtune.models.files.quant), or merge the adapter, and save 16-bit weights"
            )


def parameters(state: nnx.State) -> int:
    """The number of parameters in `state`, an nnx.State of arrays or of their shapes, for reports and memory plans; a
    quantised weight counts as many as it decodes to."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, Stored))
    return sum(leaf.size for leaf in leaves)
