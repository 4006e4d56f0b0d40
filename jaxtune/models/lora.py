"""Adds LoRA adapters to a model (`get_peft_model`): selects the matrices that get one, and freezes the rest.

The module also removes adapters (`without_adapter`), lists the matrices that can have one (`linears`, `experts`,
`matrices`), and describes the adapters of a model as arguments of `get_peft_model` (`adapter_settings`); by
`gives_adapter` a run decides whether its config describes them already. `savable` names the whole matrices that can be
trained beside adapters (modules_to_save). `select_targets` and `select_parameters` find matrices by PEFT's rules;
`name_matches` and `pattern_values`, which apply these rules to names, also serve the loading of adapters. Functions
that return a model return a new module (`copy_structure`) that shares the frozen arrays; their argument is never
changed. `stop_rounding` alone changes a matrix in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import heads, values
from jaxtune.models.decoder import Decoder
from jaxtune.models.expressions import matching
from jaxtune.models.layers.expert_linear import ExpertLinear, ExpertLora
from jaxtune.models.linear import Frozen, Linear, Lora, frozen, row_norm, trained
from jaxtune.pallas.formats import dense


def savable(model: Decoder) -> tuple[str, str]:
    """The names that modules_to_save may contain for this model, which are the matrices that can be trained whole
    beside adapters: ("embed_tokens", the name of the head, such as "lm_head"). get_peft_model refuses others."""
    return "embed_tokens", model.config.head.name


def linears(model: Decoder) -> Iterator[tuple[str, Linear]]:
    """Yields (Hugging Face module name, Linear) of all linears in the layers in order, such as
    model.layers.0.self_attn.q_proj. In a model with per-layer embeddings (Gemma 4 E2B), the linear that computes these
    (model.per_layer_model_projection) comes last. Matrices of experts, embedding and head are not among them, nor are
    routers except those that are a Linear (Gemma 4's). Adapters, quantisation and exports address linears by these
    names."""
    yield from ((name, matrix) for name, matrix in _in_layers(model) if not matrix.num_experts)
    if model.per_layer is not None:
        yield "model.per_layer_model_projection", model.per_layer.projection


def experts(model: Decoder) -> Iterator[tuple[str, ExpertLinear]]:
    """Yields (Hugging Face parameter name, ExpertLinear) in order, such as model.layers.0.mlp.experts.gate_up_proj;
    each has one matrix (gate_up_proj or down_proj) of all experts of a layer. It yields nothing in a model without
    experts. Adapters, quantisation and exports address these matrices by the names."""
    yield from ((name, matrix) for name, matrix in _in_layers(model) if matrix.num_experts)


def _in_layers(model: Decoder) -> Iterator[tuple[str, Any]]:
    """Yields (Hugging Face name, Linear or ExpertLinear) of every matrix in the layers of `model` that can have an
    adapter, layer by layer, linears and experts mixed; `linears` and `experts` filter them."""
    for index, (layer, spec) in enumerate(zip(model.layers, model.config.layers, strict=True)):
        names = spec.hf_names
        for part, name, matrix in layer.matrices():
            yield ".".join(part for part in ("model.layers", str(index), names[part], name) if part), matrix


def matrices(model: Decoder) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    """Yields (Hugging Face name, Linear or ExpertLinear) of everything in `model` that can have an adapter or, if its
    attribute `quantizable` is True, be quantised: all that `linears` yields, then all that `experts` yields."""
    yield from linears(model)
    yield from experts(model)


def stop_rounding(matrix: Linear | ExpertLinear) -> None:
    """Changes a linear or experts, in place, so that they compute without the rounding of quantisation-aware training:
    neither weights nor inputs are rounded, and an observed scale of inputs is removed. Weights are not changed. The
    caller gives one of a copied model. It is called where adapters are removed or merged, where QAT is undone or
    prepared anew, and where QAT ends with weights that were rounded for good (convert_qat)."""
    matrix.fake_quant = None
    if isinstance(matrix, Linear) and matrix.input_scale is not None:
        del matrix.input_scale


def has_adapter(model: Decoder) -> bool:
    """Whether any linear or expert matrix of the model has a LoRA adapter; matrices that are trained whole do not
    count. Functions that need a base, such as get_peft_model, refuse a model with one, and objectives whose reference
    is the model without its adapter refuse a model that has none. Runs and exports decide by it what they save or
    merge, and chat whether there is an adapter to switch off."""
    return any(matrix.lora is not None for _, matrix in matrices(model))


def copy_structure(model):
    """Returns a copy of `model` (an nnx.Module) that shares its arrays and so takes no memory. The copy's modules and
    variables are new objects, so its structure, types of variables and values can be changed without an effect on
    `model`. Functions that return a changed model change such a copy."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda array: array, state))  # new variables: split returns the model's own


def name_matches(name: str, target: str) -> bool:
    """Whether `target`, an entry of target_modules, target_parameters or a similar list (such as modules that are not
    quantised), selects the module or parameter of the dotted name `name` by PEFT's rule: it is the whole name, or the
    end of it after a dot ("q_proj" or "self_attn.q_proj")."""
    return name == target or name.endswith("." + target)


def pattern_values(key: str, patterns: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Looks up the settings of modules by patterns: {name: value} for the names that a pattern matches; the first
    pattern that matches a name decides. Other names are left out.

    This is PEFT's rule for rank_pattern and alpha_pattern, whose patterns are regular expressions over the end of a
    name, after a dot, or the whole name. get_peft_model and the loading of adapters call it.

    Args:
      key: the config's key that has the patterns, such as "rank_pattern", for error messages.
      patterns: {regular expression: value}.
      names: the modules' names.
    Raises:
      ValueError: a pattern that is not a regular expression, or that backtracks for too long.
    """
    found: dict[str, float] = {}
    for pattern, value in patterns.items():
        ends = [end for name in names if name not in found for end in _ends(name)]
        matched = set(matching(key, pattern, ends))
        found |= {name: value for name in names if name not in found and not matched.isdisjoint(_ends(name))}
    return found


def _ends(name: str) -> list[str]:
    """The strings that a pattern may match for the dotted name `name`: the whole name, and what follows each dot; for
    "a.b.c" ["a.b.c", "b.c", "c"]. `pattern_values` tries its patterns on them."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def select_targets(names: Sequence[str], target_modules: str | Sequence[str], experts: Sequence[str] = ()) -> list[str]:
    """Returns the names of the linears that get_peft_model's argument target_modules selects, in the order of `names`;
    `_chosen` calls it.

    Args:
      names: of all linears that can have an adapter, such as "model.layers.0.self_attn.q_proj".
      target_modules: "all-linear"; a regular expression over the whole name; or a list of names or ends of names after
        a dot ("q_proj").
      experts: names of expert matrices, which target_parameters selects; only the error message names them.
    Raises:
      ValueError: target_modules is empty, or a regular expression that is not valid or backtracks for too long, or an
        entry of the list, or the expression, matches no linear; then the message has the last parts of existing names.
    """
    known = sorted({name.rsplit(".", 1)[1] for name in names})
    if target_modules == "all-linear":
        return list(names)
    if not target_modules:
        raise ValueError(f"target_modules is empty: name at least one of {', '.join(known)}, or 'all-linear'")
    if isinstance(target_modules, str):
        chosen = matching("target_modules", target_modules, names)
        if not chosen:
            raise ValueError(
                f"target_modules {target_modules!r} matches no linear; it is a regular expression over names such as "
                f"{names[0]!r}; last parts: {', '.join(known)}"
            )
        return chosen
    for target in target_modules:
        if not any(name_matches(name, target) for name in names):
            whole = ("embed_tokens", *(head.name for head in heads.HEADS))
            hint = " (put it in modules_to_save to train it whole)" if target in whole else ""
            if experts:
                named = dict.fromkeys(name.split(".", 3)[3] for name in experts)
                hint = f" (experts are named in target_parameters: {', '.join(named)})"
            raise ValueError(
                f"target_modules: {target!r} matches no linear of this model; there are: {', '.join(known)}{hint}"
            )
    return [name for name in names if any(name_matches(name, target) for target in target_modules)]


def select_parameters(names: Sequence[str], target_parameters: Sequence[str]) -> list[str]:
    """Returns the names of the expert matrices that get_peft_model's argument target_parameters selects, in the order
    of `names`: a target is the whole name or its end after a dot, as in PEFT. Without targets the result is [].
    `_chosen` calls it.

    Args:
      names: of all expert matrices, such as "model.layers.0.mlp.experts.down_proj"; [] in a model without experts.
      target_parameters: a list such as ["mlp.experts.down_proj"].
    Raises:
      ValueError: a target that matches nothing, or a string in place of a list.
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
    """Makes a new model over the same arrays in which every `nnx.Param` has become a `Frozen`, also those of adapters,
    so that nothing in it is trained. Adapters are added to such a model, and quantised models, reference models and
    teachers are such. `model` is not changed."""
    model = copy_structure(model)
    for _, module in nnx.iter_modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, nnx.Param):
                setattr(module, name, frozen(value))
    return model


def _chosen(
    model: Decoder, r, lora_alpha, target_modules, target_parameters, rank_pattern, alpha_pattern
) -> dict[str, tuple[int, float]]:
    """Finds the matrices of `model` that get_peft_model would adapt: {matrix's name: (rank, alpha)}, linears first.
    get_peft_model makes adapters by it, and gives_adapter compares it with those of a model. The other arguments are
    those of get_peft_model: r and lora_alpha, the default rank and alpha; target_modules and target_parameters, which
    select matrices; rank_pattern and alpha_pattern, the exceptions.

    Raises:
      ValueError: a target that matches nothing, a pattern that matches none of the selected matrices, or a rank or
        alpha in a pattern that is out of range. r and lora_alpha are not checked.
    """
    expert_names = [name for name, _ in experts(model)]
    parameters = select_parameters(expert_names, target_parameters or ())
    chosen = []
    if target_modules or not parameters:
        chosen = select_targets([name for name, _ in linears(model)], target_modules, expert_names)
    chosen += parameters
    given = {"rank_pattern": (rank_pattern, values.whole), "alpha_pattern": (alpha_pattern, values.positive)}
    found = []
    for key, (patterns, check) in given.items():
        for pattern, value in (patterns or {}).items():
            check(f"{key}: {pattern!r}", value)
            if not pattern_values(key, {pattern: value}, chosen):
                raise ValueError(f"{key}: {pattern!r} matches no adapted linear")
        found.append(pattern_values(key, patterns or {}, chosen))
    ranks, alphas = found
    return {name: (ranks.get(name, r), alphas.get(name, lora_alpha)) for name in chosen}


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
    """Adds LoRA adapters to a model and freezes its weights. The arguments have the meaning of PEFT's LoraConfig.

    Args:
      model: a model without adapters; it is not changed.
      r: rank of the adapters.
      lora_alpha: the adapters' output is multiplied by alpha / r, or alpha / sqrt(r) with use_rslora.
      target_modules: linears: "all-linear", all that `linears` yields; a regular expression over whole names; or a list
        of names or last parts of names. It may be empty if target_parameters is given.
      target_parameters: expert matrices, such as ["experts.gate_up_proj", "experts.down_proj"]; each expert gets rank
        r. With them, lora_dropout must be 0 and use_dora False, as in PEFT. None: no experts.
      lora_dropout: rate of dropout on the adapters' input, at least 0 and below 1; linears with the same input share
        one mask.
      use_rslora: True: the scale is alpha / sqrt(r) (arXiv 2312.03732); False: alpha / r.
      use_dora: True: weight-decomposed adapters, which also train the norms of the rows (arXiv 2402.09353).
      modules_to_save: "embed_tokens" and "lm_head" are trained whole in float32 if named; tied heads stay tied, so that
        either name trains both. None: neither is. A head that is not a language model's, such as "score", is always
        trained.
      rank_pattern, alpha_pattern: {regular expression over the whole name of a module or its end after a dot: value}
        for modules that differ; None: none does.
      seed: draws the initial A; B starts at zero.

    Returns:
      a new model that shares every array of the base with `model`. Only adapters and modules_to_save are trained in it.

    Raises:
      ValueError: a target, pattern or module that matches nothing; a rank, alpha or rate out of range; dropout or DoRA
        with experts; a model with adapters.
    """
    values.whole("r", r)
    values.positive("lora_alpha", lora_alpha)
    if not 0.0 <= lora_dropout < 1.0:
        raise ValueError(f"lora_dropout = {lora_dropout}: must be at least 0 and below 1")
    if has_adapter(model):
        raise ValueError("this model has adapters already; merge them first (merge_adapter) or start from the base")
    model = freeze(model)
    modules = dict(matrices(model))
    chosen = _chosen(model, r, lora_alpha, target_modules, target_parameters, rank_pattern, alpha_pattern)
    if (lora_dropout or use_dora) and any(isinstance(modules[name], ExpertLinear) for name in chosen):
        setting = f"lora_dropout = {lora_dropout}" if lora_dropout else "use_dora = True"
        raise ValueError(f"{setting}: experts (target_parameters) cannot have it; PEFT refuses it too")
    keys = jax.random.split(jax.random.key(seed), len(chosen))
    for (name, (rank, alpha)), key in zip(chosen.items(), keys, strict=True):
        linear = modules[name]
        if isinstance(linear, ExpertLinear):
            count, out_size, in_size = linear.sizes
            linear.lora = ExpertLora(count, in_size, out_size, rank, alpha, key, rslora=use_rslora)
            continue
        out_size, in_size = linear.sizes
        lora = Lora(in_size, out_size, rank, alpha, lora_dropout, key, rslora=use_rslora, dora=use_dora)
        if lora.magnitude is not None:
            lora.magnitude.set_value(row_norm(dense(linear.stored_weight), lora.a[...], lora.b[...], lora.scale))
        linear.lora = lora
    head = model.config.head.name
    for name in {*(modules_to_save or ()), *([] if model.config.head.is_text else [head])}:
        if name not in savable(model):
            known = ", ".join(savable(model))
            raise ValueError(f"modules_to_save: {name!r} cannot be trained whole; there are: {known}")
        holder = model.embedding if name == "embed_tokens" or model.head is None else model.head
        if isinstance(holder.weight, Frozen):
            holder.original = holder.weight
            holder.weight = trained(holder.original, holder.original.get_value().astype(jnp.float32))
    return model


def without_adapter(model: Decoder) -> Decoder:
    """Returns the base of a model with an adapter: what it was before get_peft_model or load_adapter.

    Adapters of linears and experts are removed with DoRA's magnitudes, modules_to_save have their original weights, and
    a model that was prepared for QAT computes without rounding weights and inputs. Quantised weights stay quantised.
    Objectives that compare with a reference, such as DPO, compute it with this model, and chat and the server answer
    with it as the base.

    Returns:
      a new model, all frozen, that shares every array with `model`; it needs no memory, and training `model` does not
        change it.
    Raises:
      ValueError: the model has no adapter. The original weights of a model that was trained whole are lost.
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
    """Describes the adapters of a model as the arguments of get_peft_model (without the seed) that would give them:
    {name: value}; None if the model has no adapters.

    The most common rank and alpha are `r` and `lora_alpha`, and the others are in the patterns. A target is a whole
    name, or, if all matrices of the model with the same last part (linears and experts alike) are adapted, only that
    part (of experts what follows the layer's number, such as mlp.experts.down_proj). adapter_config.json is written
    from these arguments, and a run records them where its config does not describe the model's adapters.

    Raises:
      ValueError: a dropout rate, use_rslora or use_dora that differs between modules; PEFT has one value for all.
    """
    everything = dict(matrices(model))
    loras = {name: matrix.lora for name, matrix in everything.items() if matrix.lora is not None}
    if not loras:
        return None

    def common(setting, values):
        """The one value of `values`, which all adapters have for this setting; raises ValueError if there are
        several."""
        if len(set(values)) > 1:
            raise ValueError(f"{setting} differs between adapters ({set(values)}); PEFT has one for all")
        return next(iter(values))

    rank, rank_pattern = _compress({name: lora.rank for name, lora in loras.items()})
    alpha, alpha_pattern = _compress({name: _number(lora.alpha) for name, lora in loras.items()})
    # A last part of names where all modules with it are adapted, whole names otherwise: PEFT then matches the same set.
    targets, parameters = set(), set()
    for name, lora in loras.items():
        part = name.rsplit(".", 1)[1]
        whole = all(other in loras for other in everything if other.endswith("." + part))
        if isinstance(lora, ExpertLora):
            parameters.add(name.split(".", 3)[3] if whole else name)  # such as mlp.experts.down_proj, for all layers
        else:
            targets.add(part if whole else name)
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
    """Whether get_peft_model(base, **settings) would give adapters like those of `model`, apart from their values, and
    train the same modules whole. If so, a run records the adapter section of its config as it was written; otherwise it
    records what the model has (adapter_settings). The run does not refuse the model. A section that names an adapter's
    folder (adapter.path) is always recorded as it was written, without this question.

    settings: every argument of get_peft_model but the seed. The result is False too if the model has no adapters, or if
    a target or pattern matches nothing in it or is not valid.

    Raises:
      ValueError: the model's adapters cannot be described as settings (adapter_settings).
    """
    actual = adapter_settings(model)
    if actual is None:
        return False
    choice = ("r", "lora_alpha", "target_modules", "target_parameters", "rank_pattern", "alpha_pattern")
    try:
        wanted = _chosen(model, *(settings[key] for key in choice))
    except ValueError:
        return False
    loras = {name: matrix.lora for name, matrix in matrices(model) if matrix.lora is not None}
    saved = {*(settings["modules_to_save"] or ()), *([] if model.config.head.is_text else [model.config.head.name])}
    saved = set(savable(model)) if saved and model.head is None else saved
    return (
        wanted == {name: (lora.rank, lora.alpha) for name, lora in loras.items()}
        and all(settings[key] == actual[key] for key in ("lora_dropout", "use_rslora", "use_dora"))
        and saved == set(actual["modules_to_save"] or ())
    )


def _saved(model: Decoder) -> list[str]:
    """The value of modules_to_save for the model: those of the names ("embed_tokens", the head's name) whose weight is
    trained whole. If the head is tied to a trained embedding, both names are in it; [] if neither is trained.
    adapter_settings calls it."""
    holders = zip(savable(model), (model.embedding.weight, model.head_variable), strict=True)
    return [name for name, variable in holders if isinstance(variable, nnx.Param)]


def _compress(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Divides a setting of all adapters, such as the rank, into a default and exceptions, as PEFT's config has it (r
    and rank_pattern, for example). adapter_settings calls it.

    values: {adapted matrix's name: its value of the setting}, not empty. Returns (the most common value, {last part of
    a name, or whole name: value} of the matrices with other values). A last part is used if all adapted matrices that
    end so have the same value."""
    default = Counter(values.values()).most_common(1)[0][0]
    by_part: dict[str, set] = {}
    for name, value in values.items():
        by_part.setdefault(name.rsplit(".", 1)[1], set()).add(value)
    rest = {}
    for name, value in values.items():
        part = name.rsplit(".", 1)[1]
        if value != default:
            rest[part if len(by_part[part]) == 1 else name] = value
    return default, rest


def _number(value: float) -> int | float:
    """An alpha as PEFT writes it to JSON: `value` as an int if it is a whole number, otherwise unchanged. With it
    adapter_settings gives 16 and not 16.0."""
    return int(value) if float(value).is_integer() else value
