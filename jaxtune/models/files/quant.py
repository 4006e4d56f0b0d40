"""Quantised weights of a model: which ones, how bitsandbytes' checkpoints store four bits, and training for them.

Beside `X.weight` (the codes, as bytes of whatever dtype) lie `X.weight.absmax`, `.quant_map`, with double quantisation
`.nested_absmax` and `.nested_quant_map`, and `.quant_state.bitsandbytes__nf4` (or `__fp4`): the bytes of a JSON object
with shape, dtype and block sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.files import fp8_files, shards
from jaxtune.models.files.digests import Digest
from jaxtune.models.files.file_plan import FileTensor
from jaxtune.models.lora import copy_structure, experts, freeze, has_adapter, linears, matrices, name_matches
from jaxtune.models.registry import weights_stored_in
from jaxtune.pallas.formats import FP4, FP8, NF4, FourBit, Stored, dense
from jaxtune.pallas.formats.four_bit import BLOCK, NESTED_BLOCK

LOAD_IN = ("nf4", "fp8")
_TYPES: dict[str, type[FourBit]] = {"nf4": NF4, "fp4": FP4}
_PART = re.compile(r"(.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)")
_STATE = "quant_state.bitsandbytes__"


def check_load_in(load_in: str | None) -> None:
    """Raises ValueError for a format that weights cannot be loaded in."""
    if load_in is not None and load_in not in LOAD_IN:
        raise ValueError(f"load_in {load_in!r} is not supported; supported: None, {', '.join(map(repr, LOAD_IN))}")


def encode(array: jax.Array, load_in: str) -> Stored:
    """A weight [..., out, in] in a format of LOAD_IN: NF4 with double quantisation, or FP8 by rows."""
    return NF4.encode(array) if load_in == "nf4" else FP8.encode(array)


def quantize(model: Decoder, load_in: str = "nf4", skip_modules: Sequence[str] = ()) -> Decoder:
    """The model with linears and experts of its layers in few bits; embeddings, head, norms, routers and biases stay as
    they are.

    Args:
      load_in: "nf4" or "fp8", see encode.
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
        matrix.fp8 = isinstance(matrix.stored_weight, FP8)
    if not computes_in_fp8(model):
        raise ValueError("model.compute = 'fp8': no linear of the model is in FP8; set model.load_in = fp8")
    return model


def computes_in_fp8(model: Decoder) -> bool:
    return any(matrix.fp8 for _, matrix in matrices(model))


def is_quantized(model: Decoder) -> bool:
    return stored_in(model) is not None


def stored_in(model: Decoder) -> str | None:
    """The format of LOAD_IN that the model's quantised weights are in; None where there are none."""
    kinds = {type(matrix.stored_weight) for _, matrix in matrices(model)}
    return "fp8" if FP8 in kinds else "nf4" if any(issubclass(kind, FourBit) for kind in kinds) else None


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
    skipped = [model.config.head_name, *not_quantized(model, model.qat)]
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


@dataclasses.dataclass(frozen=True)
class PackedEntry(shards.TensorEntry):
    """A four-bit tensor of a checkpoint: `shape` is the tensor's own, `size_bytes` the sum of its parts'."""

    parts: Mapping[str, shards.TensorEntry]  # "" is the codes
    quant_type: str
    dtype_name: str
    nested_offset: float | None


def gather_packed(entries: Mapping[str, shards.TensorEntry]) -> dict[str, shards.TensorEntry]:
    """The entries, with all those of a four-bit tensor in one PackedEntry under the name of its weight.

    Raises:
      ValueError: a part that is missing or does not fit; a type or block size that is not supported.
    """
    groups: dict[str, dict[str, shards.TensorEntry]] = {}
    whole = dict(entries)
    for name, entry in entries.items():
        match = _PART.fullmatch(name)
        if match:
            groups.setdefault(match[1], {})[match[2]] = entry
            del whole[name]
    for name, parts in groups.items():
        if name not in whole:
            raise ValueError(f"{_first(parts).file}: {_first(parts).name} is there, but {name} is missing")
        whole[name] = _packed(name, {"": whole[name], **parts})
    return whole


def _first(parts: Mapping[str, shards.TensorEntry]) -> shards.TensorEntry:
    return next(iter(parts.values()))


def _packed(name: str, parts: dict[str, shards.TensorEntry]) -> PackedEntry:
    codes = parts[""]
    where = f"{codes.file}: {name}"
    state_keys = [key for key in parts if key.startswith(_STATE)]
    if len(state_keys) != 1:
        raise ValueError(f"{where}: has {len(state_keys)} quant_state tensors, not one; fetch or save it again")
    quant_type = state_keys[0].removeprefix(_STATE)
    if quant_type not in _TYPES:
        raise ValueError(f"{where}: quant_type {quant_type!r} is not supported; supported: {', '.join(_TYPES)}")
    entry = parts[state_keys[0]]
    try:
        state = json.loads(shards.read_bytes(entry).tobytes())
        shape, dtype_name = tuple(map(int, state["shape"])), str(state["dtype"])
        nested = "nested_absmax" in parts
        sizes = (state["blocksize"], state["nested_blocksize"] if nested else NESTED_BLOCK)
        offset = float(state["nested_offset"]) if nested else None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: its quant_state is damaged ({type(error).__name__}: {error})") from None
    if sizes != (BLOCK, NESTED_BLOCK):
        raise ValueError(f"{where}: block sizes {sizes} are not supported; supported: {(BLOCK, NESTED_BLOCK)}")
    if dtype_name not in [dtype.name for dtype in shards.DTYPES.values()]:
        raise ValueError(f"{where}: quantised from {dtype_name}, which is not supported")
    blocks = -(-int(np.prod(shape, dtype=np.int64)) // BLOCK)
    wanted = {"absmax": ("U8", blocks) if nested else ("F32", 4 * blocks), "quant_map": ("F32", 4 * 16)}
    if nested:
        wanted |= {"nested_absmax": ("F32", 4 * -(-blocks // NESTED_BLOCK)), "nested_quant_map": ("F32", 4 * 256)}
    wanted[""] = (codes.dtype, -(-int(np.prod(shape, dtype=np.int64)) // 2))
    for key, (dtype, size_bytes) in wanted.items():
        found = parts.get(key)
        if found is None or (found.dtype, found.size_bytes) != (dtype, size_bytes):
            got = "is missing" if found is None else f"has {found.size_bytes} bytes of {found.dtype}"
            raise ValueError(
                f"{where}{'.' * bool(key)}{key} {got}; a four-bit tensor {shape} needs {size_bytes} bytes of {dtype}"
            )
    total = sum(part.size_bytes for part in parts.values())
    fields = (name, codes.dtype, shape, codes.file, codes.offset, total)
    return PackedEntry(*fields, parts, quant_type, dtype_name, offset)


def read_packed(entry: PackedEntry) -> tuple[FourBit, Digest]:
    """(the tensor, its leaves numpy arrays; the digest of all its parts)."""
    codes: Any = shards.read_bytes(entry.parts[""])
    arrays: dict[str, Any] = {key: shards.read_tensor(part) for key, part in entry.parts.items() if key}
    kind = _TYPES[entry.quant_type]
    if not np.allclose(arrays["quant_map"], kind.table, rtol=0, atol=1e-6):
        raise ValueError(f"{entry.file}: {entry.name}.quant_map is not the table of {entry.quant_type}")
    digest = Digest.joined([Digest.of(entry.name, codes), *(Digest.of(key, arrays[key]) for key in sorted(arrays))])
    offset = None if entry.nested_offset is None else np.float32(entry.nested_offset)
    leaves: list[Any] = [codes, *map(arrays.get, ("absmax", "nested_absmax", "nested_quant_map")), offset]
    return kind(*leaves, shape=entry.shape, dtype_name=entry.dtype_name), digest


def checkpoint_tensors(name: str, weight: FourBit, offset: float | None) -> dict[str, FileTensor]:
    """What a checkpoint stores for a four-bit weight, of which no more than the shapes need be known.

    offset: the weight's own, as a number: it stands among the bytes of its quant_state.
    """
    state: dict[str, Any] = {"quant_type": weight.quant_type, "blocksize": BLOCK, "dtype": weight.dtype_name}
    state["shape"] = list(weight.shape)
    table = type(weight).table

    def tensor(array: Any, of: Callable[[FourBit], Any]) -> FileTensor:
        return FileTensor(tuple(array.shape), np.dtype(array.dtype), of)

    codes = FileTensor((weight.codes.size, 1), np.dtype(weight.codes.dtype), lambda w: w.codes.reshape(-1, 1))
    found = {
        name: codes,
        f"{name}.absmax": tensor(weight.absmax, lambda w: w.absmax),
        f"{name}.quant_map": tensor(table, lambda w: table),
    }
    if weight.offset is not None:
        found[f"{name}.nested_absmax"] = tensor(weight.nested_absmax, lambda w: w.nested_absmax)
        found[f"{name}.nested_quant_map"] = tensor(weight.nested_map, lambda w: w.nested_map)
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    content = np.frombuffer(json.dumps(state).encode(), np.uint8)
    found[f"{name}.{_STATE}{weight.quant_type}"] = tensor(content, lambda w: content)
    return found


def offset_of(weight: FourBit, make: Callable[[], FourBit]) -> float | None:
    """The offset of a weight, which is made where no more than its shapes is known."""
    if weight.offset is None:
        return None
    known = weight if isinstance(weight.offset, jax.Array) else make()
    assert known.offset is not None
    return float(jax.device_get(known.offset))


def check_stored(folder: Path, hf: dict, stored: Set[str], load_in: str | None, carried_in_fp8: bool = False) -> None:
    """Refuses weights that are not in the format that is asked for, or that their config.json says.

    Args:
      hf: config.json. stored: the formats of the weights, none where all have 16 bits or more. carried_in_fp8: whether
        tensors that the model does not compute with are stored in FP8, of which config.json then speaks.
    Raises:
      ValueError: with the folder, what is said of its weights, and the fix.
    """
    if load_in is not None and stored - {load_in}:
        raise ValueError(
            f"{folder}: load_in = {load_in!r}, but its weights are stored in {' and '.join(sorted(stored))}: leave "
            "load_in out, or take the 16-bit original"
        )
    said = weights_stored_in(hf)
    if said is not None and not stored and load_in != said and not (said == "fp8" and carried_in_fp8):
        raise ValueError(
            f"{folder}: config.json: quantization_config says that the weights are stored in {said}, but none is: set "
            f"load_in = {said!r} to quantise them, or take quantization_config out of config.json to load them as they "
            "are"
        )


def quantization_config(model: Decoder) -> dict[str, Any] | None:
    """What config.json says of the quantised weights, in transformers' words; None where there are none."""
    weights = {name: matrix.stored_weight for name, matrix in matrices(model)}
    if stored_in(model) == "fp8":
        return fp8_files.quantization_config(weights, model.config.head_name)
    packed = [weight for weight in weights.values() if isinstance(weight, FourBit)]
    if not packed:
        return None
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": packed[0].quant_type,
        "bnb_4bit_use_double_quant": packed[0].offset is not None,
        "bnb_4bit_compute_dtype": model.dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": [
            model.config.head_name,
            *(name for name, w in weights.items() if not isinstance(w, FourBit)),
        ],
    }


def parameters(state: nnx.State) -> int:
    """Parameters of a state; one in few bits counts as one."""
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, Stored))
    return sum(leaf.size for leaf in leaves)
