"""Rows to tokens: chat templates, and which tokens are trained on.

A row becomes text and the character ranges of its responses; one call of the tokenizer turns text into ids and
offsets, and the offsets turn ranges into a mask. Ranges come from the template's own structure: from its
`{% generation %}` marks, or, where it has none, from rendering the conversation up to each response. Marker
strings (`markers.py`) are the way for rows and templates that show no structure.

What is trained in a response is its text and the token that ends the turn, nothing after it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtune.train.data.formats import ALPACA_PREAMBLE, Example, RowError, normalize
from jaxtune.train.data.markers import Markers, special_ids

IGNORE = -100  # the label of a token that is not trained on, as in PyTorch's cross entropy
TRAIN_ON = ("responses", "all")

# A BOS is not the templates' business: the tokenizer says whether a row begins with one.
PACKAGED_TEMPLATES = {
    "chatml": """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "alpaca": """\
{%- if tools %}{{ raise_exception('the alpaca template has no place for tools') }}{% endif %}
{%- if messages[0].role != 'system' %}{{ '"""
    + ALPACA_PREAMBLE
    + """\n\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content + '\n\n' }}
{%- elif message.role == 'user' %}{{ '### Instruction:\n' + message.content + '\n\n' }}
{%- elif message.role == 'assistant' and not message.tool_calls %}{{ '### Response:\n' }}
{%- generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '' if loop.last else '\n\n' }}
{%- else %}{{ raise_exception('the alpaca template has no place for tools') }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}""",
}

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SENTINEL = "\ue000x\ue001"  # private-use characters: in no real message


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One row as tokens: `tokens` int32[n], `mask` bool[n] (True where trained on).

    responses: how many responses were found. ended: how many of them train a token that ends the turn.
    """

    tokens: np.ndarray
    mask: np.ndarray
    responses: int
    ended: int


def resolve_template(tokenizer: Any, template: str | None) -> str:
    """The Jinja text of a template: None or "tokenizer" (the tokenizer's own), a packaged name, a path to a
    `.jinja` file, or Jinja text itself. Raises `ValueError` where there is none."""
    if template is None or template == "tokenizer":
        own = tokenizer.chat_template
        own = own.get("default") if isinstance(own, dict) else own
        if not own:
            raise ValueError(
                "the tokenizer has no chat template; set data.template to "
                f"{' or '.join(PACKAGED_TEMPLATES)}, or to the path of a .jinja file"
            )
        return own
    if template in PACKAGED_TEMPLATES:
        return PACKAGED_TEMPLATES[template]
    if "{%" in template or "{{" in template:
        return template
    path = Path(template).expanduser()
    if path.suffix == ".jinja":
        if not path.is_file():
            raise ValueError(f"data.template={template}: no such file")
        return path.read_text(encoding="utf-8")
    raise ValueError(
        f"data.template={template!r} is not known; give tokenizer, {', '.join(PACKAGED_TEMPLATES)}, "
        "or the path of a .jinja file"
    )


class RowEncoder:
    """Turns examples into tokens and masks.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        template: see `resolve_template`. None also leaves prompts and completions as they stand; any other
            choice renders them as a conversation.
        train_on: "responses", or "all" tokens of a row.
        instruction_part, response_part: marker strings; both or neither. With them the responses are found by
            `markers.Markers`, without them by the template's structure.
        last_response_only: of a conversation, train the last response alone.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str | None = None,
        train_on: Literal["responses", "all"] = "responses",
        instruction_part: str | None = None,
        response_part: str | None = None,
        last_response_only: bool = False,
    ):
        if train_on not in TRAIN_ON:
            raise ValueError(f"data.train_on must be one of {', '.join(TRAIN_ON)}, got {train_on!r}")
        if not tokenizer.is_fast:
            raise ValueError("a fast tokenizer (tokenizer.json) is needed: it tells where in the text a token lies")
        self.tokenizer = tokenizer
        self.template = template
        self.train_on = train_on
        self.last_response_only = last_response_only
        self.markers = None
        if train_on == "responses" and (instruction_part is not None or response_part is not None):
            self.markers = Markers(tokenizer, instruction_part, response_part)
        self.end_ids = special_ids(tokenizer) - {tokenizer.bos_token_id, tokenizer.unk_token_id}
        if tokenizer.eos_token_id is not None:
            self.end_ids |= {tokenizer.eos_token_id}
        self.bos_id = tokenizer.bos_token_id
        self.adds_bos = self.bos_id is not None and tokenizer("")["input_ids"][:1] == [self.bos_id]
        self._jinja: str | None = None
        self._prompts_alone = True  # see _finish

    # --- rows

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """Tokens and mask of each example, or the reason why it has none, in order."""
        rendered: list[tuple[str, list[tuple[int, int]]] | RowError] = []
        for example in examples:
            try:
                rendered.append(self.render(example))
            except RowError as error:
                rendered.append(error)
        texts = [item[0] for item in rendered if not isinstance(item, RowError)]
        tokenized = iter(self._tokenize(texts))
        results: list[Encoded | RowError] = []
        for example, item in zip(examples, rendered, strict=True):
            if isinstance(item, RowError):
                results.append(item)
            else:
                results.append(self._finish(example, *item, *next(tokenized)))
        return results

    def encode_prompt(self, example: Example) -> np.ndarray:
        """int32[n]: an example up to where its last response begins, as a model is asked for it.

        The same text, BOS and tokens that training puts before that response.
        """
        if example.text is not None:
            text = example.text
        elif self._is_raw(example):
            text = example.prompt or ""
        else:
            messages = list(example.messages or ())
            if messages and messages[-1]["role"] == "assistant":
                messages.pop()
            text = self._render(messages, example.tools, add_generation_prompt=True)
        tokens, _, _ = self._tokenize([text])[0]
        return self._one_bos(tokens)

    def render(self, example: Example) -> tuple[str, list[tuple[int, int]]]:
        """The text of an example and the character ranges of its responses (none where markers find them)."""
        if example.text is not None:
            return example.text, [(0, len(example.text))]
        if self._is_raw(example):
            text = (example.prompt or "") + (example.completion or "")
            return text, [(len(example.prompt or ""), len(text))]
        messages = example.messages or []
        if self.train_on == "all" or self.markers is not None:
            return self._render(messages, example.tools), []
        if _GENERATION_MARK.search(self._template_text()):
            return self._render_marked(messages, example.tools)
        return self._render_prefixes(messages, example.tools)

    def _is_raw(self, example: Example) -> bool:
        return example.prompt is not None and self.template is None

    def _finish(
        self, example: Example, text: str, ranges: list[tuple[int, int]], tokens: np.ndarray, starts, ends
    ) -> Encoded | RowError:
        is_raw = example.text is not None or self._is_raw(example)
        cuts = [low for low, _ in ranges if np.any((starts < low) & (low < ends))]
        if cuts and self._prompts_alone:
            # A token holds the end of a prompt and the start of its response. Whoever asks the model will have
            # the prompt tokenised alone, so it is tokenised alone here.
            tokens, starts, ends = self._tokenize_pieces(text, cuts)
        spans = []
        for low, high in ranges[-1:] if self.last_response_only else ranges:
            first, last = (int(index) for index in np.searchsorted(starts, (low, high)))
            if not is_raw:
                last = self._end_of_turn(text, tokens, ends, first, last, high)
            spans.append((first, last))
        if is_raw:
            tokens, spans = self._with_eos(text, tokens, spans)
        if not len(tokens):
            return RowError("no token")
        if self.markers is not None:
            spans = self.markers.spans(tokens)[-1 if self.last_response_only else 0 :]
        mask = np.zeros(len(tokens), bool)
        if self.train_on == "all":
            mask[:] = True
            ended = [index for index in range(1, len(tokens)) if int(tokens[index]) in self.end_ids]
            responses, ended = 1, int(bool(ended))
        else:
            spans = [(first, last) for first, last in spans if first < last]
            for first, last in spans:
                mask[first:last] = True
            responses, ended = len(spans), sum(int(tokens[last - 1]) in self.end_ids for _, last in spans)
        with_bos = self._one_bos(tokens)
        added = len(with_bos) - len(tokens)  # 1 prepended, 0, or -k doubled ones taken away
        mask = np.concatenate([np.zeros(1, bool), mask]) if added > 0 else mask[-added:]
        return Encoded(with_bos, mask, responses, ended)

    def _end_of_turn(self, text: str, tokens: np.ndarray, ends: np.ndarray, first: int, last: int, high: int) -> int:
        """The end of a response without the white space that a template writes after its end-of-turn token."""
        for index in range(last - 1, first - 1, -1):
            if int(tokens[index]) in self.end_ids:
                return index + 1 if not text[ends[index] : high].strip() else last
        return last

    def _with_eos(
        self, text: str, tokens: np.ndarray, spans: list[tuple[int, int]]
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Raw rows end with EOS, which is trained: a model learns to stop. One that is there is not doubled."""
        eos = self.tokenizer.eos_token
        if eos is None:
            raise ValueError("the tokenizer has no EOS token, so no row can end; set tokenizer.eos_token")
        if text.rstrip().endswith(eos):
            return tokens, spans
        last = len(tokens) + 1
        tokens = np.append(tokens, np.int32(self.tokenizer.eos_token_id))
        return tokens, [*spans[:-1], (spans[-1][0], last)]

    def _one_bos(self, tokens: np.ndarray) -> np.ndarray:
        """Exactly one BOS where the tokenizer wants one or the template wrote one; else none."""
        if self.bos_id is None:
            return tokens
        leading = 0
        while leading < len(tokens) and tokens[leading] == self.bos_id:
            leading += 1
        if leading > 1:
            return tokens[leading - 1 :]
        if leading == 0 and self.adds_bos:
            return np.concatenate([np.array([self.bos_id], np.int32), tokens])
        return tokens

    # --- text to tokens

    def _tokenize(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each text: ids int32[n], and where in the text they start and end, int64[n]."""
        if not texts:
            return []
        output = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        results = []
        for ids, offsets in zip(output["input_ids"], output["offset_mapping"], strict=True):
            pairs = np.array(offsets, np.int64).reshape(-1, 2)
            results.append((np.array(ids, np.int32), pairs[:, 0], pairs[:, 1]))
        return results

    def _tokenize_pieces(self, text: str, cuts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        edges = [0, *cuts, len(text)]
        pieces = self._tokenize([text[low:high] for low, high in itertools.pairwise(edges)])
        tokens = np.concatenate([piece[0] for piece in pieces])
        starts, ends = (
            np.concatenate([piece[which] + edge for piece, edge in zip(pieces, edges, strict=False)])
            for which in (1, 2)
        )
        return tokens, starts, ends

    # --- conversations to text

    def _template_text(self) -> str:
        if self._jinja is None:
            self._jinja = resolve_template(self.tokenizer, self.template)
        return self._jinja

    def _render(self, messages: list[dict], tools: list[dict] | None, add_generation_prompt: bool = False) -> str:
        template = self._template_text()
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # templates are programs: any error of theirs is this row's
            raise RowError(f"the chat template fails: {type(error).__name__}: {error}") from None

    def _render_marked(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        """Rendered once, with the ranges of the template's `{% generation %}` blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(  # annotated as str, returns a pair
                conversations=[messages],
                tools=tools,  # type: ignore[arg-type]
                chat_template=self._template_text(),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise RowError(f"the chat template fails: {type(error).__name__}: {error}") from None
        (text,), (ranges,) = rendered
        return text, [(low, high) for low, high in ranges if low < high]

    def _render_prefixes(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        """For a template without marks: a response lies between the prompt that asks for it and its turn's end.

        A response that opens a conversation has no prompt and is not trained on.
        """
        text = self._render(messages, tools)
        ranges = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            prompt = self._render(messages[:index], tools, add_generation_prompt=True)
            if not text.startswith(prompt):
                raise RowError(
                    f"the chat template writes the turns before response {index} differently once later turns "
                    "follow, so responses cannot be told from its structure; set data.instruction_part and "
                    "data.response_part, or use a template with {% generation %} marks"
                )
            turn = text if index == len(messages) - 1 else self._render(messages[: index + 1], tools)
            if text.startswith(turn):
                end = len(turn)
            else:
                end = self._end_of_content(messages, tools, text, index)
            ranges.append((len(prompt), end))
        return text, ranges

    def _end_of_content(self, messages: list[dict], tools: list[dict] | None, text: str, index: int) -> int:
        """Where response `index` ends in `text`, for templates that write a turn otherwise while it is the last
        one (they keep its reasoning, or end it with another token): after the first special token that follows
        its content. Where the content lies shows when it is replaced."""
        replaced = [*messages]
        replaced[index] = {**messages[index], "content": _SENTINEL}
        other = self._render(replaced, tools)
        at = other.find(_SENTINEL)
        tail = other[at + len(_SENTINEL) :]
        if at < 0 or not text.endswith(tail):
            raise RowError(
                f"the chat template changes response {index} once later turns follow, and its end cannot be found; "
                "set data.instruction_part and data.response_part, or use a template with {% generation %} marks"
            )
        end = len(text) - len(tail)
        specials = [self.tokenizer.convert_ids_to_tokens(int(token)) for token in self.end_ids]
        following = [(text.find(special, end), special) for special in specials if special in text[end:]]
        if not following:
            raise RowError(f"the chat template ends response {index} with no special token")
        at, special = min(following)
        return at + len(special)


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
