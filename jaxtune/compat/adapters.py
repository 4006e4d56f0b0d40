"""Adapters by the arguments of Unsloth's get_peft_model and of PEFT's LoraConfig, which are translated to jaxtune's:
`LoraConfig` for scripts; `lora_settings`, which reads one, PEFT's too; `adapted`, by which trainers and get_peft_model
add the adapter; and `last_layers`, for Unsloth's finetune_last_n_layers. ALL_LINEAR has Unsloth's names of all
linears."""

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
    """PEFT's LoraConfig with its arguments and defaults: the description of an adapter, which trainers and PEFT's
    get_peft_model take as peft_config. PEFT itself is not needed, and its own class is accepted too.

    Args:
      r: the adapters' rank.
      lora_alpha, use_rslora: the adapters' output is multiplied by lora_alpha / r, or lora_alpha / sqrt(r) if
        use_rslora is True.
      target_modules: which linears get adapters: a list of names or last parts of names, "all-linear" (every linear in
        the layers), or a regular expression over whole names. None: q_proj and v_proj, or qkv_proj in Phi-3. If
        embed_tokens or lm_head is in the list, it is trained whole.
      target_parameters: which matrices of experts get adapters, a list of names or last parts, such as
        ["experts.down_proj"]; None: none.
      lora_dropout: the dropout rate of the adapters' input.
      use_dora: True: the norms of the weights' rows are trained as well (DoRA).
      modules_to_save: modules that are trained whole: "embed_tokens" and "lm_head".
      rank_pattern, alpha_pattern: {regular expression over the end of a module's name: its rank, or its alpha}.
      layers_to_transform: the index (from 0) of the layer whose linears get adapters, or several; None: all layers.
        If it is set, target_modules must not be a regular expression; target_parameters are not restricted by it.
      init_lora_weights: True or "gaussian": how A, the first matrix of an adapter, is drawn. B starts at zero.
      bias: "none"; PEFT's "all" and "lora_only" are refused if they would train a bias.
      others: PEFT's other arguments, such as task_type. A printed line reports each one that has no effect here,
        unless its value is accepted silently, such as its default.
    Attributes:
      settings: the named arguments, as keyword arguments of `adapted`.
    Raises:
      ValueError: one of `others` would change the result, or is unknown. The other arguments are checked when the
        adapter is added to a model.
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
    """Returns the settings of a LoraConfig, this module's or PEFT's, as keyword arguments of `adapted`: {name: value}
    of the named arguments of LoraConfig. Trainers and PEFT's get_peft_model read their peft_config by it. Options that
    PEFT's object leaves unset (None, False or {}) get the defaults of LoraConfig, except init_lora_weights=False, which
    `adapted` refuses. where: the trainer or function that got `config` as peft_config, for the message.

    Raises:
      ValueError: `config` is an object of another class, or PEFT's with a setting that is not supported.
    """
    if isinstance(config, LoraConfig):
        return config.settings
    if type(config).__name__ != "LoraConfig":
        raise ValueError(f"{where}: peft_config is a {type(config).__name__}; only LoraConfig is supported")
    given = {name: value for name, value in vars(config).items() if name not in ("peft_type", "auto_mapping")}
    # PEFT fills unset options with None, False or {}, which have no effect.
    empty = {name for name, value in given.items() if value is None or value is False or value == {}}
    kept = {name: value for name, value in given.items() if name not in empty - {"init_lora_weights"}}
    if isinstance(kept.get("target_modules"), set):
        kept["target_modules"] = sorted(kept["target_modules"])
    for name in ("runtime_config", "peft_version"):
        kept.pop(name, None)
    return LoraConfig(**kept).settings


def adapted(
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
    """Adds LoRA adapters to a module, by the arguments of Unsloth or PEFT. Both functions get_peft_model (Unsloth's and
    PEFT's) call it, and the trainers for their peft_config.

    Args:
      module: the model without adapters; it is not changed, and shares its arrays with the result.
      where: the called function, for messages.
      seed: of the adapters' initial values.
      target_modules, target_parameters, modules_to_save, rank_pattern, alpha_pattern, layers_to_transform,
      init_lora_weights, bias: the arguments of LoraConfig with these names. embed_tokens and lm_head in target_modules
        are trained whole, and a list of the seven names in ALL_LINEAR means every linear.
      experts_too: whether target_modules that name all linears ("all-linear" or the seven names) also mean the experts'
        matrices, in every layer whatever layers_to_transform is, if target_parameters is None. True for Unsloth's
        arguments, False for PEFT's.
      plain: r, lora_alpha, lora_dropout, use_rslora and use_dora, which jaxtune.get_peft_model explains.
    Returns:
      (a new module with adapters, the AdapterConfig that describes them: the section `adapter` of a run's config)
    Raises:
      ValueError: an argument that is not supported or matches nothing; or `module` has adapters already.
    """
    if init_lora_weights not in (True, "gaussian"):
        raise ValueError(
            f"{where}: init_lora_weights = {init_lora_weights!r} is not supported; supported: True, 'gaussian'"
        )
    names = {name.rsplit(".", 1)[1] for name, _ in linears(module)}
    if target_modules is None:
        target_modules = _PHI3S if names.issuperset(_PHI3S) else _PEFTS_CHOICE
    whole = set(modules_to_save or ())
    if not isinstance(target_modules, str):
        whole |= {name for name in target_modules if name in ("embed_tokens", "lm_head")}
        rest = tuple(name for name in target_modules if name not in whole)
        # The seven names mean every linear, also where a family fuses some of them (Phi-3).
        target_modules = "all-linear" if set(rest) == set(ALL_LINEAR) else rest
    if target_parameters is None and experts_too and target_modules == "all-linear":
        target_parameters = [name for name, _ in experts(module)]
    if layers_to_transform is not None:
        target_modules = _in_layers(where, target_modules, layers_to_transform, module)
    settings: dict[str, Any] = dict(
        plain,
        target_modules=target_modules,
        target_parameters=tuple(target_parameters) if target_parameters else None,
        modules_to_save=tuple(sorted(whole)) or None,
        rank_pattern=dict(rank_pattern) if rank_pattern else None,
        alpha_pattern=dict(alpha_pattern) if alpha_pattern else None,
    )
    made = jaxtune.get_peft_model(module, **settings, seed=seed)
    _require_no_biases(where, bias, made)
    if init_lora_weights == "gaussian":
        _start_gaussian(made, seed)
    return made, AdapterConfig(**settings)


def _require_no_biases(where: str, bias: str, module: Decoder) -> None:
    """Raises ValueError if `bias`, PEFT's argument ("none", "all" or "lora_only"), would train biases of `module`,
    which adapters cannot contain here, or has another value. In a model without biases each of the three values is
    accepted. `adapted` calls it after it has added adapters to the module, because "lora_only" means the biases of
    linears that have an adapter. where: the called function, for the message."""
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
    """Returns the regular expression on full names of modules that selects `target_modules` in some layers only.
    `adapted` follows layers_to_transform by it: jaxtune has no such option, but takes the expression as target_modules.

    Args:
      where: the called function, for messages.
      target_modules: a list of last parts of names, or "all-linear". Any other string is a regular expression, which is
        refused.
      layers: the index of one layer, from 0, or several.
      module: the model.
    Raises:
      ValueError: `layers` is empty or names a layer that the model lacks, or target_modules is a regular expression.
    """
    wanted = [layers] if isinstance(layers, int) else sorted(layers)
    if isinstance(target_modules, str) and target_modules != "all-linear":
        raise ValueError(
            f"{where}: layers_to_transform = {layers!r} with target_modules = {target_modules!r}, which is a regular "
            "expression already: name the layers in it, or give target_modules as a list"
        )
    outside = [index for index in wanted if not 0 <= index < module.config.num_layers]
    if outside or not wanted:
        raise ValueError(
            f"{where}: layers_to_transform = {layers!r}: the model has layers 0 to {module.config.num_layers - 1}"
        )
    names = (
        sorted({name.rsplit(".", 1)[1] for name, _ in linears(module)})
        if target_modules == "all-linear"
        else target_modules
    )
    return rf".*\.layers\.({'|'.join(map(str, wanted))})\.(?:.*\.)?({'|'.join(map(re.escape, names))})"


def _start_gaussian(module: Decoder, seed: int) -> None:
    """Replaces the matrix A of each adapter of `module`, in place, by draws from a normal distribution with mean 0 and
    standard deviation 1 / rank, which is what PEFT's init_lora_weights="gaussian" means. The matrix B stays zero. seed:
    determines the draws. `adapted` calls it after it has added the adapters."""
    pairs = [(name, matrix.lora) for name, matrix in matrices(module) if matrix.lora is not None]
    keys = jax.random.split(jax.random.key(seed), len(pairs))
    for (_, lora), key in zip(pairs, keys, strict=True):
        a: nnx.Param = lora.a
        drawn = jax.random.normal(key, a.get_value().shape) / lora.rank
        a.set_value(drawn.astype(a.get_value().dtype))


def last_layers(where: str, count: int | None, layers: int | Sequence[int] | None, module: Decoder) -> Any:
    """Returns the value of layers_to_transform, the layers that get adapters, for Unsloth's finetune_last_n_layers.
    Unsloth's get_peft_model calls it, because `adapted` has no such argument.

    Args:
      where: the called function, for messages.
      count: finetune_last_n_layers: the indices of that number of last layers are returned; None: `layers` is returned.
      layers: the given layers_to_transform.
      module: the model.
    Raises:
      ValueError: both are given, or `count` is not from 1 to the number of layers.
    """
    if count is None:
        return layers
    if layers is not None:
        raise ValueError(f"{where}: finetune_last_n_layers and layers_to_transform are both set: keep one")
    total = module.config.num_layers
    if not isinstance(count, int) or not 1 <= count <= total:
        raise ValueError(f"{where}: finetune_last_n_layers = {count!r}: must be from 1 to {total}")
    return list(range(total - count, total))
