"""Chat templates for tokenizers of base models, which often have none: chat_templates/NAME.jinja.

Each writes the text of its family's chat template, BOS included, with `{% generation %}` around responses and the
tokens that end their turns. Differences: none reads the date (Llama's have a fixed one), phi-4 has no default system
message, and gpt-oss writes no tools.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.train.data.markers import special_ids

_FOLDER = Path(__file__).with_name("chat_templates")


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A packaged chat template."""

    name: str
    """The value of data.template, and its file's name."""
    marks: tuple[str, ...] | None
    """Tokens that must be special in the tokenizer; the last one ends a turn. None: only EOS is needed."""

    @property
    def text(self) -> str:
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


def missing_marks(tokenizer: Tokenizer, name: str) -> list[str]:
    """The marks of the packaged template `name` that are not special tokens of the tokenizer; without them a model
    would not learn where a turn ends. Empty if the template can be used. Raises KeyError for an unknown name.
    """
    special = set(tokenizer.convert_ids_to_tokens(list(special_ids(tokenizer))))
    marks = PACKAGED[name].marks
    if marks is None:
        return [] if tokenizer.eos_token in special else [tokenizer.eos_token or "EOS"]
    return [mark for mark in marks if mark not in special]


def packaged_that_fit(tokenizer: Tokenizer) -> list[str]:
    return [name for name in PACKAGED if not missing_marks(tokenizer, name)]
