"""LoRA adapters by the arguments of Unsloth's get_peft_model and of PEFT's LoraConfig."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

import jaxtune
from jaxtune.compat.arguments import settle
from jaxtune.compat.tables import PEFT
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import experts, linears, matrices
from jaxtune.train.config import AdapterConfig

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The modules that PEFT adapts if target_modules is None: in Phi-3, and in every other family that jaxtune has.
_PEFTS_CHOICE, _PHI3S = ("q_proj", "v_proj"), ("qkv_proj",)


class LoraConfig:
    """PEFT's LoraConfig; PEFT's own class is accepted too.

    Args:
      target_modules: names of linears or their last parts, "all-linear", or a regular expression over whole names;
        None: q_proj and v_proj (qkv_proj in Phi-3). embed_tokens and lm_head are trained whole.
      target_parameters: matrices of experts, such as ["experts.down_proj"].
      modules_to_save: trained whole: "embed_tokens", "lm_head".
      rank_pattern, alpha_pattern: {regular expression over the end of a module's name: rank or alpha}.
      layers_to_transform: indices from 0, for a list of target_modules; target_parameters are not restricted.
      init_lora_weights: True or "gaussian", for the matrix A; B starts at zero.
      bias: "all" and "lora_only" are refused if they would train one.
      others: ValueError if one would change the result.
    Attributes:
      settings: keyword arguments of `add_lora`.
      lora_alpha: the product B A is multiplied by lora_alpha / r, with use_rslora by lora_alpha / sqrt(r).
      lora_dropout: a probability.
    """

    def __init__(
        self,
        r: int = 8,
        lora_alpha: float = 8,
        target_modules: str | Sequence[str] | None = None,
        lora_dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
        target_parameters: Sequence[str] | None = None,
        layers_to_transform: int | Sequence[int] | None = None,
        init_lora_weights: bool | str = True,
        bias: str = "none",
        **others: Any,
    ):
        if "task_type" in others:  # a member of TaskType or its value
            others["task_type"] = getattr(others["task_type"], "value", others["task_type"])
        settle("LoraConfig", others, PEFT, LoraConfig.__init__)
        self.settings: dict[str, Any] = dict(
            r=r,
            lora_alpha=lora_alpha,
            target_modules=target_modules,
            lora_dropout=lora_dropout,
            use_rslora=use_rslora,
            use_dora=use_dora,
            modules_to_save=modules_to_save,
            rank_pattern=rank_pattern,
            alpha_pattern=alpha_pattern,
            target_parameters=target_parameters,
            layers_to_transform=layers_to_transform,
            init_lora_weights=init_lora_weights,
            bias=bias,
        )


def lora_settings(where: str, config: Any) -> dict[str, Any]:
    """Keyword arguments of `add_lora` for this module's LoraConfig or PEFT's; ValueError for another class.

    where: the called function, for messages.
    """
    if isinstance(config, LoraConfig):
        return config.settings
    if type(config).__name__ != "LoraConfig":
        raise ValueError(f"{where}: peft_config is a {type(config).__name__}; only LoraConfig is supported")
    config_values = {name: value for name, value in vars(config).items() if name not in ("peft_type", "auto_mapping")}
    # PEFT fills unset options with None, False or {}, which have no effect.
    empty = {name for name, value in config_values.items() if value is None or value is False or value == {}}
    set_values = {name: value for name, value in config_values.items() if name not in empty - {"init_lora_weights"}}
    if isinstance(set_values.get("target_modules"), set):
        set_values["target_modules"] = sorted(set_values["target_modules"])
    for name in ("runtime_config", "peft_version"):
        set_values.pop(name, None)
    return LoraConfig(**set_values).settings


def add_lora(
    module: Decoder,
    where: str,
    seed: int,
    *,
    target_modules: str | Sequence[str] | None,
    target_parameters: Sequence[str] | None,
    modules_to_save: Sequence[str] | None,
    rank_pattern: Mapping[str, int] | None,
    alpha_pattern: Mapping[str, float] | None,
    layers_to_transform: int | Sequence[int] | None,
    init_lora_weights: bool | str,
    bias: str,
    experts_too: bool,
    **plain: Any,
) -> tuple[Decoder, AdapterConfig]:
    """Adds LoRA adapters to a module: (a new module that shares the arrays, the AdapterConfig of the run's config).

    ValueError: an argument is not supported or matches nothing, or `module` has adapters already.
      where: the called function, for messages.
      experts_too: target_modules that name all linears also mean the experts' matrices, as in Unsloth.
      plain: r, lora_alpha, lora_dropout, use_rslora, use_dora.
      seed: of the matrices A. The other arguments: as in LoraConfig.
    """
    if init_lora_weights not in (True, "gaussian"):
        raise ValueError(
            f"{where}: init_lora_weights = {init_lora_weights!r} is not supported; supported: True, 'gaussian'"
        )
    names = {name.rsplit(".", 1)[1] for name, _ in linears(module)}
    if target_modules is None:
        target_modules = _PHI3S if names.issuperset(_PHI3S) else _PEFTS_CHOICE
    trained_whole = set(modules_to_save or ())
    if not isinstance(target_modules, str):
        trained_whole |= {name for name in target_modules if name in ("embed_tokens", "lm_head")}
        linear_names = tuple(name for name in target_modules if name not in trained_whole)
        # The seven names mean every linear, also where a family fuses some of them (Phi-3).
        target_modules = "all-linear" if set(linear_names) == set(ALL_LINEAR) else linear_names
    if target_parameters is None and experts_too and target_modules == "all-linear":
        target_parameters = [name for name, _ in experts(module)]
    if layers_to_transform is not None:
        target_modules = _in_layers(where, target_modules, layers_to_transform, module)
    settings: dict[str, Any] = dict(
        plain,
        target_modules=target_modules,
        target_parameters=tuple(target_parameters) if target_parameters else None,
        modules_to_save=tuple(sorted(trained_whole)) or None,
        rank_pattern=dict(rank_pattern) if rank_pattern else None,
        alpha_pattern=dict(alpha_pattern) if alpha_pattern else None,
    )
    adapted_module = jaxtune.get_peft_model(module, **settings, seed=seed)
    _require_no_biases(where, bias, adapted_module)
    if init_lora_weights == "gaussian":
        _start_gaussian(adapted_module, seed)
    return adapted_module, AdapterConfig(**settings)


def _require_no_biases(where: str, bias: str, module: Decoder) -> None:
    """Raises ValueError if PEFT's `bias` would train biases, which adapters cannot hold here."""
    if bias not in ("none", "all", "lora_only"):
        raise ValueError(f"{where}: bias = {bias!r} is not supported; supported: 'none'")
    if bias == "none":
        return
    if bias == "all":
        names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module))]
        names = [name for name in names if name.endswith("bias")]
    else:
        adapted = [(name, linear) for name, linear in linears(module) if linear.lora is not None]
        names = [f"{name}.bias" for name, linear in adapted if linear.bias is not None]
    if names:
        raise ValueError(
            f"{where}: bias = {bias!r} would train {names[0]} and {len(names) - 1} more, which adapters do not hold "
            "here. Instead: bias='none', or full_finetuning=True, which trains biases too"
        )


def _in_layers(where: str, target_modules: str | Sequence[str], layers: int | Sequence[int], module: Decoder) -> str:
    """The regular expression over full names that selects `target_modules` in the layers with the indices `layers`."""
    layer_indices = [layers] if isinstance(layers, int) else sorted(layers)
    if isinstance(target_modules, str) and target_modules != "all-linear":
        raise ValueError(
            f"{where}: layers_to_transform = {layers!r} with target_modules = {target_modules!r}, which is a regular "
            "expression already: name the layers in it, or give target_modules as a list"
        )
    outside = [index for index in layer_indices if not 0 <= index < module.config.num_layers]
    if outside or not layer_indices:
        raise ValueError(
            f"{where}: layers_to_transform = {layers!r}: the model has layers 0 to {module.config.num_layers - 1}"
        )
    names = (
        sorted({name.rsplit(".", 1)[1] for name, _ in linears(module)})
        if target_modules == "all-linear"
        else target_modules
    )
    return rf".*\.layers\.({'|'.join(map(str, layer_indices))})\.(?:.*\.)?({'|'.join(map(re.escape, names))})"


def _start_gaussian(module: Decoder, seed: int) -> None:
    """Draws each adapter's matrix A, in place, from a normal distribution of standard deviation 1 / rank."""
    pairs = [(name, matrix.lora) for name, matrix in matrices(module) if matrix.lora is not None]
    keys = jax.random.split(jax.random.key(seed), len(pairs))
    for (_, lora), key in zip(pairs, keys, strict=True):
        a = lora.a
        normal_draws = jax.random.normal(key, a.get_value().shape) / lora.rank
        a.set_value(normal_draws.astype(a.get_value().dtype))


def last_layers(where: str, count: int | None, layers: int | Sequence[int] | None, module: Decoder) -> Any:
    """The layers_to_transform that Unsloth's finetune_last_n_layers (`count`) means; ValueError if both are set. where:
    the called function, for messages.
    """
    if count is None:
        return layers
    if layers is not None:
        raise ValueError(f"{where}: finetune_last_n_layers and layers_to_transform are both set: keep one")
    total = module.config.num_layers
    if not isinstance(count, int) or not 1 <= count <= total:
        raise ValueError(f"{where}: finetune_last_n_layers = {count!r}: must be from 1 to {total}")
    return list(range(total - count, total))
