"""The precision of a model's modules. A precision map, such as {"lm_head": "fp32", "router": "fp32", "layers.0.*":
"bf16", "*.down_proj": "nf4"}, has a word for each pattern of module names: a dtype (`DTYPES`), in which the weight is
stored and multiplied, or a format, in which it is stored; its product is then in the model's dtype.
"""

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
    """A module that a precision map can name."""

    name: str  # its name in checkpoints, such as "model.layers.0.mlp.down_proj"
    kind: str = ""  # "router" or "norms" for such a module, which this pattern selects; "" for others
    aliases: tuple[str, ...] = ()  # further names: "lm_head" of an embedding that is the head too
    # whether it can be stored in a format, as linears and experts of the layers and the projection of Gemma 4's
    # per-layer embeddings can (routers, norms, embeddings and head cannot)
    quantizable: bool = False

    def matches(self, pattern: str) -> bool:
        """Whether `pattern` is the module's kind or, with *, ? and [...] as for files, matches its name, an alias, or
        their end after a dot ("layers.0.*", "*.down_proj", "down_proj").
        """
        if self.kind and pattern == self.kind:
            return True
        split_names = (name.split(".") for name in (self.name, *self.aliases))
        ends = [".".join(words[start:]) for words in split_names for start in range(len(words))]
        return any(map(re.compile(fnmatch.translate(pattern)).fullmatch, ends))


def check_words(key: str, words: Mapping[str, str]) -> None:
    """Raises ValueError, with `key` for the map's name, unless every value is the word of a dtype or format."""
    for pattern, word in words.items():
        if word not in DTYPES and word not in LOADED:
            choices = ", ".join((*DTYPES, *LOADED))
            raise ValueError(f"{key}: {pattern!r}: {word!r}: is no precision; a module can have {choices}")


def resolve(
    components: Sequence[Component], words: Mapping[str, str], default_format: str | None = None
) -> dict[str, str]:
    """Decides the precision of modules, {module's name: word}, without those that keep the model's dtype. The first
    pattern that matches a module decides. A pattern with a format skips modules that cannot be quantised; later ones
    can name them.

      components: of the model, in order.
      words: {pattern over names: dtype or format}, in the order of precedence.
      default_format: the format of quantizable modules that no pattern matches; None: they keep the model's dtype.

    Raises ValueError for an unknown word, a pattern that matches nothing new, or a format that fits none of its
    modules.
    """
    check_words("precision", words)
    decided: dict[str, str] = {}
    for pattern, word in words.items():
        matched = [component for component in components if component.matches(pattern)]
        undecided = [component for component in matched if component.name not in decided]
        fitting = [component for component in undecided if word in DTYPES or component.quantizable]
        where = f"precision: {pattern!r} = {word!r}"
        if not matched:
            raise ValueError(f"{where}: matches no module of this model; {_pattern_help(components)}")
        if not undecided:
            raise ValueError(f"{where}: patterns before it match the same modules; put it before them, or remove it")
        if not fitting:
            raise ValueError(
                f"{where}: {undecided[0].name} cannot be stored in a format, as linears and experts within the layers "
                f"can; take one of {', '.join(DTYPES)}"
            )
        decided |= {component.name: word for component in fitting}
    if default_format is not None:
        decided |= {
            component.name: default_format
            for component in components
            if component.quantizable and component.name not in decided
        }
    return decided


def _pattern_help(components: Sequence[Component]) -> str:
    """The end of the error for a pattern that matches nothing: names and kinds that there are."""
    of_layers = [
        component.name.split(".", 3)[3] for component in components if component.name.startswith("model.layers.")
    ]
    other_names = [
        name
        for component in components
        for name in (component.name, *component.aliases)
        if not name.startswith("model.layers.")
    ]
    kinds = [component.kind for component in components if component.kind]
    return (
        f"a pattern is a name or the end of one, with * for any part ('layers.0.*'); names in layers are "
        f"{', '.join(dict.fromkeys(of_layers))}, beside them {', '.join(dict.fromkeys((*other_names, *kinds)))}"
    )
