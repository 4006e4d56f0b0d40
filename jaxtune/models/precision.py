"""The precision of a model's modules. A precision map, such as {"lm_head": "fp32", "router": "fp32", "layers.0.*":
"bf16",
"*.down_proj": "nf4"}, has a word for each pattern of module names: a dtype (`DTYPES`), in which the weight is stored
and
multiplied, or a format, in which it is stored; its product is then in the model's dtype.
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
        their end
        after a dot ("layers.0.*", "*.down_proj", "down_proj").
        """
        if self.kind and pattern == self.kind:
            return True
        parts = (name.split(".") for name in (self.name, *self.aliases))
        ends = [".".join(each[start:]) for each in parts for start in range(len(each))]
        return any(map(re.compile(fnmatch.translate(pattern)).fullmatch, ends))


def check_words(key: str, words: Mapping[str, str]) -> None:
    """Raises ValueError, with `key` for the map's name, unless every value is the word of a dtype or format."""
    for pattern, word in words.items():
        if word not in DTYPES and word not in LOADED:
            known = ", ".join((*DTYPES, *LOADED))
            raise ValueError(f"{key}: {pattern!r}: {word!r}: is no precision; a module can have {known}")


def resolve(components: Sequence[Component], words: Mapping[str, str], rest: str | None = None) -> dict[str, str]:
    """Decides the precision of modules, {module's name: word}, without those that keep the model's dtype. The first
    pattern
    that matches a module decides. A pattern with a format skips modules that cannot be quantised; later ones can name
    them.

      rest: the format of quantizable modules that no pattern matches.

    Raises ValueError for an unknown word, a pattern that matches nothing new, or a format that fits none of its
    modules.
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
    """The end of the error for a pattern that matches nothing: the names in layers without number, other names, and
    kinds.
    """
    of_layers = [each.name.split(".", 3)[3] for each in components if each.name.startswith("model.layers.")]
    others = [
        name for each in components for name in (each.name, *each.aliases) if not name.startswith("model.layers.")
    ]
    kinds = [each.kind for each in components if each.kind]
    return (
        f"a pattern is a name or the end of one, with * for any part ('layers.0.*'); names in layers are "
        f"{', '.join(dict.fromkeys(of_layers))}, beside them {', '.join(dict.fromkeys((*others, *kinds)))}"
    )
