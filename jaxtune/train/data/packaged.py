"""Packaged chat templates, chat_templates/NAME.jinja, for the tokenizers of base models, which often have none of their
own.

Each template writes the same text as the template of its family's chat models (alpaca and chatml: that format), with
`{% generation %}` around what is trained on: a response and the token that ends its turn. It writes a BOS if the
family's own template does; training rows never have two (`RowEncoder`). There are these differences: the templates do
not look up the current date (Llama's have the date of its first template with one, gpt-oss the day of its release),
phi-4 has no default system message, and gpt-oss writes no tools. Mistral's template is that of its tokenizers from
version 3 on. `PACKAGED` has the templates by name. `missing_marks` returns the special tokens that a tokenizer lacks
for one of them, and `packaged_that_fit` the names of those that it can use.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.train.data.markers import special_ids

_FOLDER = Path(__file__).with_name("chat_templates")


@dataclasses.dataclass(frozen=True)
class Packaged:
    """One packaged chat template, an entry of `PACKAGED`. `templates.resolve_template` takes its `text` if
    data.template is its name, and `missing_marks` compares its `marks` with the tokenizer."""

    name: str
    """The name by which data.template selects it, and of its file."""
    marks: tuple[str, ...] | None
    """Of the tokens that the template writes, those that must be special tokens of the tokenizer; the last one ends a
    turn. None if the template needs only an EOS, which ends a turn."""

    @property
    def text(self) -> str:
        """The template's Jinja text, which `templates.resolve_template` returns: its file without the line break at the
        end."""
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
    """Returns those of the marks (`Packaged.marks`, the special tokens that the template writes) of the packaged
    template `name` that are not special tokens of this tokenizer, a Hugging Face one: empty if the template can be
    used. For a template that needs only an EOS, it is the tokenizer's EOS text if that is no special token, or "EOS" if
    the tokenizer has none. `templates.resolve_template` refuses a template with missing marks, because the model would
    not learn where a turn ends. jaxtune.compat calls it before it gives a script's tokenizer such a template. Raises
    KeyError if `name` is not in `PACKAGED`."""
    special = set(tokenizer.convert_ids_to_tokens(list(special_ids(tokenizer))))
    marks = PACKAGED[name].marks
    if marks is None:
        return [] if tokenizer.eos_token in special else [tokenizer.eos_token or "EOS"]
    return [mark for mark in marks if mark not in special]


def packaged_that_fit(tokenizer: Tokenizer) -> list[str]:
    """The names of the packaged templates that `tokenizer`, a Hugging Face one, can use: those without `missing_marks`.
    Error messages about a template propose them; no template is chosen by it."""
    return [name for name in PACKAGED if not missing_marks(tokenizer, name)]
