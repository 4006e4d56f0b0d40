"""Applies a precision map ({pattern of module names: dtype or format}, precision.py) to a model, and reads from a model
the map that it follows.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.decoder import Decoder, Embedding
from jaxtune.models.families.common import tensor_name
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.routers import Router
from jaxtune.models.linear import Linear
from jaxtune.models.lora import copy_structure, freeze, has_adapter
from jaxtune.models.norm import LayerNorm, RMSNorm
from jaxtune.models.precision import DTYPES, NORMS, ROUTER, WORDS, Component, resolve
from jaxtune.models.registry import names_of
from jaxtune.pallas.format_names import KEPT
from jaxtune.pallas.formats import FORMATS, Stored, format_of, kept_layout

type Named = Linear | ExpertLinear | Router | RMSNorm | LayerNorm | Embedding  # what a precision map can name


def components(model: Decoder) -> Iterator[tuple[Component, tuple, Named]]:
    """Yields (Component, path, module) for every module that a precision map can name, but none of a teacher. The path
    leads from `model` to the module itself, not a copy. Arrays may be abstract.
    """
    config = model.config
    norms = names_of(config)
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
        if model.vision is not None and path[0] == "vision":
            name = model.vision.config.tensor_name(path[1:])
        else:
            name = tensor_name((*path, "weight"), named, config.layers, config.head.name).removesuffix(".weight")
        routes = isinstance(module, Router) or "router" in path
        kind = ROUTER if routes else NORMS if isinstance(module, RMSNorm | LayerNorm) else ""
        tied = isinstance(module, Embedding) and model.head is None
        in_format = path[0] in ("layers", "per_layer") and getattr(module, "quantizable", False)
        yield Component(name, kind, (config.head.name,) if tied else (), in_format), path, module


def resolved(model: Decoder, words: Mapping[str, str], default_format: str | None = None) -> dict[str, str]:
    """`precision.resolve` for a model, whose arrays may be abstract: {module's name in checkpoints: dtype or format},
    without modules that keep the model's dtype.

      model: only its structure is read.
      words: {pattern over names: dtype or format}; the first pattern that matches decides.
      default_format: the format of linears and experts that no pattern matches; of experts alone for a format in which
        weights only stay as they are stored ("mxfp4").

    Raises ValueError for a pattern or word that does not fit.
    """
    if default_format not in KEPT:
        return resolve([component for component, *_ in components(model)], words, default_format)
    experts = {
        component.name: default_format for component, _, module in components(model) if isinstance(module, ExpertLinear)
    }
    return experts | resolve([component for component, *_ in components(model)], words)


def set_compute(model: Decoder, words: Mapping[str, str]) -> None:
    """Sets in place the dtype in which each module computes (`compute`); weights stay as they are. A module that
    `words` ({module's name: word}) does not name, or names with a format or the model's dtype, gets None.
    """
    for component, _, module in components(model):
        compute = DTYPES.get(words.get(component.name, ""))
        compute = None if compute == model.dtype else compute
        if compute != module.compute:
            module.compute = compute


def follow(model: Decoder, words: Mapping[str, str]) -> None:
    """Makes the modules compute as the precision map `words` says, in place. Stored weights do not change; an array in
    another dtype is cast when it multiplies.

    Raises ValueError, with the model unchanged, for a pattern or word that does not fit, and for a weight whose format
    is not the map's.
    """
    resolved_words = resolved(model, words)
    for component, _, module in components(model):
        word, weight = resolved_words.get(component.name), module.weight.get_value()
        stored_format = format_of(weight).name if isinstance(weight, Stored) else None
        if word is not None and stored_format != (word if word in FORMATS else None):
            raise ValueError(
                f"precision: {component.name} is to be in {word}, and the model has it in "
                f"{stored_format or weight.dtype.name}: load it with the same map (from_pretrained has the argument "
                "precision), or change the map"
            )
    set_compute(model, resolved_words)


def of_tensors(model: Decoder, words: Mapping[str, str], paths: Mapping[str, tuple]) -> dict[str, str]:
    """{tensor's name: dtype or format} of the tensors that a precision map concerns.

    model: the one whose tensors `paths` names.
    words: from `resolved`. A dtype is for all tensors of the module, a format for its weight alone.
    paths: {tensor's name: its path of attributes and indices in `model`, whose arrays may be abstract}.
    """
    word_of_path = {path: words[component.name] for component, path, _ in components(model) if component.name in words}
    tensor_words = {
        name: (word_of_path[path[:-1]], path[-1]) for name, path in paths.items() if path[:-1] in word_of_path
    }
    return {name: word for name, (word, last) in tensor_words.items() if word in DTYPES or last == "weight"}


def stored_as(model: Decoder, words: Mapping[str, str], default_format: str | None = None) -> Decoder:
    """A new model whose modules are stored and computed as a precision map says. Quantised weights stay as they are. If
    any module gets a format, all tensors are frozen and `qat` is None.

      words: {pattern over names: dtype or format}; the first pattern that matches decides.
      default_format: the format of linears and experts that no pattern matches.

    Raises ValueError for a pattern or word that does not fit, or a model with adapters.
    """
    if has_adapter(model):
        raise ValueError("precision: this model has adapters: store the base as you want it, then add them")
    resolved_words = resolved(model, words, default_format)
    packed = any(word in FORMATS for word in resolved_words.values())
    model = freeze(model) if packed else copy_structure(model)
    for component, _, module in components(model):
        word = resolved_words.get(component.name)
        if word in FORMATS:
            name, weight = "weight", module.weight.get_value()
            if not isinstance(weight, Stored):
                if initial.makes_shapes():
                    encoded = jax.tree.map(lambda shape: shape, _encoded_shapes(weight.shape, weight.dtype, word))
                else:
                    encoded = _encode(word)(weight)
                setattr(module, name, module.weight.replace(encoded))
        elif word is not None:
            for name in ("weight", "bias"):
                variable = getattr(module, name, None)
                if variable is not None and not isinstance(variable.get_value(), Stored):
                    setattr(module, name, variable.replace(initial.cast(variable.get_value(), DTYPES[word])))
    set_compute(model, resolved_words)
    if packed:
        model.qat = None  # its weights are no longer rounded to that grid
    return model


def _encode(word: str) -> Callable[[jax.Array], Stored]:
    return (kept_layout(word) or FORMATS[word]).encode


@functools.cache
def _encoded_shapes(shape: tuple[int, ...], dtype: jnp.dtype, word: str) -> Stored:
    return jax.eval_shape(_encode(word), jax.ShapeDtypeStruct(shape, dtype))


def common_format(model: Decoder) -> str | None:
    """The format of most quantised modules, such as "nf4", the first by name of equally frequent ones; None if no
    weight is quantised. All experts of a layer count as one module for each matrix.
    """
    return _usual(word for _, word in _words(model))


def _usual(words: Iterable[str]) -> str | None:
    names = Counter(word for word in words if word in FORMATS)
    return min(names, key=lambda name: (-names[name], name), default=None)


def _words(model: Decoder) -> list[tuple[Component, str]]:
    """Each module's with the format of its quantised weight, or else the word of the dtype in which it computes."""
    words = []
    for component, _, module in components(model):
        weight = module.weight.get_value()
        plain = WORDS[module.compute or jnp.dtype(model.dtype).name]
        words.append((component, format_of(weight).name if isinstance(weight, Stored) else plain))
    return words


def followed(model: Decoder, plain: bool = True) -> dict[str, str]:
    """The precision map that `model` follows, {whole module name: word}, without what common_format(model), the most
    frequent format, and the model's dtype already say.

      plain: False leaves out linears and experts in the model's dtype beside quantised ones, for models whose files
        store them so.
    """
    return format_and_followed(model, plain)[1]


def format_and_followed(model: Decoder, plain: bool = True) -> tuple[str | None, dict[str, str]]:
    """(common_format, followed), from one walk through the model."""
    model_word, words, exceptions = WORDS[jnp.dtype(model.dtype).name], _words(model), {}
    usual = _usual(word for _, word in words)
    for component, word in words:
        expected = usual if usual is not None and component.quantizable else model_word
        if word != expected and (plain or word != model_word):
            exceptions[component.name] = word
    return usual, exceptions
