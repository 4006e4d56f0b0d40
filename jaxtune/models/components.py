"""Applies a precision map (precision.py) to a model, and reads from a model the map that it follows."""

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
from jaxtune.pallas.formats import FORMATS, Stored, format_of

type Named = Linear | ExpertLinear | Router | RMSNorm | LayerNorm | Embedding  # what a precision map can name


def components(model: Decoder) -> Iterator[tuple[Component, tuple, Named]]:
    """Yields (Component, path, module) for every module of `model` that a precision map can name: linears, experts,
    routers, norms, the embedding and the head, but none of a teacher. The Component is what patterns are compared with:
    the module's name in checkpoints, its kind and aliases, and whether it can be quantised. The path of attributes and
    indices leads to the module. The arrays of `model` may be abstract."""
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
        in_format = path[0] == "layers" and getattr(module, "quantizable", False)
        yield Component(name, kind, (config.head.name,) if tied else (), in_format), path, module


def resolved(model: Decoder, words: Mapping[str, str], rest: str | None = None) -> dict[str, str]:
    """The precision of modules of `model`: {name: word}, as `precision.resolve` decides it from the map `words` and
    from `rest`, the format of linears and experts that no pattern matches (None: none).

    Raises:
      ValueError: a pattern or word that does not fit the model.
    """
    return resolve([each for each, *_ in components(model)], words, rest)


def set_compute(model: Decoder, found: Mapping[str, str]) -> None:
    """Sets the dtype in which each module of `model` multiplies, in place. found: {name: word} from `resolved`; a
    module that it does not name, or names with a format or the model's own dtype, multiplies in the model's dtype."""
    for each, _, module in components(model):
        compute = DTYPES.get(found.get(each.name, ""))
        compute = None if compute == model.dtype else compute
        if compute != module.compute:
            module.compute = compute


def follow(model: Decoder, words: Mapping[str, str]) -> None:
    """Makes the modules of `model` multiply as the precision map `words` says, in place. How weights are stored is not
    changed: an array in another dtype is cast when it multiplies.

    Raises:
      ValueError: a pattern that does not fit the model, or a weight that is not in the map's format.
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
    """The word of each tensor that is stored in another way than the model's dtype: {tensor's name: dtype or format}.

    Args:
      model: the model.
      words: {module's name: dtype or format}, from `resolved`. A format is that of the module's weight alone.
      paths: {tensor's name: the path of attributes and indices that leads to it}.
    """
    own = {path: words[each.name] for each, path, _ in components(model) if each.name in words}
    found = {name: (own[path[:-1]], path[-1]) for name, path in paths.items() if path[:-1] in own}
    return {name: word for name, (word, last) in found.items() if word in DTYPES or last == "weight"}


def stored_as(model: Decoder, words: Mapping[str, str], rest: str | None = None) -> Decoder:
    """A new model whose modules are stored and computed as a precision map says.

    Args:
      model: without adapters and without quantised weights; its arrays may be abstract.
      words: the map, {pattern: word}; see precision.py.
      rest: the format of linears and experts that no pattern matches; None: they keep their dtype.
    Returns:
      the new model. If a weight is quantised, all its tensors are frozen.
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
                setattr(module, name, module.weight.replace(FORMATS[word].encode(weight)))
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
    """The name of the format in which most of the quantised weights of `model` are, such as "nf4", of equally many the
    first by name; None where no weight is quantised."""
    names = Counter(word for word in _words(model).values() if word in FORMATS)
    return min(names, key=lambda name: (-names[name], name), default=None)


def _words(model: Decoder) -> dict[str, str]:
    """{name: word} of all modules of `model`: the format of a quantised weight; else the dtype in which the module
    computes if a map names one, and if not the model's dtype."""
    found = {}
    for each, _, module in components(model):
        weight = module.weight.get_value()
        plain = WORDS[module.compute or jnp.dtype(model.dtype).name]
        found[each.name] = format_of(weight).name if isinstance(weight, Stored) else plain
    return found


def followed(model: Decoder, plain: bool = True) -> dict[str, str]:
    """The precision map that `model` follows, by whole names: {name: word} of the modules that differ from what
    model.load_in = common_format(model) and the model's dtype alone would give.

    plain: whether linears and experts that are in 16 or 32 bits beside quantised ones are listed. False where the
    model's own files store them so."""
    own, usual = WORDS[jnp.dtype(model.dtype).name], common_format(model)
    words, found = _words(model), {}
    for each, *_ in components(model):
        word = words[each.name]
        expected = usual if usual is not None and each.quantizable else own
        if word != expected and (plain or word != own):
            found[each.name] = word
    return found
