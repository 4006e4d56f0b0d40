"""The tokens of a prompt, the same where a model is asked and where its rows are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxtune.conversations.messages import Message, pictures_of, template_for
from jaxtune.conversations.picture_processors import PictureProcessor, PlacedPicture, placed_pictures, spaced
from jaxtune.conversations.templates import (
    Arguments,
    TemplateError,
    guarded,
    render,
    special_pattern,
    unguarded,
)
from jaxtune.conversations.tokenizing import Tokenizer, tokenize, tokenize_pieces, with_beginning


def prompt_tokens(
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message],
    *,
    template: str | None = None,
    tools: Sequence[Message] | None = None,
    arguments: Arguments | None = None,
    begins_answer: bool = True,
    continues: bool = False,
    max_tokens: int | None = None,
    processor: PictureProcessor | None = None,
) -> list[int]:
    """The token ids with which a model is asked: BOS once if the tokenizer adds one, no EOS. Special tokens in tool
    results stay text.

    Raises TemplateError if there is no template, it refuses the messages, or the text is not valid Unicode.

      tokenizer: of the model.
      prompt: a text, taken as it is, or messages.
      template: Jinja text; None: the tokenizer's own, of several the one for `tools`.
      tools: JSON schemas of the tools that the template names; None: none.
      arguments: further variables, such as {"enable_thinking": False}.
      begins_answer: end with the beginning of an answer.
      continues: the last message is continued; no answer begins.
      max_tokens: of a longer prompt this many of its first tokens are made, or some more.
      processor: of pictures, each of which has one token here; None: there are none.
    """
    text, cuts = (prompt, []) if isinstance(prompt, str) else ("", [])
    if not isinstance(prompt, str):
        template = template or template_for(tokenizer.chat_template, tools)
        if not template:
            raise TemplateError("the tokenizer has no chat template")
        from_tools = any(message.get("role") == "tool" for message in prompt)
        messages, mark = guarded(prompt, special_pattern(tokenizer) if from_tools else None)
        text = render(
            tokenizer,
            template,
            messages,
            tools,
            add_generation_prompt=begins_answer and not continues,
            continue_final=continues,
            arguments=arguments,
        )
        text, cuts = unguarded(text, mark)
        if processor is not None and any(map(pictures_of, messages)):
            text, shifted = spaced(text, str(tokenizer.convert_ids_to_tokens(processor.written)), processor)
            cuts = [shifted(cut) for cut in cuts]
    return with_beginning(tokenizer, text_tokens(tokenizer, text, cuts, max_tokens))


def picture_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    processor: PictureProcessor | None,
    *,
    template: str | None = None,
    tools: Sequence[Message] | None = None,
    arguments: Arguments | None = None,
    begins_answer: bool = True,
    continues: bool = False,
    max_tokens: int | None = None,
) -> tuple[np.ndarray, tuple[PlacedPicture, ...]]:
    """(Token ids int32[n], pictures) with which a model is asked: as `prompt_tokens`, with all tokens of pictures,
    which are not read if the text alone has `max_tokens`. Raises also PictureError.

      processor: None if the model reads no pictures, and the messages have none.
    """
    ids = prompt_tokens(
        tokenizer,
        messages,
        template=template,
        tools=tools,
        arguments=arguments,
        begins_answer=begins_answer,
        continues=continues,
        max_tokens=max_tokens,
        processor=processor,
    )
    tokens = np.array(ids, np.int32)
    if processor is None or (max_tokens is not None and len(ids) >= max_tokens):
        return tokens, ()
    tokens, _, pictures = placed_pictures(messages, tokens, processor)
    return tokens, pictures


def text_tokens(tokenizer: Tokenizer, text: str, cuts: Sequence[int] = (), max_tokens: int | None = None) -> list[int]:
    """The token ids of a text, without special tokens around it. Raises TemplateError for surrogates.

    tokenizer: of the model.
    text: may contain special tokens, which are read as such.
    cuts: ascending character indices that no token crosses; only fast tokenizers follow them.
    max_tokens: as for `prompt_tokens`; only fast tokenizers follow it.
    """
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise TemplateError("not valid Unicode: half of a surrogate pair")
    if not getattr(tokenizer, "is_fast", False):
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    tokens = tokenize_pieces(tokenizer, text, cuts, max_tokens) if cuts else tokenize(tokenizer, [text], max_tokens)[0]
    return tokens.ids.tolist()
