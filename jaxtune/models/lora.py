"""Adds LoRA adapters to a model, removes and describes them, and lists the matrices that can have one. Functions that
return a model return a new module that shares arrays with their argument, which does not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jaxtune.models import heads, initial, values
from jaxtune.models.decoder import Decoder
from jaxtune.models.expressions import matching
from jaxtune.models.layers.expert_linear import ExpertLinear, ExpertLora
from jaxtune.models.linear import Frozen, Linear, Lora, NeverTrained, first_rows, frozen, row_norm, trained
from jaxtune.models.placement.streams import on_device
from jaxtune.pallas.formats import Stored, dense


def savable(model: Decoder) -> tuple[str, str]:
    """The names that modules_to_save may contain: ("embed_tokens", the head's name, such as "lm_head")."""
    return "embed_tokens", model.config.head.name


def linears(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """Yields (Hugging Face module name, Linear) of all linears in the layers, such as model.layers.0.self_attn.q_proj,
    of routers only Gemma 4's, then the projection of per-layer embeddings, and at last a tower's.
    """
    yield from ((name, matrix) for name, matrix in _in_layers(model) if not matrix.num_experts)
    if model.per_layer is not None:
        yield "model.per_layer_model_projection", model.per_layer.projection
    if model.vision is not None:
        yield from model.vision.linears()


def experts(model: Decoder) -> Iterator[tuple[str, ExpertLinear]]:
    """Yields (Hugging Face parameter name, ExpertLinear), such as model.layers.0.mlp.experts.gate_up_proj; each is one
    matrix of all experts of a layer.
    """
    yield from ((name, matrix) for name, matrix in _in_layers(model) if matrix.num_experts)


def _in_layers(model: Decoder) -> Iterator[tuple[str, Any]]:
    renamed = dict(model.config.module_names)
    for index, (layer, spec) in enumerate(zip(model.layers, model.config.layers, strict=True)):
        names = spec.hf_names | renamed
        for part, name, matrix in layer.matrices():
            known = {} if matrix.num_experts else renamed
            modules = (known.get(module, module) for module in name.split("."))
            yield ".".join(filter(None, ("model.layers", str(index), names[part], *modules))), matrix


def matrices(model: Decoder) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """Yields (Hugging Face name, matrix) of all linears, then all experts: what can have an adapter or, if
    `quantizable`, be quantised.
    """
    yield from linears(model)
    yield from experts(model)


def stop_rounding(matrix: Linear | ExpertLinear) -> None:
    """Undoes a matrix's preparation for QAT in place: neither weights nor inputs are rounded. Weights do not change."""
    matrix.fake_quant = None
    if isinstance(matrix, Linear) and matrix.input_scale is not None:
        del matrix.input_scale


def has_adapter(model: Decoder) -> bool:
    """Whether any linear or expert matrix has a LoRA adapter; matrices that are trained whole do not count."""
    return any(matrix.lora is not None for _, matrix in matrices(model))


def copy_structure(model):
    """A copy of an nnx.Module with new modules and variables over the same arrays; it takes no memory."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda array: array, state))  # new variables: split returns the model's own


def name_matches(name: str, target: str) -> bool:
    """Whether `target` is the dotted name or its end after a dot ("q_proj" or "self_attn.q_proj"), PEFT's rule."""
    return name == target or name.endswith("." + target)


def pattern_values(key: str, patterns: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """{name: value} by PEFT's rule for rank_pattern and alpha_pattern: patterns are regular expressions over a whole
    name or its end after a dot, and the first match decides. Names without a match are absent.

      key: the config's key, for errors.
      patterns: {regular expression: value}, in the order of precedence.
      names: whole names of modules.

    Raises ValueError for an expression that is invalid or backtracks for too long.
    """
    value_by_name: dict[str, float] = {}
    for pattern, value in patterns.items():
        ends = [end for name in names if name not in value_by_name for end in _ends(name)]
        matched = set(matching(key, pattern, ends))
        value_by_name |= {
            name: value for name in names if name not in value_by_name and not matched.isdisjoint(_ends(name))
        }
    return value_by_name


def _ends(name: str) -> list[str]:
    """ "a.b.c" -> ["a.b.c", "b.c", "c"]."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def select_targets(names: Sequence[str], target_modules: str | Sequence[str], experts: Sequence[str] = ()) -> list[str]:
    """The names of linears that target_modules selects, in the order of `names`.

      names: whole names of all linears of the model, with dots.
      target_modules: "all-linear"; a regular expression over whole names; or a list of names or their ends after a dot.
      experts: names of expert matrices, for the error.

    Raises ValueError for what is empty, invalid or matches nothing.
    """
    last_parts = sorted({name.rsplit(".", 1)[1] for name in names})
    if target_modules == "all-linear":
        return list(names)
    if not target_modules:
        raise ValueError(f"target_modules is empty: name at least one of {', '.join(last_parts)}, or 'all-linear'")
    if isinstance(target_modules, str):
        selected = matching("target_modules", target_modules, names)
        if not selected:
            raise ValueError(
                f"target_modules {target_modules!r} matches no linear; it is a regular expression over names such as "
                f"{names[0]!r}; last parts: {', '.join(last_parts)}"
            )
        return selected
    for target in target_modules:
        if not any(name_matches(name, target) for name in names):
            savable_names = ("embed_tokens", *(head.name for head in heads.HEADS))
            hint = " (put it in modules_to_save to train it whole)" if target in savable_names else ""
            if experts:
                named = dict.fromkeys(name.split(".", 3)[3] for name in experts)
                hint = f" (experts are named in target_parameters: {', '.join(named)})"
            raise ValueError(
                f"target_modules: {target!r} matches no linear of this model; there are: {', '.join(last_parts)}{hint}"
            )
    return [name for name in names if any(name_matches(name, target) for target in target_modules)]


def select_parameters(names: Sequence[str], target_parameters: Sequence[str]) -> list[str]:
    """The names of expert matrices that target_parameters, a list of names or their ends after a dot, selects, in the
    order of `names`. Raises ValueError for a target that matches nothing, or a string in place of a list.
    """
    if isinstance(target_parameters, str):
        raise ValueError(f"target_parameters = {target_parameters!r}: must be a list, such as [mlp.experts.down_proj]")
    for target in target_parameters:
        if not any(name_matches(name, target) for name in names):
            endings = sorted({name.split(".", 3)[3] for name in names})
            raise ValueError(
                f"target_parameters: {target!r} matches no experts' matrix of this model; "
                f"there are: {', '.join(endings) or 'none, for it has no experts'}"
            )
    return [name for name in names if any(name_matches(name, target) for target in target_parameters)]


def freeze[M: nnx.Module](model: M) -> M:
    """A new model or module over the same arrays in which nothing is trained, adapters included."""
    model = copy_structure(model)
    for _, module in nnx.iter_modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param):
                setattr(module, name, frozen(value))
    return model


def with_trained_tower(model: Decoder, layers: bool = True, merger: bool = True) -> Decoder:
    """A new model over the same arrays whose tower trains, whole.

      layers: with its projection of patches and learned positions, or these stay as they are.
      merger: with those of earlier layers, or they stay as they are.

    Raises ValueError for a model without a tower, or with quantised weights.
    """
    if model.vision is None:
        raise ValueError("with_trained_tower: this model has no tower; load it with pictures=True")
    if any(isinstance(matrix.stored_weight, Stored) for _, matrix in matrices(model)):
        raise ValueError("with_trained_tower: this model's weights are quantised; adapt its tower (get_peft_model)")
    model = copy_structure(model)
    assert model.vision is not None
    for path, module in nnx.iter_modules(model.vision):
        if path and (merger if path[0] in ("merger", "deep_mergers") else layers):
            for name, value in list(vars(module).items()):
                if isinstance(value, Frozen) and not isinstance(value, NeverTrained):
                    setattr(module, name, trained(value, value.get_value()))
    return model


def _ranks_and_alphas(
    model: Decoder,
    r,
    lora_alpha,
    target_modules,
    target_parameters,
    rank_pattern,
    alpha_pattern,
    exclude_modules: str | Sequence[str] | None = None,
) -> dict[str, tuple[int, float]]:
    """{matrix's name: (rank, alpha)} of the matrices that get_peft_model would adapt. ValueError for what matches
    nothing.
    """
    expert_names = [name for name, _ in experts(model)]
    parameters = select_parameters(expert_names, target_parameters or ())
    selected = []
    if target_modules or not parameters:
        names = [name for name, _ in linears(model)]
        excluded = _excluded([*names, *_unadapted(model)], exclude_modules)
        if target_modules != "all-linear" and target_modules:
            _refuse_unadapted([name for name in _unadapted(model) if name not in excluded], target_modules)
        selected = select_targets([name for name in names if name not in excluded], target_modules, expert_names)
    selected += parameters
    checked_patterns = {"rank_pattern": (rank_pattern, values.whole), "alpha_pattern": (alpha_pattern, values.positive)}
    settings = []
    for key, (patterns, check) in checked_patterns.items():
        for pattern, value in (patterns or {}).items():
            check(f"{key}: {pattern!r}", value)
            if not pattern_values(key, {pattern: value}, selected):
                raise ValueError(f"{key}: {pattern!r} matches no adapted linear")
        settings.append(pattern_values(key, patterns or {}, selected))
    ranks, alphas = settings
    return {name: (ranks.get(name, r), alphas.get(name, lora_alpha)) for name in selected}


def _unadapted(model: Decoder) -> list[str]:
    """The modules that PEFT would match by name, and that have no adapters here."""
    return [] if model.vision is None else model.vision.unadapted


def _excluded(names: Sequence[str], exclude_modules: str | Sequence[str] | None) -> set[str]:
    """The names that PEFT's exclude_modules matches: a regular expression over whole names, or names or their ends."""
    if isinstance(exclude_modules, str):
        return set(matching("exclude_modules", exclude_modules, names))
    return {name for name in names if any(name_matches(name, module) for module in exclude_modules or ())}


def _refuse_unadapted(names: Sequence[str], target_modules: str | Sequence[str]) -> None:
    """Raises ValueError for targets that in PEFT name a module without an adapter, too."""
    if isinstance(target_modules, str):
        matched = matching("target_modules", target_modules, names)
    else:
        matched = [name for name in names if any(name_matches(name, target) for target in target_modules)]
    if matched:
        raise ValueError(
            f"target_modules {target_modules!r} name {matched[0]} too, which is no linear and gets no adapter: name "
            "linears by more of their names, such as attn.proj or q_proj.linear, or exclude it (exclude_modules)"
        )


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
    exclude_modules: str | Sequence[str] | None = None,
) -> Decoder:
    """Adds LoRA adapters to a model and freezes its weights: a new model that shares every array of the base. Arguments
    mean what they do in PEFT's LoraConfig.

      model: the base, without adapters.
      r: the rank of the adapters, unless rank_pattern names another.
      lora_alpha: the adapters' output is multiplied by alpha / r, or alpha / sqrt(r) with use_rslora (arXiv
        2312.03732).
      target_modules: "all-linear"; a regular expression over whole names; or a list of names or last parts of names,
        which may be empty with target_parameters.
      target_parameters: expert matrices, such as ["experts.gate_up_proj", "experts.down_proj"]; each expert gets rank
        r. Neither lora_dropout nor use_dora goes with them.
      lora_dropout: at least 0 and below 1; linears with the same input share one mask.
      use_rslora: the scale is alpha / sqrt(r), not alpha / r.
      use_dora: the norms of the rows train too (arXiv 2402.09353).
      modules_to_save: of "embed_tokens" and "lm_head", which train whole in float32; tied heads stay tied. A head that
        is not a language model's always trains.
      rank_pattern, alpha_pattern: {regular expression over a whole name or its end after a dot: value}.
      seed: draws the initial A; B starts at zero.
      exclude_modules: linears that target_modules selects and that get no adapter: a regular expression over whole
        names, such as ".*visual.*", or a list of names or their ends. As in PEFT, "all-linear" is with a tower's.

    Raises ValueError for what matches nothing, a value out of range, or a model with adapters.
    """
    values.whole("r", r)
    values.positive("lora_alpha", lora_alpha)
    if not 0.0 <= lora_dropout < 1.0:
        raise ValueError(f"lora_dropout = {lora_dropout}: must be at least 0 and below 1")
    if has_adapter(model):
        raise ValueError("this model has adapters already; merge them first (merge_adapter) or start from the base")
    model = freeze(model)
    modules = dict(matrices(model))
    patterns = rank_pattern, alpha_pattern
    selected = _ranks_and_alphas(
        model, r, lora_alpha, target_modules, target_parameters, *patterns, exclude_modules=exclude_modules
    )
    if (lora_dropout or use_dora) and any(isinstance(modules[name], ExpertLinear) for name in selected):
        setting = f"lora_dropout = {lora_dropout}" if lora_dropout else "use_dora = True"
        raise ValueError(f"{setting}: experts (target_parameters) cannot have it; PEFT refuses it too")
    experts = {name for name in selected if isinstance(modules[name], ExpertLinear)}
    keys = initial.split(initial.key_of(seed), len(selected)) if experts else []
    sizes = [(i, selected[name][0], modules[name].sizes[-1]) for i, name in enumerate(selected) if name not in experts]
    rows = first_rows(seed, sizes)
    shapes = [(modules[name].sizes[0], rank) for name, (rank, _) in selected.items() if name not in experts]
    zeros = initial.zeros(shapes, traced=any(isinstance(row, Tracer) for row in rows))
    beginnings = zip(rows, zeros, strict=True)
    for number, (name, (rank, alpha)) in enumerate(selected.items()):
        linear = modules[name]
        if isinstance(linear, ExpertLinear):
            count, out_size, in_size = linear.sizes
            linear.lora = ExpertLora(count, in_size, out_size, rank, alpha, keys[number], rslora=use_rslora)
            continue
        lora = Lora(linear.sizes[0], alpha, lora_dropout, *next(beginnings), rslora=use_rslora, dora=use_dora)
        if lora.magnitude is not None and not initial.makes_shapes():
            lora.magnitude.set_value(
                row_norm(dense(on_device(linear.stored_weight)), lora.a[...], lora.b[...], lora.scale)
            )
        linear.lora = lora
    head = model.config.head.name
    for name in {*(modules_to_save or ()), *([] if model.config.head.is_text else [head])}:
        if name not in savable(model):
            savable_names = ", ".join(savable(model))
            raise ValueError(f"modules_to_save: {name!r} cannot be trained whole; there are: {savable_names}")
        holder = model.embedding if name == "embed_tokens" or model.head is None else model.head
        if isinstance(holder.weight, Frozen):
            holder.original = holder.weight
            holder.weight = trained(holder.original, initial.cast(holder.original.get_value(), jnp.float32))
    return model


def without_adapter(model: Decoder) -> Decoder:
    """The base of a model with an adapter, all frozen, over the same arrays: no adapters, modules_to_save with their
    original weights, no rounding for QAT. Training `model` does not change it. Raises ValueError without an adapter:
    original weights of a model that was trained whole are lost.
    """
    if not has_adapter(model):
        raise ValueError("without_adapter: this model has no adapter to leave out; load its base (from_pretrained)")
    model = copy_structure(model)
    for _, matrix in matrices(model):
        matrix.lora = nnx.data(None)
        stop_rounding(matrix)
    for holder in (model.embedding, model.head):
        if holder is not None and holder.original is not None:
            holder.weight = holder.original
            del holder.original
    return freeze(model)


def adapter_settings(model: Decoder) -> dict[str, Any] | None:
    """The arguments of get_peft_model, without the seed, that would give the model's adapters; None if it has none. The
    most common rank and alpha are `r` and `lora_alpha`, others are in the patterns. A target is the last part of names
    if all matrices with it are adapted, otherwise a whole name. Raises ValueError for a setting that differs between
    modules where PEFT has one for all.
    """
    matrix_by_name = dict(matrices(model))
    loras = {name: matrix.lora for name, matrix in matrix_by_name.items() if matrix.lora is not None}
    if not loras:
        return None

    def common(setting, values):
        """The one value of all adapters; ValueError if they differ."""
        if len(set(values)) > 1:
            raise ValueError(f"{setting} differs between adapters ({set(values)}); PEFT has one for all")
        return next(iter(values))

    rank, rank_pattern = _compress({name: lora.rank for name, lora in loras.items()})
    alpha, alpha_pattern = _compress({name: _number(lora.alpha) for name, lora in loras.items()})
    # A last part of names where all modules with it are adapted, whole names otherwise: PEFT then matches the same set.
    targets, parameters, peers = set(), set(), [*matrix_by_name, *_unadapted(model)]
    for name, lora in loras.items():
        last_part = name.rsplit(".", 1)[1]
        adapted = all(peer in loras for peer in peers if peer.endswith("." + last_part))
        if isinstance(lora, ExpertLora):
            # Such as mlp.experts.down_proj, for all layers.
            parameters.add(name.split(".", 3)[3] if adapted else name)
        else:
            targets.add(last_part if adapted else name)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "target_parameters": sorted(parameters) or None,
        "lora_dropout": common("lora_dropout", [lora.rate for lora in loras.values()]),
        "use_rslora": common("use_rslora", [lora.rslora for lora in loras.values()]),
        "use_dora": common("use_dora", [lora.magnitude is not None for lora in loras.values()]),
        "modules_to_save": _saved(model) or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
    }


def gives_adapter(model: Decoder, settings: Mapping[str, Any]) -> bool:
    """Whether get_peft_model(base, **settings) would give adapters like the model's, apart from their values, and train
    the same modules whole; False if the model has none, or settings match nothing or are invalid. Raises ValueError as
    adapter_settings does.
    """
    actual = adapter_settings(model)
    if actual is None:
        return False
    choice = ("r", "lora_alpha", "target_modules", "target_parameters", "rank_pattern", "alpha_pattern")
    try:
        chosen = (settings[key] for key in choice)
        expected = _ranks_and_alphas(model, *chosen, exclude_modules=settings.get("exclude_modules"))
    except ValueError:
        return False
    loras = {name: matrix.lora for name, matrix in matrices(model) if matrix.lora is not None}
    saved = {*(settings["modules_to_save"] or ()), *([] if model.config.head.is_text else [model.config.head.name])}
    saved = set(savable(model)) if saved and model.head is None else saved
    return (
        expected == {name: (lora.rank, lora.alpha) for name, lora in loras.items()}
        and all(settings[key] == actual[key] for key in ("lora_dropout", "use_rslora", "use_dora"))
        and saved == set(actual["modules_to_save"] or ())
    )


def _saved(model: Decoder) -> list[str]:
    holders = zip(savable(model), (model.embedding.weight, model.head_variable), strict=True)
    return [name for name, variable in holders if isinstance(variable, nnx.Param)]


def _compress(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(the most common value, {last part of a name, or whole name: value} of the others), as in rank_pattern."""
    default = Counter(values.values()).most_common(1)[0][0]
    by_part: dict[str, set] = {}
    for name, value in values.items():
        by_part.setdefault(name.rsplit(".", 1)[1], set()).add(value)
    exceptions = {}
    for name, value in values.items():
        last_part = name.rsplit(".", 1)[1]
        if value != default:
            exceptions[last_part if len(by_part[last_part]) == 1 else name] = value
    return default, exceptions


def _number(value: float) -> int | float:
    """16.0 -> 16, as PEFT writes alphas to JSON."""
    return int(value) if float(value).is_integer() else value
