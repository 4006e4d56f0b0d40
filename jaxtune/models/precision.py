"""The precision of a model's modules: in which dtype or format each one's weight is stored, and in which dtype it is
multiplied.

A precision map, such as {"lm_head": "fp32", "router": "fp32", "layers.0.*": "bf16", "*.down_proj": "nf4"}, has a
pattern of module names for each word. A word is a dtype (`DTYPES`), in which the module's weight is stored and its
product computed, or a format (such as nf4), in which the weight is stored; its product is then computed in the model's
dtype. `resolve` decides the word of every module, which it gets as a Component; loading, the layers, the planner and
the records all follow its answer (models/components.py applies it to a model). `check_words` checks the words alone."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtune.pallas.format_names import LOADED

# {word of a precision map: the dtype's name in JAX}, and the inverse
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
WORDS = {dtype: word for word, dtype in DTYPES.items()}
# Names by which a pattern selects all modules of a kind, whatever a family's checkpoints call them.
ROUTER, NORMS = "router", "norms"


@dataclass(frozen=True)
class Component:
    """A module that a precision map can name, as patterns are compared with it. models/components.py makes one for each
    such module of a model, for `resolve`, and for train/sensitivity.py, which tries formats."""

    name: str  # its name in checkpoints, such as "model.layers.0.mlp.down_proj"
    kind: str = ""  # "router" or "norms" for such a module, which this pattern selects; "" for others
    aliases: tuple[str, ...] = ()  # further names: "lm_head" of an embedding that is the head too
    # whether it can be stored in a format, as linears and experts of the layers and the projection of Gemma 4's
    # per-layer embeddings can (routers, norms, embeddings and head cannot)
    quantizable: bool = False

    def matches(self, pattern: str) -> bool:
        """Whether `pattern`, a key of a precision map, selects this module: it is the module's kind; or, with *, ? and
        [...] as in names of files, its whole name or what follows a dot in it ("layers.0.*", "*.down_proj",
        "down_proj"). An alias counts as a name. `resolve` asks it, and train/sensitivity.py, to find short patterns."""
        if self.kind and pattern == self.kind:
            return True
        parts = (name.split(".") for name in (self.name, *self.aliases))
        ends = [".".join(each[start:]) for each in parts for start in range(len(each))]
        return any(map(re.compile(fnmatch.translate(pattern)).fullmatch, ends))


def check_words(key: str, words: Mapping[str, str]) -> None:
    """Raises ValueError unless every value of `words`, a precision map {pattern of module names: word}, is the word of
    a dtype (DTYPES, such as "bf16") or of a format, such as "nf4"; patterns are not checked. `resolve` and the reading
    of adapters' records call it. key: what the map is called in the error, such as "precision"."""
    for pattern, word in words.items():
        if word not in DTYPES and word not in LOADED:
            known = ", ".join((*DTYPES, *LOADED))
            raise ValueError(f"{key}: {pattern!r}: {word!r}: is no precision; a module can have {known}")


def resolve(components: Sequence[Component], words: Mapping[str, str], rest: str | None = None) -> dict[str, str]:
    """Decides the precision of modules: {module's name: word}, for the modules that `words` names or that `rest`
    quantises; the others are stored and computed in the model's dtype. models/components.py calls it for a model.

    The first pattern that matches a module decides. Of the modules that a pattern with a format matches, those that
    cannot be quantised (Component.quantizable) are left out, and a later pattern can name them.

    Args:
      components: the model's modules that have a weight.
      words: the precision map, {pattern: word}, whose order counts.
      rest: the format of the modules that no pattern matches and that can be quantised (model.load_in); None: none.
    Raises:
      ValueError: an unknown word; a pattern that matches no module, or only modules that earlier patterns decided; a
        pattern with a format if none of the modules that earlier patterns left to it can be quantised.
    """
    check_words("precision", words)
    found: dict[str, str] = {}
    for pattern, word in words.items():
        matched = [each for each in components if each.matches(pattern)]
        left = [each for each in matched if each.name not in found]
        fitting = [each for each in left if word in DTYPES or each.quantizable]
        where = f"precision: {pattern!r} = {word!r}"
        if not matched:
            raise ValueError(f"{where}: matches no module of this model; {_known(components)}")
        if not left:
            raise ValueError(f"{where}: patterns before it match the same modules; put it before them, or remove it")
        if not fitting:
            raise ValueError(
                f"{where}: {left[0].name} cannot be stored in a format, as linears and experts within the layers can; "
                f"take one of {', '.join(DTYPES)}"
            )
        found |= {each.name: word for each in fitting}
    if rest is not None:
        found |= {each.name: rest for each in components if each.quantizable and each.name not in found}
    return found


def _known(components: Sequence[Component]) -> str:
    """The end of `resolve`'s error for a pattern that matches nothing: a clause that says what a pattern is, and names
    what a pattern can select among `components`: the names in layers without the layer's number, each once, then the
    other names with their aliases, and the kinds ("router", "norms")."""
    of_layers = [each.name.split(".", 3)[3] for each in components if each.name.startswith("model.layers.")]
    others = [
        name for each in components for name in (each.name, *each.aliases) if not name.startswith("model.layers.")
    ]
    kinds = [each.kind for each in components if each.kind]
    return (
        f"a pattern is a name or the end of one, with * for any part ('layers.0.*'); names in layers are "
        f"{', '.join(dict.fromkeys(of_layers))}, beside them {', '.join(dict.fromkeys((*others, *kinds)))}"
    )
