"""How a chat template writes tool calls and results, for answers sampled in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtune.conversations.answers import AnswerReader
from jaxtune.conversations.calls import FORMS, Call, Schemas
from jaxtune.conversations.dates import dated
from jaxtune.conversations.prompts import text_tokens
from jaxtune.conversations.templates import TemplateError, guarded, render, special_pattern, unguarded
from jaxtune.train.config import ConfigError
from jaxtune.train.data.rendering.templates import resolve_template
from jaxtune.train.sampled.reward_functions import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Call", "ToolFormat"]

_PROBE = "\ue000 what a tool answered \ue001"  # a tool's answer by which the template is tested


class ToolFormat:
    """How one template writes calls and results.

    Raises ConfigError if it writes calls in no known form, leaves out results, or ends no turn with a token of `ends`.

      template: as data.template; None: the tokenizer's own.
      ends: token ids that end an answer.
      today: the day that it writes; None: that of asking.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template: str | None, ends: Sequence[int], today: str | None = None
    ):
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        self._template = dated(resolve_template(tokenizer, template, tools=True), today)
        self._special = special_pattern(tokenizer)
        self.reader = AnswerReader(tokenizer, self._template)
        if not self.reader.writes_calls:
            known_forms = "; ".join(["gpt-oss channels", *(form.name for form in FORMS)])
            raise ConfigError(
                f"objective.tools: the chat template writes calls of tools in no known form ({known_forms}); set "
                "data.template to one that does, such as qwen-3"
            )
        try:
            suffix = self.suffix([{"role": "tool", "name": "tool", "content": _PROBE}])
        except (TemplateError, ValueError) as error:
            raise ConfigError(f"objective.tools: the chat template cannot write what a tool answers: {error}") from None
        if _PROBE not in self.decode(suffix):
            raise ConfigError("objective.tools: the chat template does not write what a tool answers")
        self._opening = self.reader.opening(suffix)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def parsed(self, ids: Sequence[int], schemas: Schemas, cut: bool = False) -> tuple[Message, list[Call]]:
        """(Message, its calls) of one turn's ids without its end; malformed calls are text. schemas: {tool: JSON schema
        of its parameters}; cut: the turn did not end by itself.
        """
        answer = self.reader.read(ids, schemas, self._opening, cut=cut)
        return answer.message, list(answer.calls)

    def suffix(self, messages: Sequence[Message]) -> list[int]:
        """Token ids after the end of a turn with calls: the results, without special tokens, and the next turn's
        beginning.

        Raises TemplateError if the template fails, ValueError if no token of `ends` ends the turn.

          messages: results of one turn, role "tool", with "name" and "content".
        """
        answers, mark = guarded(messages, self._special)
        try:
            before, text = self._rendered(answers)
        except TemplateError:  # some templates need numbers of calls
            ids = [f"call{number:05d}" for number in range(len(answers))]
            before, text = self._rendered(
                [{**answer, "tool_call_id": number} for answer, number in zip(answers, ids, strict=True)], ids
            )
        asked_ids = self._ids(before)
        whole_ids = self._ids(*unguarded(text, mark))
        behind = len(asked_ids)
        if whole_ids[:behind] == asked_ids and whole_ids[behind : behind + 1] and whole_ids[behind] in self._ends:
            return whole_ids[behind + 1 :]  # the token of the tool's role ends the calls
        end_indices = [index for index, token in enumerate(whole_ids) if token in self._ends]
        count = sum(token in self._ends for token in asked_ids)
        last = max((index for index, token in enumerate(asked_ids) if token in self._ends), default=len(asked_ids))
        if count == 0 or self.decode(asked_ids[last + 1 :]).strip():
            raise ValueError(f"no token that ends an answer ({sorted(self._ends)}) ends the model's turn in it")
        return whole_ids[end_indices[count - 1] + 1 :]

    def _rendered(self, answers: Sequence[Message], ids: Sequence[str] = ()) -> tuple[str, str]:
        """A short conversation up to a call, and with results and the next turn's beginning."""
        call = Call(str(answers[0].get("name", "tool")), {}).message
        calls = [{**call, "id": number} for number in ids] or [call]
        conversation = [{"role": "user", "content": "-"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        whole_text = render(
            self._tokenizer, self._template, [*conversation, *map(dict, answers)], add_generation_prompt=True
        )
        return render(self._tokenizer, self._template, conversation), whole_text

    def _ids(self, text: str, cuts: Sequence[int] = ()) -> list[int]:
        """Token ids; half of a surrogate pair is "?"."""
        return text_tokens(self._tokenizer, text.encode(errors="replace").decode(), cuts)
