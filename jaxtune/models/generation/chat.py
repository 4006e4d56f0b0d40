"""A conversation with a model, in the chat template that it was trained with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.ends import end_token_ids
from jaxtune.models.generation.generate import generate
from jaxtune.models.lora import has_adapter, without_adapter

_UNFINISHED = "\ufffd"  # what a decoder gives for bytes of a character whose others are still to come


class Conversation:
    """Questions and answers, each seen by all that follow.

    Attributes:
      messages: [{"role", "content"}], as the chat template takes them.
      adapter: whether the model's adapter is used; it can be changed at any time.
    """

    def __init__(self, model: Decoder, tokenizer: Any, system: str | None = None, **settings: Any):
        """
        Args:
          tokenizer: with a chat template.
          system: the system message, if any.
          settings: of generate, such as max_new_tokens, temperature and top_p.
        Raises:
          ValueError: no tokenizer, or one without a chat template.
        """
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
        return self._with is not self._without

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages: list[dict[str, str]] = list(self._system)

    def ask(self, text: str, show: Callable[[str], None] = lambda piece: None) -> str:
        """The model's answer, which is kept with the question; nothing is kept where an error ends it.

        Args:
          show: called with each piece of the answer as soon as it is known; together they are the answer.
        Raises:
          ValueError: a conversation that is too long for the model, by its tokens.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        new: list[int] = []
        shown = ""

        def stream(_: int, tokens: list[int]) -> None:
            nonlocal shown
            new.extend(tokens)
            known = self._text(new)
            if not known.endswith(_UNFINISHED) and known.startswith(shown):
                show(known[len(shown) :])
                shown = known

        model = self._with if self.adapter else self._without
        [answer] = generate(
            model, [prompt], eos_token_ids=self._ends, streamer=stream, tokenizer=self._tokenizer, **self._settings
        )
        whole = self._text(answer)
        show(whole[len(shown) :])
        self.messages = [*messages, {"role": "assistant", "content": whole}]
        return whole

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
