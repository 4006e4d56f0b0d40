"""Adapters: which linears get one, and what stays trainable.

Functions return a new module that shares the frozen arrays; the argument is never changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.experts import ExpertLinear, ExpertLora
from jaxtune.models.linear import Frozen, Linear, Lora, row_norm
from jaxtune.pallas.quant_matmul import dense

_SAVABLE = ("embed_tokens", "lm_head")


def linears(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """(Hugging Face module name, linear) of all linears in the layers, in order: model.layers.0.self_attn.q_proj ..."""
    yield from ((name, matrix) for name, matrix in _in_layers(model) if not matrix.num_experts)


def experts(model: Decoder) -> Iterator[tuple[str, ExpertLinear]]:
    """(Hugging Face parameter name, matrices) of all experts: model.layers.0.mlp.experts.gate_up_proj ..."""
    yield from ((name, matrix) for name, matrix in _in_layers(model) if matrix.num_experts)


def _in_layers(model: Decoder) -> Iterator[tuple[str, Any]]:
    for index, layer in enumerate(model.layers):
        theirs = {part: module.their_name for part, module in layer.parts.items()}
        for part, name, matrix in layer.matrices():
            yield f"model.layers.{index}.{theirs[part]}.{name}", matrix


def matrices(model: Decoder) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """What can have an adapter and be quantised: all linears in the layers, then all experts."""
    yield from linears(model)
    yield from experts(model)


def has_adapter(model: Decoder) -> bool:
    return any(matrix.lora is not None for _, matrix in matrices(model))


def copy_structure(model):
    """A new module over the same arrays: structure, types and values can be changed without touching `model`."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda array: array, state))  # new variables: split hands out the model's own


def name_matches(name: str, target: str) -> bool:
    """PEFT's rule for lists: the whole name, or its last parts."""
    return name == target or name.endswith("." + target)


def pattern_value(patterns: Mapping[str, float], name: str, default):
    """PEFT's rule for rank_pattern and alpha_pattern: a key is a regular expression over the end of the name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _require_expression(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key}: {pattern!r} is not a regular expression: {error}") from None


def select_targets(names: Sequence[str], target_modules: str | Sequence[str], experts: Sequence[str] = ()) -> list[str]:
    """Module names that get an adapter.

    Args:
      target_modules: "all-linear"; a regular expression over the whole name; or a list of names or last parts.
      experts: names of experts' matrices, which are named elsewhere: an error says so.
    Raises:
      ValueError: something that matches no linear, with the names there are.
    """
    known = sorted({name.rsplit(".", 1)[1] for name in names})
    if target_modules == "all-linear":
        return list(names)
    if not target_modules:
        raise ValueError(f"target_modules is empty: name at least one of {', '.join(known)}, or 'all-linear'")
    if isinstance(target_modules, str):
        _require_expression("target_modules", target_modules)
        chosen = [name for name in names if re.fullmatch(target_modules, name)]
        if not chosen:
            raise ValueError(
                f"target_modules {target_modules!r} matches no linear; it is a regular expression over names such as "
                f"{names[0]!r}; last parts: {', '.join(known)}"
            )
        return chosen
    for target in target_modules:
        if not any(name_matches(name, target) for name in names):
            hint = " (put it in modules_to_save to train it whole)" if target in _SAVABLE else ""
            if experts:
                hint = " (experts are named in target_parameters: mlp.experts.gate_up_proj, mlp.experts.down_proj)"
            raise ValueError(
                f"target_modules: {target!r} matches no linear of this model; there are: {', '.join(known)}{hint}"
            )
    return [name for name in names if any(name_matches(name, target) for target in target_modules)]


def select_parameters(names: Sequence[str], target_parameters: Sequence[str]) -> list[str]:
    """Names of experts' matrices that get an adapter: those that a target is, or is the end of, as in PEFT.

    Raises:
      ValueError: a target that matches nothing.
    """
    if isinstance(target_parameters, str):
        raise ValueError(f"target_parameters = {target_parameters!r}: must be a list, such as [mlp.experts.down_proj]")
    for target in target_parameters:
        if not any(name_matches(name, target) for name in names):
            known = sorted({name.split(".", 3)[3] for name in names})
            raise ValueError(
                f"target_parameters: {target!r} matches no experts' matrix of this model; "
                f"there are: {', '.join(known) or 'none, for it has no experts'}"
            )
    return [name for name in names if any(name_matches(name, target) for target in target_parameters)]


def freeze(model: Decoder) -> Decoder:
    """A model whose tensors are all `Frozen`."""
    model = copy_structure(model)
    for _, module in nnx.iter_modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param):
                setattr(module, name, Frozen(value.get_value()))
    return model


def get_peft_model(
    model: Decoder,
    r: int = 16,
    lora_alpha: float = 16,
    target_modules: str | Sequence[str] = "all-linear",
    target_parameters: Sequence[str] | None = None,
    lora_dropout: float = 0.0,
    use_rslora: bool = False,
    use_dora: bool = False,
    modules_to_save: Sequence[str] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Decoder:
    """Adds LoRA adapters and freezes the rest. Arguments mean what they mean in PEFT's LoraConfig.

    Args:
      r: rank. lora_alpha: the adapter is scaled by alpha / r, or alpha / sqrt(r) with use_rslora.
      target_modules: see select_targets; "all-linear" is every linear in the layers; may be empty beside
        target_parameters.
      target_parameters: experts' matrices, e.g. ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]: rank r for each
        expert. Without dropout or DoRA, as in PEFT.
      lora_dropout: on the adapters' input, one mask for the linears that share it.
      use_dora: weight-decomposed adapters (arXiv 2402.09353).
      modules_to_save: of "embed_tokens", "lm_head": trained whole, in float32 masters; tied heads stay tied.
      rank_pattern, alpha_pattern: {regular expression over the end of a module name: value}.
      seed: of the random start of A; B starts at zero.
    Returns:
      a new model; it shares every base array with `model`.
    Raises:
      ValueError: a target, pattern or module that matches nothing; a rank or rate out of range; adapters there already.
    """
    if not isinstance(r, int) or r < 1:
        raise ValueError(f"r = {r}: the rank must be a positive integer")
    if not 0.0 <= lora_dropout < 1.0:
        raise ValueError(f"lora_dropout = {lora_dropout}: must be at least 0 and below 1")
    if has_adapter(model):
        raise ValueError("this model has adapters already; merge them first (merge_adapter) or start from the base")
    model = freeze(model)
    modules = dict(matrices(model))
    expert_names = [name for name, _ in experts(model)]
    chosen_parameters = select_parameters(expert_names, target_parameters or ())
    if chosen_parameters and (lora_dropout or use_dora):
        setting = f"lora_dropout = {lora_dropout}" if lora_dropout else "use_dora = True"
        raise ValueError(f"{setting}: experts (target_parameters) cannot have it; PEFT refuses it too")
    chosen = (
        []
        if chosen_parameters and not target_modules
        else select_targets([name for name, _ in linears(model)], target_modules, expert_names)
    )
    chosen += chosen_parameters
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    for key, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        for pattern, value in patterns.items():
            _require_expression(key, pattern)
            if value <= 0:
                raise ValueError(f"{key}: {pattern!r}: {value} must be greater than 0")
            if not any(pattern_value({pattern: 1}, name, 0) for name in chosen):
                raise ValueError(f"{key}: {pattern!r} matches no adapted linear")
    keys = jax.random.split(jax.random.key(seed), len(chosen))
    for name, key in zip(chosen, keys, strict=True):
        linear = modules[name]
        rank = pattern_value(ranks, name, r)
        alpha = pattern_value(alphas, name, lora_alpha)
        if isinstance(linear, ExpertLinear):
            count, out_size, in_size = linear.sizes
            linear.lora = ExpertLora(count, in_size, out_size, rank, alpha, key, rslora=use_rslora)
            continue
        out_size, in_size = linear.sizes
        lora = Lora(in_size, out_size, rank, alpha, lora_dropout, key, rslora=use_rslora, dora=use_dora)
        if lora.magnitude is not None:
            lora.magnitude.set_value(row_norm(dense(linear.stored_weight), lora.a[...], lora.b[...], lora.scale))
        linear.lora = lora
    for name in modules_to_save or ():
        if name not in _SAVABLE:
            raise ValueError(f"modules_to_save: {name!r} cannot be trained whole; there are: {', '.join(_SAVABLE)}")
        holder = model.embedding if name == "embed_tokens" or model.head is None else model.head
        if isinstance(holder.weight, Frozen):
            holder.weight = nnx.Param(holder.weight.get_value().astype(jnp.float32))
    return model
