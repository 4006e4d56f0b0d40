"""Labels for rows that are tokens already, as scripts written for other trainers have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtune.train.data.formats import RowError, normalize
from jaxtune.train.data.markers import Markers
from jaxtune.train.data.templates import RowEncoder

IGNORE = -100  # the label of a token that is not trained on, as in PyTorch's cross entropy


def derive_markers(tokenizer: Any, template: str | None = None) -> tuple[str, str]:
    """(instruction_part, response_part) of a chat template: what it writes before a user's message after an
    earlier response, and before a response. Raises `ValueError` where the template does not show them."""
    encoder = RowEncoder(tokenizer, template=template)
    user, answer, again = ("\ue000u\ue001", "\ue000a\ue001", "\ue000v\ue001")
    turns = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": again},
    ]
    try:
        text = encoder._render(turns, None, add_generation_prompt=True)
    except RowError as error:
        raise ValueError(f"markers cannot be derived: {error}") from None
    between = []
    for low, high in ((user, answer), (answer, again)):
        if low not in text or high not in text:
            raise ValueError("markers cannot be derived: the template changes the messages; give both markers")
        between.append(text[text.index(low) + len(low) : text.index(high)])
    special = [tokenizer.convert_ids_to_tokens(int(index)) for index in encoder.end_ids]
    response, instruction = (_without_turn_end(gap, special) for gap in between)
    if instruction == between[1]:
        raise ValueError("markers cannot be derived: no special token of this tokenizer ends a response; give both")
    if not response.strip() or not instruction.strip():
        raise ValueError(
            f"markers cannot be derived from this template ({instruction!r}, {response!r}); "
            "set data.instruction_part and data.response_part"
        )
    return instruction, response


def _without_turn_end(gap: str, special: list[str]) -> str:
    """What opens the next turn: the gap without the special token that ends the last one, if more follows."""
    for token in sorted(special, key=len, reverse=True):
        rest = gap.removeprefix(token)
        if rest != gap and rest.strip():
            return rest.lstrip()
    return gap


def mask_labels(
    tokens: Sequence[int] | np.ndarray,
    tokenizer: Any,
    *,
    messages: list[dict[str, Any]] | None = None,
    template: str | None = None,
    instruction_part: str | None = None,
    response_part: str | None = None,
    last_response_only: bool = False,
) -> np.ndarray:
    """Labels that train on responses only: int32[n], the token where it is trained on, -100 elsewhere.

    Args:
        tokens: int[n], one row.
        tokenizer: the fast Hugging Face tokenizer that made them.
        messages: the conversation of the row (role, content). Responses are then found by the structure of the
            template, which must give the same tokens.
        template: see `resolve_template`; None is the tokenizer's own.
        instruction_part, response_part: marker strings, both or neither; used where `messages` are not given.
            Without both, they are derived from the template.
        last_response_only: train the last response alone.

    A row without any response gets labels of -100 only.

    Raises:
        ValueError: one marker without the other, an empty or unstable marker, messages that do not give these
            tokens, a template whose structure does not show the responses.
    """
    tokens = np.asarray(tokens, np.int32)
    if tokens.ndim != 1:
        raise ValueError(f"tokens must be one row of ids [n], got the shape {list(tokens.shape)}")
    if messages is not None:
        if instruction_part is not None or response_part is not None:
            raise ValueError("give messages or marker strings, not both")
        encoder = RowEncoder(tokenizer, template=template, last_response_only=last_response_only)
        encoder._prompts_alone = False  # the tokens are given: a token that is half prompt is not trained on
        encoded = encoder.encode([normalize({"messages": messages}, "messages")])[0]
        if isinstance(encoded, RowError):
            raise encoded
        if not np.array_equal(encoder._one_bos(tokens), encoded.tokens):
            raise ValueError("tokens are not what the template makes of messages; tokenise them with the same template")
        mask = encoded.mask
        if len(tokens) < len(mask):  # the caller's tokens lack the BOS
            mask = mask[1:]
        elif len(tokens) > len(mask):  # or double it
            mask = np.concatenate([np.zeros(len(tokens) - len(mask), bool), mask])
    else:
        if instruction_part is None and response_part is None:
            instruction_part, response_part = derive_markers(tokenizer, template)
        spans = Markers(tokenizer, instruction_part, response_part).spans(tokens)
        mask = np.zeros(len(tokens), bool)
        for first, last in spans[-1 if last_response_only else 0 :]:
            mask[first:last] = True
    return np.where(mask, tokens, np.int32(IGNORE)).astype(np.int32)
