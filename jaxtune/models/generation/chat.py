"""A conversation with a model in its chat template, which keeps the messages and answers one question at a time. The
command `jaxtune chat` is built on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.ends import end_token_ids
from jaxtune.models.generation.generate import generate
from jaxtune.models.generation.requests import text_of
from jaxtune.models.lora import has_adapter, without_adapter

_INCOMPLETE = "\ufffd"  # the decoder's text for the first bytes of a character whose other bytes are missing


class Conversation:
    """A conversation in which the model sees all earlier questions and answers, for `jaxtune chat`. An answer ends at
    one of the model's end tokens or the tokenizer's EOS, or with max_new_tokens tokens (by default generate's number).

    Args:
      model: with or without an adapter.
      tokenizer: with a chat template.
      system: the system message; None: there is none.
      settings: arguments of `generate` (generate.py) for every answer by name, such as max_new_tokens, temperature and
        top_p; not eos_token_ids, streamer and tokenizer, which are set here.

    Attributes:
      messages: [{"role", "content"}], as the chat template takes them.
      adapter: True: the next answer is the adapted model's; False: the base model's. It can be set at any time, and is
        False at first only for a model without an adapter.

    Raises:
      ValueError: no tokenizer, or one without a chat template.
    """

    def __init__(self, model: Decoder, tokenizer: Any, system: str | None = None, **settings: Any):
        if tokenizer is None or not tokenizer.chat_template:
            lacks = "tokenizer: put its files into the model's folder" if tokenizer is None else "chat template"
            raise ValueError(f"chat: the model has no {lacks}")
        self._with, self._without = model, without_adapter(model) if has_adapter(model) else model
        self._tokenizer, self._settings = tokenizer, settings
        self._system = [] if system is None else [{"role": "system", "content": system}]
        ends = set(end_token_ids(model))
        if tokenizer.eos_token_id is not None:
            ends.add(int(tokenizer.eos_token_id))
        self._ends = sorted(ends)
        self.adapter = has_adapter(model)
        self.reset()

    @property
    def has_adapter(self) -> bool:
        """Whether the model has an adapter, so that the conversation can be continued with it and without it; if it
        has, the command chat offers /adapter."""
        return self._with is not self._without

    def reset(self) -> None:
        """Removes all messages but the system message, so that a new conversation begins (/reset of the command chat);
        `adapter` stays as it is."""
        self.messages: list[dict[str, str]] = list(self._system)

    def ask(self, text: str, show: Callable[[str], None] = lambda piece: None) -> str:
        """The model's answer to a question, as text; both are added to the messages, unless an error ends the answer.

        Args:
          text: the question, as the user's next message.
          show: called with each piece of the answer, in whole characters, as soon as it is known; the pieces add up to
            the answer, and some may be empty. By default nothing is called.

        Raises:
          ValueError: the chat template refuses the messages; the conversation and max_new_tokens are more tokens than
            the model has positions; a setting that `generate` refuses.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template raises what it likes, such as of a system message that it does not know
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        new: list[int] = []
        shown = ""

        def stream(_: int, tokens: list[int]) -> None:
            """The streamer of generate: shows what new tokens add to the text, in whole characters."""
            nonlocal shown
            new.extend(tokens)
            known = text_of(self._tokenizer, new)
            if not known.endswith(_INCOMPLETE) and known.startswith(shown):
                show(known[len(shown) :])
                shown = known

        model = self._with if self.adapter else self._without
        [answer] = generate(
            model, [prompt], eos_token_ids=self._ends, streamer=stream, tokenizer=self._tokenizer, **self._settings
        )
        whole = text_of(self._tokenizer, answer)
        show(whole[len(shown) :])
        self.messages = [*messages, {"role": "assistant", "content": whole}]
        return whole
