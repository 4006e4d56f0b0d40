"""Saves and loads adapters in PEFT's files, adapter_model.safetensors and adapter_config.json, as peft 0.21 has them.

Keys are `base_model.model.` + module name + `.lora_A.weight` [r, in], `.lora_B.weight` [out, r] and, for DoRA,
`.lora_magnitude_vector` [out]; of modules_to_save `base_model.model.` + name + `.weight`. Experts are parameters of one
module, `mlp.experts`, which PEFT wraps once for each adapted parameter: if both have adapters, the keys of gate_up_proj
have `.base_layer` after the module's name. lora_A is [E r, in] with an expert's rows consecutive; lora_B is [out, r E],
where column j belongs to expert j mod E. The base's digest and the record of trained_over.py are in the safetensors
metadata, because PEFT would warn of unknown keys in the config.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from safetensors import safe_open

from jaxtune.models import initial, values
from jaxtune.models.adapters import trained_over
from jaxtune.models.adapters.adapter_config import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    config_of,
    peft_name,
    read_adapter_config,
)
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import with_end_token_ids
from jaxtune.models.expressions import matching
from jaxtune.models.files import headers, shards
from jaxtune.models.files.folders import new_folder
from jaxtune.models.files.model_folder import find_config, save_companions
from jaxtune.models.files.quant import rounded_by
from jaxtune.models.heads import Head, head_of_task
from jaxtune.models.linear import Frozen
from jaxtune.models.lora import (
    experts,
    get_peft_model,
    linears,
    matrices,
    name_matches,
    pattern_values,
)
from jaxtune.models.placement import partition
from jaxtune.models.placement.streams import is_on_host
from jaxtune.models.registry import is_passthrough, text_config, whole_tensor_name
from jaxtune.models.reward import with_head
from jaxtune.system.files import atomic_write

logger = logging.getLogger(__name__)
_PREFIX = "base_model.model."
# Prefixes of the text part of a model with a vision tower: the current one, and that of transformers until 4.51.
_WHOLE = re.compile(rf"{re.escape(_PREFIX)}(model\.language_model|language_model\.model)\.")
# How an adapter identifies its base, {key of the metadata: attribute of the model}, the strictest first. Older versions
# wrote and compare only the second.
LAYOUT = "lora_B_layout"  # Unsloth's key for the order of the columns of experts' lora_B, and what it may be
LAYOUTS = "rank_major", "grouped_by_expert"  # PEFT's, and that of Unsloth's older versions
_BASE = {"jaxtune_base_digest": "base_digest", "jaxtune_base_fingerprint": "base_fingerprint"}


@dataclasses.dataclass(frozen=True)
class ExpertTensor:
    """An expert matrix's lora_A or lora_B in the two-dimensional layout of PEFT's files, with the methods of an
    nnx.Variable.
    """

    variable: nnx.Variable  # the variable of ExpertLora: a [E, r, in] or b [E, out, r]
    matrix: str  # "gate_up_proj" or "down_proj"
    is_b: bool  # True: it is lora_B; False: lora_A
    # True: the base's matrix of each expert is [in, out]; False: [out, in]. _current_experts reads it for older files
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """[E r, in] of lora_A, [out, r E] of lora_B."""
        experts, first, second = self.variable.shape
        return (first, second * experts) if self.is_b else (experts * first, second)

    def get_value(self) -> jax.Array:
        value = self.variable.get_value()
        return (value.transpose(1, 2, 0) if self.is_b else value).reshape(self.shape)

    def set_value(self, value: jax.Array | np.ndarray) -> None:
        experts, first, second = self.variable.shape
        if self.is_b:
            value = value.reshape(first, second, experts).transpose(2, 0, 1)
        self.variable.set_value(value.reshape(experts, first, second))


def _expert_tensors(model: Decoder) -> dict[str, ExpertTensor]:
    adapted = [(name, matrix.lora, matrix.transposed) for name, matrix in experts(model)]
    adapted = [(name, lora, transposed) for name, lora, transposed in adapted if lora is not None]
    names = {name for name, *_ in adapted}
    tensors = {}
    for name, lora, transposed in adapted:
        module, matrix_name = name.rsplit(".", 1)
        inner = matrix_name == "gate_up_proj" and f"{module}.down_proj" in names
        prefix = f"{_PREFIX}{module}{'.base_layer' * inner}"
        tensors[f"{prefix}.lora_A.weight"] = ExpertTensor(lora.a, matrix_name, False, transposed)
        tensors[f"{prefix}.lora_B.weight"] = ExpertTensor(lora.b, matrix_name, True, transposed)
    return tensors


def adapter_tensors(model: Decoder) -> dict[str, nnx.Variable | ExpertTensor]:
    """{PEFT's key, with the text model's module names: variable} of everything that an adapter file contains. A trained
    head that is tied to the embedding is there under both names.
    """
    tensors: dict[str, nnx.Variable | ExpertTensor] = {}
    for name, linear in linears(model):
        if linear.lora is None:
            continue
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = linear.lora.a
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = linear.lora.b
        if linear.lora.magnitude is not None:
            tensors[f"{_PREFIX}{name}.lora_magnitude_vector"] = linear.lora.magnitude
    tensors |= _expert_tensors(model)
    if isinstance(model.embedding.weight, nnx.Param):
        tensors[f"{_PREFIX}model.embed_tokens.weight"] = model.embedding.weight
    if isinstance(model.head_variable, nnx.Param):
        tensors[f"{_PREFIX}{model.config.head.name}.weight"] = model.head_variable
    return tensors


def save_adapter(model: Decoder, path: str | os.PathLike, tokenizer: Any = None) -> None:
    """Writes the model's adapter as a PEFT folder that `peft.PeftModel.from_pretrained` loads, in float32. The folder,
    new or empty before, appears complete or not at all.

      model: has an adapter.
      path: the folder.
      tokenizer: saved with its chat template; after training pass Trainer.tokenizer.

    Raises ValueError for an adapter that PEFT's config cannot express, other trainable tensors, a value that is not
    finite, or a path in use.
    """
    files = adapter_content(model)
    with new_folder(path, "save_adapter") as folder:
        write_adapter(folder, *files)
        save_companions(folder, (), tokenizer)


def write_adapter(
    folder: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes an adapter's two files into `folder`, without flushing them to the disk, which new_folder does for the
    whole folder.

      config: adapter_config.json.
      arrays: {name in the file: float32 tensor}, all in host memory.
      metadata: of the safetensors file, texts by name.
    """
    tensors = [(name, array.shape, array.dtype) for name, array in sorted(arrays.items())]
    shards.write_file(folder / WEIGHTS_NAME, tensors, arrays.__getitem__, metadata)
    atomic_write(folder / CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True) + "\n", durable=False)


class AdapterContent(NamedTuple):
    """The content of an adapter's two files."""

    config: dict[str, Any]  # adapter_config.json
    arrays: dict[str, np.ndarray]  # float32, by PEFT's keys
    # of the safetensors file: the digests of the base that are known, and the TrainedOver record as JSON
    metadata: dict[str, str]


def adapter_content(model: Decoder) -> AdapterContent:
    """Collects what `write_adapter` writes in host memory. Every process that has a share of the weights must call it.
    Raises ValueError as save_adapter.
    """
    config = config_of(model)
    variables = adapter_tensors(model)
    covered = {id(getattr(variable, "variable", variable)) for variable in variables.values()}
    other_paths = [
        ".".join(map(str, where))
        for where, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.Param) and id(variable) not in covered
    ]
    if other_paths:
        raise ValueError(
            f"save_adapter: {_some(other_paths)} are trained too, and an adapter file cannot contain them; "
            "save the whole model (save_pretrained)"
        )
    arrays = {
        _PREFIX + peft_name(model, key.removeprefix(_PREFIX)): partition.on_host(v.get_value()).astype(np.float32)
        for key, v in variables.items()
    }
    broken = [key for key, array in arrays.items() if not np.isfinite(array).all()]
    if broken:
        raise ValueError(f"save_adapter: not finite, so nothing was saved: {_some(broken)}")
    metadata = {key: getattr(model, attribute) for key, attribute in _BASE.items()}
    metadata[trained_over.METADATA] = trained_over.of_model(model).to_text()
    return AdapterContent(config, arrays, {key: value for key, value in metadata.items() if value is not None})


def load_adapter(model: Decoder, path: str | os.PathLike) -> Decoder:
    """Adds the adapter of a PEFT folder to a model that has none: a new model over the same base arrays that trains
    only the adapter, in float32. A warning says if the base has another form than in training. A recorded grid of QAT
    rounds merged weights as in training. The folder's end-of-text tokens are added.

      model: the base; for an adapter that scores texts, the causal model too.

    Raises ValueError for damaged or pickled files, an unsupported PEFT feature, targets that match nothing, tensors
    that do not fit or are not finite, another base by its digest, or a model with an adapter.
    """
    return _moved(adapter_on_host(model, path), jax.device_put)


def to_host(model: Decoder) -> Decoder:
    """Moves an adapter's tensors to host memory, in place, as numpy arrays."""
    return _moved(model, functools.partial(jax.tree.map, np.asarray))


def _moved(model: Decoder, move: Callable[[list], list]) -> Decoder:
    variables = [_variable(tensor) for tensor in adapter_tensors(model).values()]
    for variable, value in zip(variables, move([each.get_value() for each in variables]), strict=True):
        variable.set_value(value)
    return model


class Ahead:
    """An adapter that is read before the arrays of its base, whose form is known. Errors are those of load_adapter.

    base: as shapes.

    Attributes:
      shapes: the model that load_adapter makes, as shapes.
    """

    def __init__(self, base: Decoder, path: str | os.PathLike):
        self._path = Path(path).expanduser()
        self._is_own_head = base.config.head.is_text and not adapter_head(self._path).is_text
        self.shapes = adapter_on_host(base, path, is_known=False)
        self._arrays = {key: _variable(tensor).get_value() for key, tensor in adapter_tensors(self.shapes).items()}
        _moved(self.shapes, lambda arrays: [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays])

    def over(self, base: Decoder) -> Decoder:
        """load_adapter over the base, whose form is that of the shapes unless it is partly on the host."""
        state = nnx.state(base)
        leaves = jax.tree.leaves(state)
        if self._is_own_head or any(not isinstance(leaf, jax.Array) or is_on_host(leaf) for leaf in leaves):
            return load_adapter(base, self._path)
        with safe_open(self._path / WEIGHTS_NAME, framework="numpy") as file:
            _check_base(self._path, file.metadata() or {}, base)
        _note_difference(self._path, base)
        adapted = self.shapes
        adapted.base_digest, adapted.base_fingerprint = base.base_digest, base.base_fingerprint
        _share_base(state, adapted)
        arrays = jax.device_put(self._arrays)
        for key, tensor in adapter_tensors(adapted).items():
            _variable(tensor).set_value(arrays[key])
        return adapted


def adapter_head(folder: Path) -> Head:
    """Of the model that an adapter makes."""
    return head_of_task(read_adapter_config(folder).get("task_type"))


def _note_difference(folder: Path, base: Decoder) -> None:
    """Says how a base differs from what the adapter was trained over."""
    over = trained_over.read(folder)
    if over is not None and (mismatch := trained_over.difference(over, base)) is not None:
        logger.warning(
            "%s: %s, so it does not compute what was trained. from_pretrained(%r) loads the base as it was (in a "
            "recipe, model.load_in)",
            folder,
            mismatch,
            str(folder),
        )


def _variable(tensor: nnx.Variable | ExpertTensor) -> nnx.Variable:
    return tensor.variable if isinstance(tensor, ExpertTensor) else tensor


def adapter_on_host(model: Decoder, path: str | os.PathLike, is_known: bool = True) -> Decoder:
    """load_adapter with the adapter's tensors in host memory, as numpy arrays. is_known: False: the base has
    shapes, and nothing is said of its form.
    """
    folder = Path(path).expanduser()
    config, where = read_adapter_config(folder), folder / CONFIG_NAME
    if model.config.head.is_text:
        model = with_head(model, head_of_task(config.get("task_type")))
    arrays, metadata = _read_tensors(folder)
    _check_base(folder, metadata, model)
    if model.vision is None:
        _refuse_towers(folder, model, arrays)
    over = trained_over.read(folder)
    if is_known:
        _note_difference(folder, model)
    # For a model with a vision tower the adapter's config has the names that linears have in the whole model.
    spelled = whole_tensor_name if any(map(_WHOLE.match, arrays)) else str
    arrays = {_WHOLE.sub(f"{_PREFIX}model.", key): array for key, array in arrays.items()}
    text_names = {spelled(name): name for name, _ in matrices(model)}
    names = [spelled(name) for name, _ in linears(model)]
    targets = _targets(where, config, names)
    parameters = config.get("target_parameters") or []
    weights = [name for name in names if any(name_matches(f"{name}.weight", target) for target in parameters)]
    expert_names = [
        name
        for name in text_names
        if name not in names and any(name_matches(name, parameter) for parameter in parameters)
    ]
    if parameters and not weights + expert_names:
        raise ValueError(f"{folder}: target_parameters = {parameters!r} match no experts and no linear of this model")
    if not targets + weights + expert_names:
        raise ValueError(
            f"{folder}: target_modules {config.get('target_modules')!r} match no linear of this model; "
            f"it has {names[0]} and the like"
        )

    # The names that PEFT matches with patterns. A pattern may match nothing.
    adapted_names = {name: text_names[name] for name in targets + expert_names}
    adapted_names |= {f"{name}.weight": text_names[name] for name in weights}

    def patterns(key):
        value_by_name = pattern_values(f"{where}: {key}", config.get(key) or {}, list(adapted_names))
        return {re.escape(adapted_names[name]): value for name, value in value_by_name.items()}

    settings = dict(
        r=config["r"],
        lora_alpha=config.get("lora_alpha", 8),
        target_modules=[text_names[name] for name in names if name in {*targets, *weights}],
        target_parameters=[text_names[name] for name in expert_names],
        lora_dropout=config.get("lora_dropout", 0.0),
        use_rslora=config.get("use_rslora", False),
        use_dora=config.get("use_dora", False),
        modules_to_save=_modules_to_save(config),
        rank_pattern=patterns("rank_pattern"),
        alpha_pattern=patterns("alpha_pattern"),
    )
    with initial.as_shapes():  # so that no adapter is allocated with a rank that the file does not have
        adapted = get_peft_model(model, **settings)
    variables = adapter_tensors(adapted)
    _check_tied(folder, model, arrays)
    arrays = _current_experts(folder, config, variables, _rank_major(folder, config, variables, arrays))
    _check_tensors(folder, {key: variable.shape for key, variable in variables.items()}, arrays)
    for key, variable in variables.items():
        variable.set_value(np.asarray(arrays[key], np.float32))
    if over is not None and over.qat is not None:
        adapted = rounded_by(adapted, over.qat)
    return with_end_token_ids(adapted, () if over is None else over.eos_token_ids)


def _share_base(state: nnx.State, adapted: Decoder) -> None:
    """Sets the base arrays of `adapted`, whose variables have only shapes, to those of a base's state, in place."""
    base = dict(nnx.to_flat_state(state))
    for path, variable in nnx.to_flat_state(nnx.state(adapted)):
        if isinstance(variable, Frozen):
            path = (*path[:-1], "weight") if path[-1] == "original" else path
            variable.set_value(base[path].get_value())


def _some(names: Sequence[str], limit: int = 8) -> str:
    remainder = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + remainder


def _read_tensors(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """({PEFT's key: array in the file's dtype}, the file's metadata). ValueError for a damaged file or other dtypes."""
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickled = folder / "adapter_model.bin"
        if pickled.exists():
            raise ValueError(f"{pickled} is a pickle, which can run code: refused; save it as {WEIGHTS_NAME} with PEFT")
        raise ValueError(f"load_adapter: {folder} has no {WEIGHTS_NAME}")
    entries = headers.read_header(path)
    for entry in entries.values():
        headers.check_entry(entry)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    return {key: shards.read_tensor(entry) for key, entry in entries.items()}, metadata


def _targets(path: Path, config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The linears among `names` that PEFT would adapt. ValueError for an unsupported layers_pattern."""

    def matched(key):
        setting = config.get(key) or ()
        if setting == "all-linear" and key == "target_modules":
            return set(names)
        if isinstance(setting, str):
            return set(matching(f"{path}: {key}", setting, names))
        return {name for name in names if any(name_matches(name, target) for target in setting)}

    targeted, excluded = matched("target_modules"), matched("exclude_modules")
    selected = [name for name in names if name in targeted and name not in excluded]
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return selected
    pattern = config.get("layers_pattern") or "layers"
    if pattern not in ("layers", ["layers"]):
        raise ValueError(f"{path}: layers_pattern = {pattern!r} is not supported; layers are called 'layers' here")
    numbers = {str(number) for number in (layers if isinstance(layers, list) else [layers])}
    # A linear whose whole name is in the list is adapted in any layer, as in PEFT, or beside the layers.
    listed = config.get("target_modules", ())
    listed = () if isinstance(listed, str) else listed
    return [name for name in selected if name in listed or name.partition(".layers.")[2].partition(".")[0] in numbers]


def _rank_major(folder: Path, config, variables, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The file's tensors with lora_B of experts in PEFT's order of columns: rank after rank, not expert after expert.
    ValueError for another order than these two, or one that is not known.
    """
    where, arrays = folder / CONFIG_NAME, dict(arrays)
    named = config.get("unsloth_fused_expert_lora", {}).get("parameters") or {}
    values.mapping(f"{where}: unsloth_fused_expert_lora.parameters", named)
    named = {name.rpartition(".")[2]: parameter for name, parameter in named.items()}
    for key, tensor in variables.items():
        if not isinstance(tensor, ExpertTensor) or not tensor.is_b or key not in arrays:
            continue
        layout = named.get(tensor.matrix, config.get(LAYOUT))
        layout = layout.get(LAYOUT) if isinstance(layout, Mapping) else layout
        count, rank = tensor.variable.shape[0], tensor.variable.shape[2]
        if layout not in (None, *LAYOUTS):
            raise ValueError(
                f"{where}: {LAYOUT} of {tensor.matrix} is {layout!r}: save it in PEFT's layout ({LAYOUTS[0]!r}) with a "
                "current Unsloth"
            )
        if layout is None and rank > 1 and "unsloth_fixed" in config.get("auto_mapping", {}):
            raise ValueError(
                f"{where}: Unsloth wrote this adapter of experts without {LAYOUT}, so the order of lora_B's columns is "
                f"not known: `jaxtune export {folder} NEW --to adapter --prove --rows FILE` takes the one with the "
                f"lower loss on rows of yours; or set {LAYOUT} to {LAYOUTS[0]!r} or {LAYOUTS[1]!r}"
            )
        if layout == LAYOUTS[1] and arrays[key].ndim == 2 and arrays[key].shape[1] == rank * count:
            arrays[key] = arrays[key].reshape(-1, count, rank).swapaxes(1, 2).reshape(-1, rank * count)
    return arrays


def _current_experts(folder: Path, config, variables, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The file's tensors with those of experts in PEFT's current layout; what fits neither layout stays.

    PEFT before 0.19 assumed that experts' weights are [in, out]: for [out, in] the current A is its B^T, the current B
    its A^T. ValueError where neither shapes nor PEFT's version tell.
    """
    arrays = dict(arrays)
    version = tuple(int(digits) for digits in re.findall(r"\d+", str(config.get("peft_version") or ""))[:2])
    for key, tensor in variables.items():
        if not isinstance(tensor, ExpertTensor) or tensor.is_b or tensor.transposed or key not in arrays:
            continue
        key_b = key.replace("lora_A", "lora_B")
        a, b = arrays[key], arrays.get(key_b)
        count, rank, in_size = tensor.variable.shape
        out_size = variables[key_b].shape[0]
        if b is None or a.shape != (count * rank, out_size) or b.shape != (in_size, rank * count):
            continue
        if in_size == out_size:
            if not version:
                raise ValueError(
                    f"{folder / CONFIG_NAME}: peft_version is missing: {key} is square, so its layout (which PEFT 0.19 "
                    "changed) cannot be determined; add the version of PEFT that wrote it"
                )
            if version >= (0, 19):
                continue
        arrays[key] = b.reshape(in_size, rank, count).transpose(2, 1, 0).reshape(count * rank, in_size)
        arrays[key_b] = a.reshape(count, rank, out_size).transpose(2, 1, 0).reshape(out_size, rank * count)
    return arrays


def _check_base(folder: Path, metadata: Mapping[str, str], model: Decoder) -> None:
    """ValueError if the base's digest, or an older fingerprint, in the adapter's file is not the model's."""
    for key, attribute in _BASE.items():
        recorded, base_value = metadata.get(key), getattr(model, attribute)
        if recorded is None or base_value is None:
            continue
        if recorded != base_value:
            kind = "digest" if attribute == "base_digest" else "fingerprint"
            raise ValueError(
                f"{folder}: this adapter was trained on another base ({kind} {recorded}, this model's is {base_value}):"
                " its weights or its config.json differ; load the base that it names in base_model_name_or_path"
            )
        return


def adapts_tower(folder: Path, base: str) -> bool:
    """Whether an adapter's file has tensors of its base's tower; False without a file or base that can be read."""
    try:
        family = text_config(find_config(base)).get("model_type")
        return bool(_beside_text(headers.read_header(folder / WEIGHTS_NAME), str(family)))
    except (ValueError, OSError):
        return False


def _beside_text(keys: Iterable[str], family: str) -> list[str]:
    return [name for key in keys if is_passthrough(name := key.removeprefix(_PREFIX), family)]


def _refuse_towers(folder: Path, model: Decoder, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError if the adapter adapts modules beside the text model, which the model lacks."""
    if names := _beside_text(arrays, model.config.family):
        raise ValueError(
            f"{folder}: this adapter adapts {names[0].removesuffix('.weight')} and {len(names) - 1} more tensors of a "
            "tower, and the model was loaded without it: load it with pictures=True"
        )


def _modules_to_save(config: Mapping[str, Any]) -> list[str]:
    """The last parts of names, without "classifier" for a model that scores texts."""
    names = {name.rsplit(".", 1)[-1] for name in config.get("modules_to_save") or ()}
    return sorted(names if head_of_task(config.get("task_type")).is_text else names - {"classifier"})


def _check_tied(folder: Path, model: Decoder, arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError if the model ties embedding and head, and the file has only one of them, or two that differ."""
    if model.head is not None:
        return
    embedding, head = (arrays.get(f"{_PREFIX}{name}.weight") for name in ("model.embed_tokens", "lm_head"))
    if embedding is None and head is None:
        return
    if embedding is None or head is None or not np.array_equal(embedding, head):
        raise ValueError(
            f"{folder}: this adapter has an embedding and a head that differ, but the model ties them: refused; "
            "train it with ensure_weight_tying=True in PEFT, or load it onto a base with an untied head"
        )


def _check_tensors(folder: Path, shapes: Mapping[str, tuple], arrays: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError, in one message, for tensors that are missing, unexpected, misshaped or not finite."""
    problems = []
    missing = [key for key in shapes if key not in arrays]
    unexpected = [key for key in arrays if key not in shapes]
    misshaped = [
        f"{key} {arrays[key].shape} instead of {tuple(shapes[key])}"
        for key in shapes
        if key in arrays and arrays[key].shape != tuple(shapes[key])
    ]
    broken = [key for key in arrays if not np.isfinite(arrays[key].astype(np.float32)).all()]
    for label, keys in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("misshaped", misshaped),
        ("not finite", broken),
    ):
        if keys:
            problems.append(f"{len(keys)} {label}: {_some(keys)}")
    if problems:
        raise ValueError(f"{folder / WEIGHTS_NAME}: the tensors do not fit this model: " + "; ".join(problems))
