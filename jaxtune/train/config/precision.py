"""In which dtypes a run computes and stores: what the key `precision` comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtune.models.precision import DTYPES

REST = "*"  # the pattern in `precision` that says in which dtype the model computes


@dataclass(frozen=True)
class Precision:
    computes_in: str
    """The word of the dtype in which the model computes: "bf16", "fp32" or "fp16"."""
    components: Mapping[str, str] = field(default_factory=dict, hash=False)
    """{pattern of modules' names: dtype or format}; {} if all compute in one dtype."""

    @property
    def dtype(self) -> str:
        """Such as "bfloat16"."""
        return DTYPES[self.computes_in]

    @classmethod
    def of(cls, words: str | Mapping[str, str]) -> Precision:
        if isinstance(words, str):
            return cls(words)
        return cls(words[REST], {pattern: word for pattern, word in words.items() if pattern != REST})
