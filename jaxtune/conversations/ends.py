"""Where an answer ends, one definition for sampling, serving, evaluation and saving."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from jaxtune.conversations.messages import Message, template_for
from jaxtune.conversations.templates import TemplateError, render
from jaxtune.conversations.tokenizing import Tokenizer, end_ids

_WORD = "\ue000x\ue001"  # a text that no template writes
_ASKED: Message = {"role": "user", "content": "Hello"}


class RoleEnds(NamedTuple):
    """Texts of the tokens that begin the turn behind an answer, and behind calls, where turns have no end; "": none."""

    answer: str = ""
    call: str = ""


def role_ends(tokenizer: Tokenizer, template: str) -> RoleEnds:
    """The tokens of the next turn's role at which a model stops whose template ends no turn, as GLM's."""
    if _answer_end(tokenizer, template) is not None:
        return RoleEnds()
    answer: Message = {"role": "assistant", "content": _WORD}
    call = {"type": "function", "id": "call00000", "function": {"name": "x", "arguments": {}}}
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "name": "x", "tool_call_id": "call00000", "content": "Hello"}
    by_user = _opening(tokenizer, template, [_ASKED, answer], _ASKED)
    if by_user == _opening(tokenizer, template, [_ASKED], answer):  # it begins any turn
        return RoleEnds()
    return RoleEnds(by_user, by_user and (_opening(tokenizer, template, [_ASKED, calls], result) or by_user))


def turn_ends(tokenizer: Tokenizer) -> list[int]:
    """The special tokens with which the chat template ends an answer or a call of tools, or begins the turn behind
    them (`role_ends`); [] if it refuses a short conversation.
    """
    ends, specials = [], _specials(tokenizer)
    for tools in (None, True):
        template = template_for(tokenizer.chat_template, tools)
        if template is not None:
            ends += [_answer_end(tokenizer, template), _call_end(tokenizer, template)]
            ends += [specials[text] for text in role_ends(tokenizer, template) if text]
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
    conversation = [_ASKED, {"role": "assistant", "content": _WORD}]
    try:
        text, specials = render(tokenizer, template, conversation), _specials(tokenizer)
    except TemplateError:
        return None
    after = text.rpartition(_WORD)[2] if _WORD in text else ""
    first = _any_of(specials).search(after)
    return None if first is None else specials[first[0]]


def _opening(tokenizer: Tokenizer, template: str, turns: list[Message], following: Message) -> str:
    """The special token with which a turn behind others begins; "" if none is first, or the others change."""
    try:
        before, text = render(tokenizer, template, turns), render(tokenizer, template, [*turns, following])
    except TemplateError:
        return ""
    first = _any_of(_specials(tokenizer)).match(text.removeprefix(before).lstrip()) if text.startswith(before) else None
    return "" if first is None else first[0]


def _any_of(specials: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")


def _call_end(tokenizer: Tokenizer, template: str) -> int | None:
    """The token that ends a turn of calls, if the template writes it once, at the end of two calls."""
    functions = [{"name": _WORD, "arguments": {}}] * 2
    calls = [{"type": "function", "id": f"call0000{n}", "function": function} for n, function in enumerate(functions)]
    conversation = [_ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]
    try:
        text, specials = render(tokenizer, template, conversation).rstrip(), _specials(tokenizer)
    except TemplateError:
        return None
    after = text.partition(_WORD)[2]
    last = next((special for special in sorted(specials, key=len, reverse=True) if after.endswith(special)), None)
    return None if last is None or after.count(last) > 1 else specials[last]
