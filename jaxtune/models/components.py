"""Applies a precision map ({pattern of module names: dtype or format}, precision.py) to a model, and reads from a model
the map that it follows.

`components` lists the modules that a map can name, and `resolved` decides the word (dtype or format) of each. Loading
stores tensors by `of_tensors`, and sets the dtypes of computation by `set_compute`. A run makes a loaded model compute
as its map says (`follow`), and the planner makes a model that is stored as its map says (`stored_as`). Runs and
adapters record what the model then has: `common_format` and `followed`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder, Embedding
from jaxtune.models.families.common import tensor_name
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.routers import Router
from jaxtune.models.linear import Linear
from jaxtune.models.lora import copy_structure, freeze, has_adapter
from jaxtune.models.norm import LayerNorm, RMSNorm
from jaxtune.models.precision import DTYPES, NORMS, ROUTER, WORDS, Component, resolve
from jaxtune.models.registry import family
from jaxtune.pallas.format_names import KEPT
from jaxtune.pallas.formats import FORMATS, Stored, format_of, kept_layout

type Named = Linear | ExpertLinear | Router | RMSNorm | LayerNorm | Embedding  # what a precision map can name


def components(model: Decoder) -> Iterator[tuple[Component, tuple, Named]]:
    """Yields (Component, path, module) for every module of `model` that a precision map can name: linears, experts,
    routers, norms, the embedding and the head, but none of a teacher. The Component is what patterns are compared with:
    the module's name in checkpoints; its kind, "router" (also for what is inside a router), "norms" or ""; as an alias
    of an embedding that is the head too, the head's name; and whether the module can be quantised, as linears and
    experts of the layers (but not a router's) and the projection of per-layer embeddings can. The path of attributes
    and indices leads from the model to the module, which is the model's own, not a copy. The arrays of `model` may be
    abstract. Functions here that apply or read maps call it, and train/sensitivity.py, which tries formats."""
    norms, config = family(model.config.family).norms, model.config
    for path, module in nnx.iter_modules(model):
        if path[:1] == ("teacher",) or not isinstance(
            module, Linear | ExpertLinear | Router | RMSNorm | LayerNorm | Embedding
        ):
            continue
        named = norms
        if path[0] == "layers":
            part, spec = str(path[2]), config.layers[int(str(path[1]))]
            if part not in norms and part not in spec.hf_names:  # a layer of one's own: no checkpoint names it
                named = {**norms, part: part}
        name = tensor_name((*path, "weight"), named, config.layers, config.head.name).removesuffix(".weight")
        routes = isinstance(module, Router) or "router" in path
        kind = ROUTER if routes else NORMS if isinstance(module, RMSNorm | LayerNorm) else ""
        tied = isinstance(module, Embedding) and model.head is None
        in_format = path[0] in ("layers", "per_layer") and getattr(module, "quantizable", False)
        yield Component(name, kind, (config.head.name,) if tied else (), in_format), path, module


def resolved(model: Decoder, words: Mapping[str, str], rest: str | None = None) -> dict[str, str]:
    """Decides the precision of the modules of `model`, as `precision.resolve` does it: {module's name in checkpoints:
    word}, where a word is a dtype such as "bf16" or a format such as "nf4". Modules that keep the model's dtype because
    neither argument concerns them are not in it. `model` is not changed. Loading, `follow` and `stored_as` go by it.

    Args:
      model: its arrays may be abstract.
      words: the precision map, {pattern of module names: word}.
      rest: the format of the modules that can be quantised (linears and experts) and that no pattern matches; one in
        which weights only stay as they are stored ("mxfp4") is that of experts alone. None: none.
    Raises:
      ValueError: a pattern or word that does not fit the model.
    """
    if rest not in KEPT:
        return resolve([each for each, *_ in components(model)], words, rest)
    experts = {each.name: rest for each, _, module in components(model) if isinstance(module, ExpertLinear)}
    return experts | resolve([each for each, *_ in components(model)], words)


def set_compute(model: Decoder, found: Mapping[str, str]) -> None:
    """Sets the dtype in which each module of `model` computes (its attribute `compute`), in place; weights stay as they
    are. found: {module's name in checkpoints: word} from `resolved`; a module that it does not name, or names with a
    format or the model's own dtype, computes in the model's dtype (`compute` is None). Loading, `follow` and
    `stored_as` call it, and the check of a merge, which with {} clears all."""
    for each, _, module in components(model):
        compute = DTYPES.get(found.get(each.name, ""))
        compute = None if compute == model.dtype else compute
        if compute != module.compute:
            module.compute = compute


def follow(model: Decoder, words: Mapping[str, str]) -> None:
    """Makes the modules of `model` multiply as the precision map `words` ({pattern: dtype or format}) says, in place.
    Every run whose config names modules calls it, both for a model that was given to it and for one that it loaded by
    the same map, so it changes no stored weight: an array in another dtype is cast when it multiplies. Modules that
    the map does not name multiply in the model's dtype.

    Raises:
      ValueError: a pattern or word that does not fit the model; a weight that is not quantised in the format that the
        map says, or is quantised although the map says a dtype. The model is then unchanged.
    """
    found = resolved(model, words)
    for each, _, module in components(model):
        word, weight = found.get(each.name), module.weight.get_value()
        here = format_of(weight).name if isinstance(weight, Stored) else None
        if word is not None and here != (word if word in FORMATS else None):
            raise ValueError(
                f"precision: {each.name} is to be in {word}, and the model has it in {here or weight.dtype.name}"
                ": load it with the same map (from_pretrained has the argument precision), or change the map"
            )
    set_compute(model, found)


def of_tensors(model: Decoder, words: Mapping[str, str], paths: Mapping[str, tuple]) -> dict[str, str]:
    """Says how the tensors are stored that a precision map concerns: {tensor's name: dtype or format}. The loader
    stores tensors by it. Those that are not in it are stored in the model's dtype, or quantised as in the checkpoint;
    of a checkpoint that has quantised weights the loader quantises no others, and refuses a map's formats.

    Args:
      model: its arrays may be abstract.
      words: {module's name: dtype or format}, from `resolved`. A dtype is that of all tensors of the module, a format
        that of its weight alone.
      paths: {tensor's name: the path of attributes and indices that leads to it in `model`}.
    """
    own = {path: words[each.name] for each, path, _ in components(model) if each.name in words}
    found = {name: (own[path[:-1]], path[-1]) for name, path in paths.items() if path[:-1] in own}
    return {name: word for name, (word, last) in found.items() if word in DTYPES or last == "weight"}


def stored_as(model: Decoder, words: Mapping[str, str], rest: str | None = None) -> Decoder:
    """Makes a new model whose modules are stored and computed as a precision map says. The planner calls it, traced
    without data, for models that are not loaded.

    Args:
      model: without adapters; it is not changed. Weights that are quantised already stay as they are.
      words: the map, {pattern: dtype or format}; see precision.py.
      rest: the format of linears and experts that no pattern matches; None: they keep their dtype.
    Returns:
      the new model. If the map or `rest` gives any module a format, all tensors of the model are frozen, and it is no
        longer marked as rounded by quantisation-aware training (`qat` is None).
    Raises:
      ValueError: a pattern or word that does not fit the model; a model with adapters.
    """
    if has_adapter(model):
        raise ValueError("precision: this model has adapters: store the base as you want it, then add them")
    found = resolved(model, words, rest)
    packed = any(word in FORMATS for word in found.values())
    model = freeze(model) if packed else copy_structure(model)
    for each, _, module in components(model):
        word = found.get(each.name)
        if word in FORMATS:
            name, weight = "weight", module.weight.get_value()
            if not isinstance(weight, Stored):
                encode = (kept_layout(word) or FORMATS[word]).encode
                setattr(module, name, module.weight.replace(encode(weight)))
        elif word is not None:
            for name in ("weight", "bias"):
                variable = getattr(module, name, None)
                if variable is not None and not isinstance(variable.get_value(), Stored):
                    setattr(module, name, variable.replace(variable.get_value().astype(DTYPES[word])))
    set_compute(model, found)
    if packed:
        model.qat = None  # its weights are no longer rounded to that grid
    return model


def common_format(model: Decoder) -> str | None:
    """The name of the format in which most of the quantised modules of `model` are, such as "nf4" (modules are
    counted, whatever their sizes; a matrix of all experts of a layer is one); of formats with equally many modules, the
    first by name; None if no weight is quantised. Runs and adapters record it as load_in, the format in which the model
    can be loaded again, and an adapter's record is compared with a base by it. Whether anything is quantised is asked
    of quant.stored_in."""
    names = Counter(word for word in _words(model).values() if word in FORMATS)
    return min(names, key=lambda name: (-names[name], name), default=None)


def _words(model: Decoder) -> dict[str, str]:
    """{module's name in checkpoints: word} of all modules of `model` that a precision map can name, as a map would say
    it: the format of a quantised weight, such as "nf4"; else the word ("bf16", "fp16" or "fp32") of the dtype in which
    the module computes, which is the model's dtype unless a map has set another. common_format and followed read it."""
    found = {}
    for each, _, module in components(model):
        weight = module.weight.get_value()
        plain = WORDS[module.compute or jnp.dtype(model.dtype).name]
        found[each.name] = format_of(weight).name if isinstance(weight, Stored) else plain
    return found


def followed(model: Decoder, plain: bool = True) -> dict[str, str]:
    """The precision map that `model` follows, with whole names as patterns: {module's name in checkpoints: word} of the
    modules that differ from what the format common_format(model) for all linears and experts of the layers, and the
    model's dtype for all else, would give; {} if none does. Runs and adapters record it, so that the model can be
    loaded again as it was, and a run's report lists these modules.

    plain: whether linears and experts of the layers that are in the model's own dtype beside quantised ones are listed.
    False where the model's own files store them so, and loading therefore needs no word for them."""
    own, usual = WORDS[jnp.dtype(model.dtype).name], common_format(model)
    words, found = _words(model), {}
    for each, *_ in components(model):
        word = words[each.name]
        expected = usual if usual is not None and each.quantizable else own
        if word != expected and (plain or word != own):
            found[each.name] = word
    return found
