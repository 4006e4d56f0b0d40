"""Quantised weights of a model: which ones, in which format, and training for them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.lora import copy_structure, experts, freeze, has_adapter, linears, matrices, name_matches
from jaxtune.models.registry import weights_stored_in
from jaxtune.pallas.formats import FORMATS, Stored, dense, format_of, load_in
from jaxtune.pallas.formats.layout import Config


def check_load_in(word: str | None) -> None:
    """Raises ValueError for a format that weights cannot be loaded in."""
    if word is not None and word not in load_in():
        raise ValueError(f"load_in {word!r} is not supported; supported: None, {', '.join(map(repr, load_in()))}")


def encode(array: jax.Array, load_in: str) -> Stored:
    """A weight [..., out, in] in a format that model.load_in names."""
    return FORMATS[load_in].encode(array)


def quantize(model: Decoder, load_in: str = "nf4", skip_modules: Sequence[str] = ()) -> Decoder:
    """The model with linears and experts of its layers in few bits; embeddings, head, norms, routers and biases stay as
    they are.

    Args:
      load_in: a format of model.load_in, such as "nf4" (with double quantisation) or "fp8" (by rows).
      skip_modules: names, or last parts of names, of linears that are left alone (o_proj).
    Returns:
      a new model, all frozen: quantised weights train through adapters (get_peft_model).
    Raises:
      ValueError: another format; a model with adapters; a name that matches nothing.
    """
    check_load_in(load_in)
    if has_adapter(model):
        raise ValueError("quantize: this model has adapters: quantise the base, then add them")
    model = freeze(model)
    model.qat = None  # no weight lies on that grid any more
    modules = dict(matrices(model))
    for skipped in skip_modules:
        if not any(name_matches(name, skipped) for name in modules):
            raise ValueError(f"quantize: skip_modules: {skipped!r} matches no linear, such as {next(iter(modules))}")
    for name, linear in modules.items():
        weight = linear.stored_weight
        if not isinstance(weight, Stored) and not any(name_matches(name, skipped) for skipped in skip_modules):
            linear.weight = linear.weight.replace(encode(weight, load_in))
    return model


def dequantize(model: Decoder, modules: Sequence[str] | None = None) -> Decoder:
    """A new model without quantised weights: decoded to model.dtype. modules: only those of these names, or last parts
    of names."""
    model = copy_structure(model)
    for name, linear in matrices(model):
        weight = linear.stored_weight
        if isinstance(weight, Stored) and (modules is None or any(name_matches(name, each) for each in modules)):
            linear.weight = linear.weight.replace(dense(weight, model.dtype))
    return model


def compute_in_fp8(model: Decoder) -> Decoder:
    """A new model over the same arrays whose linears and experts in FP8 multiply as they are stored, forward and
    backward.

    Adapters, norms, routers, embeddings and the head compute as before.

    Raises:
      ValueError: no linear is in FP8.
    """
    model = copy_structure(model)
    for _, matrix in matrices(model):
        weight = matrix.stored_weight
        matrix.fp8 = isinstance(weight, Stored) and weight.compute == "fp8"
    if not computes_in_fp8(model):
        raise ValueError("model.compute = 'fp8': no linear of the model is in FP8; set model.load_in = fp8")
    return model


def computes_in_fp8(model: Decoder) -> bool:
    return any(matrix.fp8 for _, matrix in matrices(model))


def is_quantized(model: Decoder) -> bool:
    return stored_in(model) is not None


def stored_in(model: Decoder) -> str | None:
    """The name of the format that the model's quantised weights are in; None where there are none."""
    return min((format_of(weight).word for weight in _stored(model).values()), default=None)


def _stored(model: Decoder) -> dict[str, Stored]:
    """The quantised weights by the names of their linears and experts."""
    weights = ((name, matrix.stored_weight) for name, matrix in matrices(model))
    return {name: weight for name, weight in weights if isinstance(weight, Stored)}


# ---- quantisation-aware training


def prepare_qat(model: Decoder, format: str = "int4", group_size: int = 128) -> Decoder:
    """A new model over the same arrays that computes with fake-quantised weights in its layers; see fake_quant.

    Over adapters the merged weight is rounded. Linears whose input is not a multiple of group_size stay as they are
    (not_quantized names them); so do embeddings, head and norms. Values are rounded in model.dtype.

    Args:
      format: of fake_quant.FORMATS. group_size: weights of a row that share a scale.
    Raises:
      ValueError: another format or size; no linear that the groups fit; experts, which are not rounded; DoRA or
        dropout, which a merged weight cannot have.
    """
    return rounded_by(model, FakeQuant(format, group_size, model.dtype))


def rounded_by(model: Decoder, spec: FakeQuant) -> Decoder:
    """As prepare_qat, on a grid whose dtype need not be the model's."""
    for name, _ in experts(model):
        raise ValueError(
            f"qat: {name}: quantisation-aware training does not round experts; set qat=null for {model.config.family}"
        )
    model = copy_structure(model)
    for name, linear in linears(model):
        if linear.lora is not None and (linear.lora.magnitude is not None or linear.lora.rate > 0):
            what = "use_dora" if linear.lora.magnitude is not None else "lora_dropout"
            raise ValueError(f"qat: {name} has {what}, but it is the merged weight that is quantised: train without it")
        if spec.fits(linear.sizes[1]):
            linear.fake_quant = spec
    if qat_spec(model) is None:
        inputs = sorted({linear.sizes[1] for _, linear in linears(model)})
        raise ValueError(
            f"qat: group_size = {spec.group_size} divides no linear's input (they are {inputs}): nothing to do"
        )
    return model


def unrounded(model: Decoder) -> Decoder:
    """A new model over the same arrays that computes with its weights as they are."""
    model = copy_structure(model)
    for _, linear in linears(model):
        linear.fake_quant = None
    return model


def convert_qat(model: Decoder) -> Decoder:
    """A new model whose weights are the rounded ones that a prepared model computes with; its logits are the same.

    Weights keep their dtype. A model with adapters is converted by merge_adapter.

    Raises:
      ValueError: a model that is not prepared, or has adapters.
    """
    spec = qat_spec(model)
    if spec is None:
        raise ValueError("convert_qat: this model is not prepared for QAT (prepare_qat)")
    model = copy_structure(model)
    for name, linear in linears(model):
        if linear.fake_quant is None:
            continue
        if linear.lora is not None:
            raise ValueError(f"convert_qat: {name} has an adapter: merge_adapter converts such a model")
        weight = dense(linear.stored_weight, model.dtype)
        linear.weight = linear.weight.replace(round_to_grid(weight, linear.fake_quant))
        linear.fake_quant = None
    model.qat = spec
    return model


@functools.partial(jax.jit, static_argnums=1)
def round_to_grid(weight: jax.Array, spec: FakeQuant) -> jax.Array:
    """A weight [out, in] on its grid, in its own dtype."""
    return spec.round(weight).astype(weight.dtype)


def qat_spec(model: Decoder) -> FakeQuant | None:
    """How a prepared model's linears are rounded; None for any other model."""
    return next((linear.fake_quant for _, linear in linears(model) if linear.fake_quant is not None), None)


def not_quantized(model: Decoder, spec: FakeQuant) -> list[str]:
    """Names of the linears that the groups do not fit."""
    return [name for name, linear in linears(model) if not spec.fits(linear.sizes[1])]


def qat_config(model: Decoder) -> dict[str, Any] | None:
    """What config.json says, under "qat", of weights that lie on a grid; None where they do not. dtype: of the values
    and of their scales.

    There is no standard key for it: the weights are plain 16-bit ones, and `quantization_config` would make loaders
    look for packed tensors.

    Raises:
      ValueError: the model's dtype does not hold the grid.
    """
    if model.qat is None:
        return None
    require_grid(model, "the model")
    skipped = [model.config.head.name, *not_quantized(model, model.qat)]
    return {**dataclasses.asdict(model.qat), "modules_to_not_convert": skipped}


def grid_of(where: str, config: Mapping[str, Any]) -> FakeQuant | None:
    """The grid that a config.json, which `where` names, says that its weights lie on; None where it says none.

    Raises:
      ValueError: as FakeQuant.of_record.
    """
    record = config.get("qat")
    if record is None:
        return None
    if isinstance(record, Mapping) and "dtype" not in record:  # which older versions left out: the weights' own
        record = {**record, "dtype": config.get("dtype") or config.get("torch_dtype")}
    return FakeQuant.of_record(f"{where}: qat", record)


def require_grid(model: Decoder, target: str, dtype: str | None = None) -> None:
    """Raises ValueError where weights that QAT put on a grid would leave it: what `target` names is to hold them in
    another dtype (None: the model's)."""
    dtype = dtype or model.dtype
    if model.qat is not None and not model.qat.held_by(dtype):
        raise ValueError(
            f"{target} is in {dtype}, which does not hold weights that quantisation-aware training rounded to "
            f"{model.qat}: take {model.qat.dtype} (dtype, --dtype, --outtype)"
        )


# ---- checkpoints


def check_stored(folder: Path, hf: dict, stored: Set[str], load_in: str | None, beside: Set[str] = frozenset()) -> None:
    """Refuses weights that are not in the format that is asked for, or that their config.json says.

    Args:
      hf: config.json. stored: the formats of the weights, none where all have 16 bits or more. beside: those of
        tensors that the model does not compute with, of which config.json then speaks.
    Raises:
      ValueError: with the folder, what is said of its weights, and the fix.
    """
    if load_in is not None and stored - {load_in}:
        raise ValueError(
            f"{folder}: load_in = {load_in!r}, but its weights are stored in {' and '.join(sorted(stored))}: leave "
            "load_in out, or take the 16-bit original"
        )
    said = weights_stored_in(hf)
    if said is not None and not stored and load_in != said and said not in beside:
        raise ValueError(
            f"{folder}: config.json: quantization_config says that the weights are stored in {said}, but none is: set "
            f"load_in = {said!r} to quantise them, or take quantization_config out of config.json to load them as they "
            "are"
        )


def quantization_config(model: Decoder) -> Config | None:
    """What config.json says of the quantised weights, in transformers' words; None where there are none."""
    stored = _stored(model)
    if not stored:
        return None
    plain = [model.config.head.name, *(name for name, _ in matrices(model) if name not in stored)]
    found = FORMATS[str(stored_in(model))]
    weights = [weight for weight in stored.values() if format_of(weight) is found]
    return found.layout(weights[0]).config(weights, plain, model.dtype)


def parameters(state: nnx.State) -> int:
    """Parameters of a state; one in few bits counts as one."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, Stored))
    return sum(leaf.size for leaf in leaves)
