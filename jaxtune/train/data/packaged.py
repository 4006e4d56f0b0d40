"""Chat templates that the package brings, for tokenizers of base models, which have none: chat_templates/NAME.jinja.

Each writes what the template of its family's chat models writes, with `{% generation %}` around what is trained: a
response and the token that ends its turn. A BOS is written where the family's own template writes one; in training no
row has two (RowEncoder). Differences: no date is looked up (the one of Llama's first template with a date stands, and
for gpt-oss the day of its release), phi-4 has no system message of its own, and gpt-oss no tools. Mistral's is that of
its tokenizer of version 3 and later ones.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxtune.train.data.markers import special_ids

_FOLDER = Path(__file__).with_name("chat_templates")


@dataclasses.dataclass(frozen=True)
class Packaged:
    """marks: special tokens that the template writes and a tokenizer must have; the last one ends a turn. None: any
    tokenizer with an EOS will do, which ends a turn."""

    name: str
    marks: tuple[str, ...] | None

    @property
    def text(self) -> str:
        """Jinja."""
        return (_FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8").removesuffix("\n")


_LLAMA_MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_CHATML_MARKS = ("<|im_start|>", "<|im_end|>")
_GEMMA_MARKS = ("<start_of_turn>", "<end_of_turn>")
_MARKS = {
    "chatml": ("<|im_end|>",),
    "alpaca": None,
    "llama-3": _LLAMA_MARKS,
    "llama-3.1": _LLAMA_MARKS,
    "qwen-2.5": _CHATML_MARKS,
    "qwen-3": _CHATML_MARKS,
    "qwen-3-instruct": _CHATML_MARKS,
    "gemma": _GEMMA_MARKS,
    "gemma-3": _GEMMA_MARKS,
    "phi-3": ("<|user|>", "<|assistant|>", "<|end|>"),
    "phi-4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "mistral": ("[INST]", "[/INST]", "</s>"),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
}
PACKAGED = {name: Packaged(name, marks) for name, marks in _MARKS.items()}


def missing_marks(tokenizer: Any, name: str) -> list[str]:
    """Marks of a packaged template that are no special tokens of this tokenizer; its missing EOS as "EOS"."""
    special = set(tokenizer.convert_ids_to_tokens(list(special_ids(tokenizer))))
    marks = PACKAGED[name].marks
    if marks is None:
        return [] if tokenizer.eos_token in special else [tokenizer.eos_token or "EOS"]
    return [mark for mark in marks if mark not in special]


def packaged_that_fit(tokenizer: Any) -> list[str]:
    """The names of the packaged templates all of whose marks are special tokens of this tokenizer."""
    return [name for name in PACKAGED if not missing_marks(tokenizer, name)]
