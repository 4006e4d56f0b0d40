"""adapter_config.json of PEFT's LoRA adapters: written for a model's adapter, read and checked for one that is loaded.
An unsupported setting is refused with file, key and value. Modules have PEFT's names, with a longer prefix if
transformers builds the base with a vision tower.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtune.models import values
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.model_folder import read_json
from jaxtune.models.lora import adapter_settings
from jaxtune.models.registry import tower_modules, whole_tensor_name

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_PEFT_VERSION = "0.21.2"  # the version whose format is written

# Settings of PEFT's LoraConfig that load_adapter implements, and those that have no effect on a trained adapter. Any
# other setting is not supported and must be unset.
_FOLLOWED = {
    "alpha_pattern",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_dora",
    "use_rslora",
    "ensure_weight_tying",
    "init_lora_weights",
    "bias",
    "target_parameters",
    "unsloth_fused_expert_lora",
    "lora_B_layout",
    "auto_mapping",  # of which only Unsloth's mark is read
}
_HARMLESS = {
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    # How A and B were initialised; the file contains their trained values.
    "eva_config",
    "modules_to_tie",
    "target_modules_to_tie",
}
# In these families PEFT takes gate_proj, up_proj and down_proj in target_modules for linears of experts, which the
# families' first implementation had. It then adapts the experts, and silently leaves out linears of these names in
# shared experts and MLPs. If they are named in target_parameters, it adapts them.
_TAKEN_FOR_EXPERTS = {"qwen3_moe", "qwen3_next"}
_EXPERTS_NAMES = ("gate_proj", "up_proj", "down_proj")
# Initialisations that also change the base's weights, so that the adapter does not fit the original base.
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


def peft_name(model: Decoder, name: str) -> str:
    """The name of a module or tensor in the class that transformers builds for the base's folder, which PEFT matches:
    model.language_model.layers.0... for model.layers.0... if that class has a vision tower (is_nested).
    """
    return whole_tensor_name(name) if is_nested(model) else name


def is_nested(model: Decoder) -> bool:
    """Whether transformers builds a model with a vision tower for the model's folder; not if it builds the text model
    alone (Qwen3.5).
    """
    return model.source is not None and model.source.nested


def config_of(model: Decoder) -> dict[str, Any]:
    """The content of adapter_config.json for a model's adapter, as PEFT needs it to compute what jaxtune does. Raises
    ValueError without an adapter, or for a setting that differs between adapters where PEFT has one value.
    """
    settings = adapter_settings(model)
    if settings is None:
        raise ValueError("save_adapter: this model has no adapter; add one with get_peft_model, or use save_pretrained")
    if model.config.family in _TAKEN_FOR_EXPERTS:
        settings |= _as_parameters(settings)
    settings["target_modules"] = [peft_name(model, name) for name in settings["target_modules"]]
    for key in ("rank_pattern", "alpha_pattern"):
        settings[key] = {peft_name(model, name): value for name, value in settings[key].items()}
    tower = () if model.vision is None else model.vision.linears()
    adapted = tuple(name for name, linear in tower if linear.lora is not None)
    modules = tower_modules(model.config.family) if is_nested(model) else ()
    excluded = [module for module in modules if not any(name.startswith(f"model.{module}.") for name in adapted)]
    towers = "|".join(excluded)
    return settings | {
        "peft_type": "LORA",
        "task_type": model.config.head.task_type,
        "peft_version": _PEFT_VERSION,
        "auto_mapping": None,
        "base_model_name_or_path": None if model.source is None else model.source.path,
        "revision": None,
        "inference_mode": True,
        # Linears of a tower can have the same names as linears of layers.
        "exclude_modules": rf".*\.({towers})\..*" if excluded else None,
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


def _as_parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """New target_modules, target_parameters, rank_pattern and alpha_pattern: linears named like experts become
    parameters.
    """

    def as_experts(name: str) -> bool:
        return name.rsplit(".", 1)[-1] in _EXPERTS_NAMES

    def patterns(key):  # keeps the old names too, because a last part may also be that of expert matrices
        setting = settings[key]
        return setting | {f"{name}.weight": value for name, value in setting.items() if as_experts(name)}

    targets = settings["target_modules"]
    parameters = [f"{name}.weight" for name in targets if as_experts(name)]
    return {
        "target_modules": [name for name in targets if not as_experts(name)],
        "target_parameters": sorted([*(settings["target_parameters"] or ()), *parameters]) or None,
        "rank_pattern": patterns("rank_pattern"),
        "alpha_pattern": patterns("alpha_pattern"),
    }


def _check_names(key: str, value: Any) -> None:
    """A string (a regular expression, or one name) or a list of names; else ValueError."""
    if not isinstance(value, str):
        values.texts(key, value)


def _check_layers(key: str, value: Any) -> None:
    """An integer from 0, or a list of them, of any size; else ValueError."""
    if isinstance(value, list):
        values.items(key, value, functools.partial(values.whole, least=0))
    else:
        values.whole(key, value, least=0)


def _check_dropout(key: str, value: Any) -> None:
    values.not_negative(key, value)
    if value >= 1:
        raise ValueError(f"{key} = {value!r}: must be below 1")


def _check_alpha(key: str, value: float) -> None:
    """A number above 0 that float32 has, as the product with it would be infinite otherwise; else ValueError."""
    values.positive(key, value)
    if value > _MOST_ALPHA:
        raise ValueError(f"{key} = {value!r}: must be below {_MOST_ALPHA:g}, or scales are infinite in float32")


def _check_patterns(check: Callable[[str, Any], None], key: str, value: Any) -> None:
    """A mapping whose values pass `check`."""
    values.mapping(key, value)
    for pattern, setting in value.items():
        check(f"{key}: {pattern!r}", setting)


_MOST_ALPHA = 3e38
_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "r": values.whole,
    "lora_alpha": _check_alpha,
    "lora_dropout": _check_dropout,
    "target_modules": _check_names,
    "exclude_modules": _check_names,
    "target_parameters": values.texts,
    "modules_to_save": values.texts,
    "layers_to_transform": _check_layers,
    "layers_pattern": _check_names,
    "rank_pattern": functools.partial(_check_patterns, values.whole),
    "alpha_pattern": functools.partial(_check_patterns, _check_alpha),
    "use_rslora": values.boolean,
    "use_dora": values.boolean,
    "base_model_name_or_path": values.text,
    "bias": values.text,
    "unsloth_fused_expert_lora": values.mapping,
    "lora_B_layout": values.text,
    "auto_mapping": values.mapping,
}


def base_of(folder: str | os.PathLike) -> str | None:
    """The folder or hub name of an adapter's base; None if `folder` has no adapter_config.json.

    Raises ValueError for a file without a base, for a revision other than main (only main is fetched) unless the base
    is a local folder, and as read_adapter_config.
    """
    path = Path(folder).expanduser() / CONFIG_NAME
    if not path.is_file():
        return None
    config = read_adapter_config(path.parent)
    base, revision = (config.get(key) for key in ("base_model_name_or_path", "revision"))
    if not base:
        raise ValueError(f"{path} names no base model: set base_model_name_or_path in it")
    if revision not in (None, "", "main") and not Path(base).expanduser().is_dir():
        raise ValueError(
            f"{path}: revision = {revision!r}: of {base} only the main revision is fetched, which the adapter may not "
            f"fit: fetch that one (hf download {base} --revision {revision} --local-dir FOLDER), and set "
            "base_model_name_or_path to FOLDER"
        )
    return base


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The checked content of a LoRA adapter's adapter_config.json, without null entries. Raises ValueError, with file,
    key and value, for a missing or unsupported file or setting, or an initialisation that changed the base ("pissa").
    """
    if not folder.is_dir():
        raise ValueError(f"load_adapter: {folder} is not a folder; it must contain {CONFIG_NAME} and {WEIGHTS_NAME}")
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
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"{path}: init_lora_weights = {start!r} changes the base's weights, so this adapter does not fit the base; "
            "convert it with PEFT (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    # A null entry stands for PEFT's default.
    return {key: value for key, value in config.items() if value is not None}
