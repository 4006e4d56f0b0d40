"""Adapters in PEFT's files: adapter_model.safetensors and adapter_config.json, as peft 0.21 writes and reads them.

Keys are `base_model.model.` + module name + `.lora_A.weight` [r, in], `.lora_B.weight` [out, r] and, for DoRA,
`.lora_magnitude_vector` [out]; a module of modules_to_save is `base_model.model.` + its name + `.weight`.

Experts are parameters of one module, `mlp.experts`, which PEFT wraps once for each that has an adapter, the first in
order innermost: with both adapted, gate_up_proj's keys have `.base_layer` after the module's name. lora_A is [E r, in],
an expert's rows together; lora_B [out, r E], where column j belongs to expert j mod E. The base's
fingerprint is in the metadata of the safetensors file: PEFT ignores it there, and warns of unknown config keys.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import safe_open

from jaxtune.models import partition, shards, values
from jaxtune.models.decoder import Decoder
from jaxtune.models.expressions import matching
from jaxtune.models.folders import new_folder
from jaxtune.models.linear import Frozen
from jaxtune.models.lora import (
    adapter_settings,
    experts,
    freeze,
    get_peft_model,
    linears,
    name_matches,
    pattern_values,
)
from jaxtune.models.model_folder import read_json
from jaxtune.models.reward import reward_model

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_PREFIX = "base_model.model."
_FINGERPRINT = "jaxtune_base_fingerprint"
_SCORES = "SEQ_CLS"  # the task_type of an adapter of a model that scores texts
_PEFT_VERSION = "0.21.2"  # whose format this is

# Settings of PEFT's LoraConfig that load_adapter follows, and those that change nothing once an adapter is trained.
# Any other setting must be unset: what it asks for is not done here.
_FOLLOWED = {
    "alpha_pattern", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "modules_to_save", "peft_type", "r", "rank_pattern", "target_modules", "use_dora", "use_rslora",
    "ensure_weight_tying", "init_lora_weights", "bias", "target_parameters", "unsloth_fused_expert_lora",
}  # fmt: skip
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
    # Of how B and A started; the file holds what they became.
    "eva_config", "modules_to_tie", "target_modules_to_tie",
}  # fmt: skip
# Starts that change the base's weights too: such an adapter does not fit the base that people have.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


@dataclasses.dataclass(frozen=True)
class ExpertTensor:
    """lora_A or lora_B of experts as a file holds it, over the variable that holds it here; used like a variable."""

    variable: nnx.Variable
    is_b: bool
    transposed: bool  # the expert's weight is [in, out]

    @property
    def shape(self) -> tuple[int, int]:
        experts, first, second = self.variable.shape
        return (first, second * experts) if self.is_b else (experts * first, second)

    def get_value(self) -> jax.Array:
        value = self.variable.get_value()
        return (value.transpose(1, 2, 0) if self.is_b else value).reshape(self.shape)

    def set_value(self, value: jax.Array) -> None:
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
        module, part = name.rsplit(".", 1)
        inner = part == "gate_up_proj" and f"{module}.down_proj" in names
        prefix = f"{_PREFIX}{module}{'.base_layer' * inner}"
        tensors[f"{prefix}.lora_A.weight"] = ExpertTensor(lora.a, False, transposed)
        tensors[f"{prefix}.lora_B.weight"] = ExpertTensor(lora.b, True, transposed)
    return tensors


def adapter_tensors(model: Decoder) -> dict[str, nnx.Variable | ExpertTensor]:
    """PEFT's key -> variable, for everything that an adapter file holds. A tied head is there under both its names."""
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
        tensors[f"{_PREFIX}{model.config.head_name}.weight"] = model.head_variable
    return tensors


def save_adapter(model: Decoder, path: str | os.PathLike, tokenizer: Any = None) -> None:
    """Writes the model's adapter as a PEFT folder that `peft.PeftModel.from_pretrained` loads.

    Adapters and modules_to_save are written in float32. The folder appears whole or not at all.

    Args:
      path: a folder that does not exist or is empty.
      tokenizer: saved beside the adapter, if given, with its chat template: give Trainer.tokenizer after training.
    Raises:
      ValueError: the model has no adapter; something trains that an adapter file cannot hold; a value is not finite;
        `path` exists and is not an empty folder.
    """
    files = adapter_content(model)
    with new_folder(path, "save_adapter") as folder:
        write_adapter(folder, *files)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def write_adapter(
    folder: Path, config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes the two files of an adapter into a folder; see adapter_content."""
    tensors = [(name, array.shape, array.dtype) for name, array in sorted(arrays.items())]
    shards.write_file(folder / WEIGHTS_NAME, tensors, arrays.__getitem__, metadata)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def adapter_content(model: Decoder) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """(adapter_config.json, the tensors, the metadata beside them) of a model's adapter; errors as in save_adapter."""
    config = _config_of(model)
    variables = adapter_tensors(model)
    held = {id(getattr(variable, "variable", variable)) for variable in variables.values()}
    others = [
        ".".join(map(str, where))
        for where, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.Param) and id(variable) not in held
    ]
    if others:
        raise ValueError(
            f"save_adapter: {_some(others)} are trained too, and an adapter file cannot hold them; "
            "save the whole model (save_pretrained)"
        )
    arrays = {key: partition.on_host(variable.get_value()).astype(np.float32) for key, variable in variables.items()}
    broken = [key for key, array in arrays.items() if not np.isfinite(array).all()]
    if broken:
        raise ValueError(f"save_adapter: not finite, so nothing was saved: {_some(broken)}")
    metadata: dict[str, str] = {}
    if model.base_fingerprint is not None:
        metadata[_FINGERPRINT] = model.base_fingerprint
    return config, arrays, metadata


def load_adapter(model: Decoder, path: str | os.PathLike) -> Decoder:
    """Adds the adapter of a PEFT folder to a model without one.

    Args:
      model: the base that the adapter was trained on; of one that scores texts, the causal model too.
      path: a folder with adapter_model.safetensors and adapter_config.json, written here or by PEFT.
    Returns:
      a new model that shares every base array with `model`; adapters are float32 whatever the file holds.
    Raises:
      ValueError: no such files, or pickled ones; a PEFT feature that is not supported; tensors missing, unexpected,
        misshaped or not finite; another base's fingerprint.
    """
    folder = Path(path).expanduser()
    config, where = read_adapter_config(folder), folder / CONFIG_NAME
    if config.get("task_type") == _SCORES and model.config.num_labels is None:
        model = reward_model(model)
    arrays, metadata = _read_tensors(folder)
    theirs, ours = metadata.get(_FINGERPRINT), model.base_fingerprint
    if theirs is not None and ours is not None and theirs != ours:
        raise ValueError(
            f"{folder}: this adapter was trained on another base (fingerprint {theirs}, this model's is {ours}); "
            "load the base that it names in base_model_name_or_path"
        )
    names = [name for name, _ in linears(model)]
    chosen = _targets(where, config, names)
    parameters = config.get("target_parameters") or []
    expert_names = [name for name, _ in experts(model) if any(name_matches(name, target) for target in parameters)]
    if parameters and not expert_names:
        raise ValueError(f"{folder}: target_parameters = {parameters!r} match no experts of this model")
    if not chosen + expert_names:
        raise ValueError(
            f"{folder}: target_modules {config.get('target_modules')!r} match no linear of this model; "
            f"it has {names[0]} and the like"
        )

    def patterns(key):  # PEFT lets a pattern match nothing
        every = chosen + expert_names
        wanted = config.get(key) or {}
        return {p: value for p, value in wanted.items() if pattern_values(f"{where}: {key}", {p: value}, every)}

    settings = dict(
        r=config["r"],
        lora_alpha=config.get("lora_alpha", 8),
        target_modules=chosen,
        target_parameters=expert_names,
        lora_dropout=config.get("lora_dropout", 0.0),
        use_rslora=config.get("use_rslora", False),
        use_dora=config.get("use_dora", False),
        modules_to_save=_modules_to_save(config),
        rank_pattern=patterns("rank_pattern"),
        alpha_pattern=patterns("alpha_pattern"),
    )
    # Shapes first: nothing is made of a rank that the file does not hold.
    adapted = nnx.eval_shape(lambda: get_peft_model(model, **settings))
    variables = adapter_tensors(adapted)
    _check_tied(folder, model, arrays)
    arrays = _current_experts(folder, config, variables, arrays)
    _check_tensors(folder, {key: variable.shape for key, variable in variables.items()}, arrays)
    base = dict(nnx.to_flat_state(nnx.state(freeze(model))))
    for place, variable in nnx.to_flat_state(nnx.state(adapted)):
        if isinstance(variable, Frozen):
            place = (*place[:-1], "weight") if place[-1] == "original" else place
            variable.set_value(base[place].get_value())
    for key, variable in variables.items():
        variable.set_value(jnp.asarray(arrays[key], jnp.float32))
    return adapted


def _some(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _config_of(model: Decoder) -> dict[str, Any]:
    """adapter_config.json, derived from the modules."""
    settings = adapter_settings(model)
    if settings is None:
        raise ValueError("save_adapter: this model has no adapter; add one with get_peft_model, or use save_pretrained")
    return settings | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if model.config.num_labels is None else _SCORES,
        "peft_version": _PEFT_VERSION,
        "auto_mapping": None,
        "base_model_name_or_path": None if model.source is None else model.source.path,
        "revision": None,
        "inference_mode": True,
        "exclude_modules": None,
        # A tied head stays tied when PEFT loads it.
        "ensure_weight_tying": settings["modules_to_save"] is not None and model.head is None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "lora_bias": False,
        "trainable_token_indices": None,
    }


def _names(key: str, value: Any) -> None:
    """A regular expression, or a list of names."""
    if not isinstance(value, str):
        values.texts(key, value)


def _layers(key: str, value: Any) -> None:
    if isinstance(value, list):
        values.items(key, value, functools.partial(values.whole, least=0))
    else:
        values.whole(key, value, least=0)


def _dropout(key: str, value: Any) -> None:
    values.not_negative(key, value)
    if value >= 1:
        raise ValueError(f"{key} = {value!r}: must be below 1")


def _patterns(of: Callable[[str, Any], None], key: str, value: Any) -> None:
    values.mapping(key, value)
    for pattern, setting in value.items():
        of(f"{key}: {pattern!r}", setting)


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "r": values.whole,
    "lora_alpha": values.positive,
    "lora_dropout": _dropout,
    "target_modules": _names,
    "exclude_modules": _names,
    "target_parameters": values.texts,
    "modules_to_save": values.texts,
    "layers_to_transform": _layers,
    "layers_pattern": _names,
    "rank_pattern": functools.partial(_patterns, values.whole),
    "alpha_pattern": functools.partial(_patterns, values.positive),
    "use_rslora": values.boolean,
    "use_dora": values.boolean,
    "base_model_name_or_path": values.text,
    "bias": values.text,
    "unsloth_fused_expert_lora": values.mapping,
}


def base_of(folder: str | os.PathLike) -> str | None:
    """The base model that an adapter folder names; None if the folder holds no adapter.

    Raises:
      ValueError: the adapter names none, or cannot be read (see read_adapter_config).
    """
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        return None
    base = read_adapter_config(Path(folder)).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path} names no base model: set base_model_name_or_path in it")
    return base


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter, every setting of a type that it can have.

    Raises:
      ValueError: no such file; not LoRA; a setting that cannot be followed, by file, key and value.
    """
    if not folder.is_dir():
        raise ValueError(f"load_adapter: {folder} is not a folder; it must hold {CONFIG_NAME} and {WEIGHTS_NAME}")
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"load_adapter: {folder} has no {CONFIG_NAME}: not a PEFT adapter")
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path}: peft_type is {kind!r}; only LORA adapters are supported")
    for key, check in _CHECKS.items():
        if config.get(key) is not None:
            check(f"{path}: {key}", config[key])
    if config.get("r") is None:
        raise ValueError(f"{path}: r is missing")
    if not config.get("target_modules") and not config.get("target_parameters"):
        raise ValueError(f"{path}: target_modules is missing, and target_parameters too")
    for key, value in config.items():
        if key not in _FOLLOWED and key not in _HARMLESS and value not in (None, False, [], {}, ""):
            raise ValueError(f"{path}: {key} = {value!r} is a PEFT feature that is not supported")
    if (config.get("bias") or "none") != "none":
        raise ValueError(f"{path}: bias = {config['bias']!r} is not supported; only 'none' is")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise ValueError(
            f"{path}: init_lora_weights = {start!r} changes the base's weights, so this adapter does not fit the base; "
            "convert it with PEFT (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    # What is null is as PEFT's own default has it.
    return {key: value for key, value in config.items() if value is not None}


def _read_tensors(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickled = folder / "adapter_model.bin"
        if pickled.exists():
            raise ValueError(f"{pickled} is a pickle, which can run code: refused; save it as {WEIGHTS_NAME} with PEFT")
        raise ValueError(f"load_adapter: {folder} has no {WEIGHTS_NAME}")
    entries = shards.read_header(path)
    for entry in entries.values():
        shards.check_entry(entry)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    return {key: shards.read_tensor(entry) for key, entry in entries.items()}, metadata


def _targets(path: Path, config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The linears that PEFT would adapt: its rules for target_modules, exclude_modules and layers_to_transform."""

    def matched(key):
        setting = config.get(key) or ()
        if setting == "all-linear" and key == "target_modules":
            return set(names)
        if isinstance(setting, str):
            return set(matching(f"{path}: {key}", setting, names))
        return {name for name in names if any(name_matches(name, target) for target in setting)}

    wanted, unwanted = matched("target_modules"), matched("exclude_modules")
    chosen = [name for name in names if name in wanted and name not in unwanted]
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return chosen
    pattern = config.get("layers_pattern") or "layers"
    if pattern not in ("layers", ["layers"]):
        raise ValueError(f"{path}: layers_pattern = {pattern!r} is not supported; layers are called 'layers' here")
    numbers = set(layers) if isinstance(layers, list) else {layers}
    # A whole name in the list is taken whatever its layer is, as in PEFT.
    listed = config.get("target_modules", ())
    listed = () if isinstance(listed, str) else listed
    return [name for name in chosen if name in listed or int(name.split(".")[2]) in numbers]


def _current_experts(folder: Path, config, variables, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors, with those of experts in today's layout.

    PEFT before 0.19 took every expert's weight for [in, out]. Where it is [out, in], its A was [E r, out] and its B
    [in, r E], so that (B A)^T was added: our A is its B^T, our B its A^T. Shapes tell, or, of square weights, the
    version.

    Raises:
      ValueError: a layout that cannot be told, or that Unsloth wrote before it wrote PEFT's.
    """
    layouts = config.get("unsloth_fused_expert_lora", {}).get("parameters") or {}
    values.mapping(f"{folder / CONFIG_NAME}: unsloth_fused_expert_lora.parameters", layouts)
    for name, parameter in layouts.items():
        layout = parameter.get("lora_B_layout") if isinstance(parameter, dict) else parameter
        if layout != "rank_major":
            raise ValueError(
                f"{folder / CONFIG_NAME}: lora_B of {name} is laid out as {layout!r}: save it in PEFT's layout "
                "('rank_major') with a current Unsloth"
            )
    arrays = dict(arrays)
    version = tuple(int(part) for part in re.findall(r"\d+", str(config.get("peft_version") or ""))[:2])
    for key, tensor in variables.items():
        if not isinstance(tensor, ExpertTensor) or tensor.is_b or key not in arrays:
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
                    "changed) cannot be told; add the version of PEFT that wrote it"
                )
            if version >= (0, 19):
                continue
        if tensor.transposed:
            continue
        arrays[key] = b.reshape(in_size, rank, count).transpose(2, 1, 0).reshape(count * rank, in_size)
        arrays[key_b] = a.reshape(count, rank, out_size).transpose(2, 1, 0).reshape(out_size, rank * count)
    return arrays


def _modules_to_save(config: Mapping[str, Any]) -> list[str]:
    names = {name.rsplit(".", 1)[-1] for name in config.get("modules_to_save") or ()}
    # PEFT names every module that a head could be.
    return sorted(names - {"classifier"} if config.get("task_type") == _SCORES else names)


def _check_tied(folder: Path, model: Decoder, arrays: Mapping[str, np.ndarray]) -> None:
    """Refuses an adapter that would part a tied head from its embedding, as PEFT can."""
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
    problems = []
    missing = [key for key in shapes if key not in arrays]
    unexpected = [key for key in arrays if key not in shapes]
    misshaped = [
        f"{key} {arrays[key].shape} instead of {tuple(shapes[key])}"
        for key in shapes
        if key in arrays and arrays[key].shape != tuple(shapes[key])
    ]
    broken = [key for key in arrays if not np.isfinite(arrays[key].astype(np.float32)).all()]
    for what, keys in (
        ("missing", missing), ("unexpected", unexpected), ("misshaped", misshaped), ("not finite", broken),
    ):  # fmt: skip
        if keys:
            problems.append(f"{len(keys)} {what}: {_some(keys)}")
    if problems:
        raise ValueError(f"{folder / WEIGHTS_NAME}: the tensors do not fit this model: " + "; ".join(problems))
