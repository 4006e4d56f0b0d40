"""Where an answer ends, one definition for sampling, serving, evaluation and saving."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jaxtune.conversations.messages import template_for
from jaxtune.conversations.templates import TemplateError, render
from jaxtune.conversations.tokenizing import Tokenizer, end_ids

_WORD = "\ue000x\ue001"  # a text that no template writes


def turn_ends(tokenizer: Tokenizer) -> list[int]:
    """The special tokens with which the chat template ends an answer or a call of tools; [] if it refuses a short
    conversation.
    """
    ends = []
    for tools in (None, True):
        template = template_for(tokenizer.chat_template, tools)
        if template is not None:
            ends += [_answer_end(tokenizer, template), _call_end(tokenizer, template)]
    return sorted({end for end in ends if end is not None})


def answer_ends(tokenizer: Tokenizer, named: Iterable[int] = ()) -> list[int]:
    """The ids of the tokens that end an answer, ascending: of the model's files (`named`), EOS, and `turn_ends`."""
    if tokenizer is None:
        return sorted({int(token) for token in named})
    eos = getattr(tokenizer, "eos_token_id", None)
    return sorted({*map(int, named), *(() if eos is None else (int(eos),)), *turn_ends(tokenizer)})


def ends_in_words(tokenizer: Tokenizer, ends: Iterable[int]) -> str:
    """A line such as "an answer ends at <|im_end|>". ends: token ids."""
    names = ", ".join(str(tokenizer.convert_ids_to_tokens(int(token))) for token in ends)
    return f"an answer ends at {names}" if names else "no token ends an answer"


def _specials(tokenizer: Tokenizer) -> dict[str, int]:
    """{text: id} of the tokens that may end a turn."""
    return {str(tokenizer.convert_ids_to_tokens(token)): token for token in end_ids(tokenizer)}


def _answer_end(tokenizer: Tokenizer, template: str) -> int | None:
    """The first token after an answer's text that may end a turn."""
    conversation = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _WORD}]
    try:
        text, specials = render(tokenizer, template, conversation), _specials(tokenizer)
    except TemplateError:
        return None
    after = text.rpartition(_WORD)[2] if _WORD in text else ""
    first = re.search("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)", after)
    return None if first is None else specials[first[0]]


def _call_end(tokenizer: Tokenizer, template: str) -> int | None:
    """The token that ends a turn of calls, if the template writes it once, at the end of two calls."""
    functions = [{"name": _WORD, "arguments": {}}] * 2
    calls = [{"type": "function", "id": f"call0000{n}", "function": function} for n, function in enumerate(functions)]
    conversation = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        text, specials = render(tokenizer, template, conversation).rstrip(), _specials(tokenizer)
    except TemplateError:
        return None
    after = text.partition(_WORD)[2]
    last = next((special for special in sorted(specials, key=len, reverse=True) if after.endswith(special)), None)
    return None if last is None or after.count(last) > 1 else specials[last]
