"""A conversation with a model in its chat template."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtune.conversations.answers import AnswerReader, Pieces
from jaxtune.conversations.messages import read_messages, with_pictures
from jaxtune.conversations.picture_processors import PictureProcessor, picture_arrays
from jaxtune.conversations.pictures import Picture
from jaxtune.conversations.prompts import picture_prompt
from jaxtune.conversations.templates import TemplateError
from jaxtune.conversations.texts import Text
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import ends_of
from jaxtune.models.generation.generate import generate
from jaxtune.models.generation.requests import PromptPictures
from jaxtune.models.lora import has_adapter, without_adapter


class Conversation:
    """A conversation in which the model sees all earlier questions and answers. Needs a chat template.

    Args:
      template_arguments: variables of the template, such as {"enable_thinking": False}.
      processor: of pictures, for a model with its tower; None: text alone.
      settings: of `generate`; not eos_token_ids, pictures, streamer and tokenizer.

    Attributes:
      messages: for the chat template, thoughts as `reasoning_content`.
      adapter: whether the next answer uses the model's adapter; may be set at any time.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        system: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        processor: PictureProcessor | None = None,
        **settings: Any,
    ):
        if tokenizer is None or not tokenizer.chat_template:
            lacks = "tokenizer: put its files into the model's folder" if tokenizer is None else "chat template"
            raise ValueError(f"chat: the model has no {lacks}")
        self._with, self._without = model, without_adapter(model) if has_adapter(model) else model
        self._tokenizer, self._processor, self._settings = tokenizer, processor, settings
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._arguments, self._ends = template_arguments, ends_of(model, tokenizer)
        self._reader = AnswerReader.of(tokenizer)
        self.adapter = has_adapter(model)
        self.reset()

    @property
    def has_adapter(self) -> bool:
        """Whether `adapter` can be switched."""
        return self._with is not self._without

    def reset(self) -> None:
        """Removes all messages but the system message; `adapter` stays."""
        self.messages: list[dict[str, Any]] = list(self._system)

    def ask(self, text: str, show: Callable[[str], None] = lambda piece: None, pictures: Sequence[Picture] = ()) -> str:
        """The model's answer, without thoughts. Question and answer become messages unless an error ends the answer.
        Raises ValueError for messages that the template refuses, too few positions, and as `generate` does.

        Args:
          show: gets each piece of the thoughts and, after an empty line, the answer, in whole characters.
          pictures: of the question, for its tags <image>, or before its text without such tags.
        """
        question = with_pictures(read_messages({"role": "user", "content": text}), pictures)
        messages = read_messages([*self.messages, *question])
        try:
            prompt, placed = picture_prompt(self._tokenizer, messages, self._processor, arguments=self._arguments)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error.__cause__ or error}") from error
        opening, last = self._reader.opening(prompt.tolist()), ""
        decode = functools.partial(self._reader.text, calls=False)
        shown = Text(decode, (), self._reader.stream(None, opening))

        def tell(pieces: Pieces) -> None:
            nonlocal last
            for kind, piece in pieces:
                show(f"\n\n{piece}" if last and kind != last else piece)
                last = kind

        model = self._with if self.adapter else self._without
        [answer] = generate(
            model,
            [prompt.tolist()],
            eos_token_ids=self._ends,
            streamer=lambda _, tokens: tell(shown.add(tokens)),
            tokenizer=self._tokenizer,
            pictures=[PromptPictures.of(picture_arrays(len(prompt), placed, self._processor))],
            **self._settings,
        )
        tell(shown.end())
        message = self._reader.read(answer, opening=opening).message
        self.messages = [*messages, message]
        return message["content"]
