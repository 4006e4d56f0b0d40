"""A Modelfile, of which `ollama create` makes a model. Ollama reads Go templates. The texts around messages are read
off conversations that the Jinja template writes, and become a Go template if that writes the same for every drawn
conversation.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shlex
from collections.abc import Callable, Sequence

from jaxtune.conversations.messages import Message, template_for
from jaxtune.conversations.templates import TemplateError, render
from jaxtune.conversations.tokenizing import Tokenizer, beginning, special_ids
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import ends_of

MODELFILE = "Modelfile"
_SYSTEM, _USERS, _ANSWER = "\ue000s\ue001", ("\ue000u\ue001", "\ue000v\ue001"), "\ue000a\ue001"
_DRAWN = 60  # conversations
_WORDS = ("Hello", "world", "x", "{{ .Content }}", '"quoted"', "it's", "{%", "<b>", "a  b", "\n", "\n\n", "\t", "#") + (
    "Grüße",
    "日本語",
    "🙂",
    "\\n",
    "1.",
    "- item",
    "```python",
    "$y$",
    "&amp;",
    "user",
    "assistant",
    "system:",
)
# generation_config.json's key: Ollama's
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
type Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Turns:
    """The texts that a chat template writes around the messages of a conversation that ends with a question."""

    begin: str  # before the first question, without a system message
    system: Pair | None  # in its place, around the system message; None: the template refuses one
    answered: str  # between a question and its answer
    asked: str  # between an answer and the next question
    prompt: str  # after the last question
    late: Pair | None = None  # in place of the last `asked`, around the system message that the template writes there

    def text(self, system: str | None, turns: Sequence[str]) -> str:
        """A conversation; turns: questions and answers in turn, the last a question. A system message is dropped if
        self.system is None.
        """
        late = self.late is not None and len(turns) > 1
        system_pair = self.system if system is not None and not late else None
        text = self.begin if system_pair is None else f"{system_pair[0]}{system}{system_pair[1]}"
        for index, turn in enumerate(turns):
            if index and index % 2:
                text += self.answered
            elif index and index == len(turns) - 1 and self.late is not None and system is not None:
                text += f"{self.late[0]}{system}{self.late[1]}"
            elif index:
                text += self.asked
            text += turn
        return text + self.prompt

    def to_go(self) -> str:
        """The Go template for Ollama's .System and .Messages."""

        def with_system(pair: Pair) -> str:
            return f"{_literal(pair[0])}{{{{ $.System }}}}{_literal(pair[1])}"

        first, next_ = _literal(self.begin), _literal(self.asked)
        if self.system is not None and self.late is None:
            first = f"{{{{ if $.System }}}}{with_system(self.system)}{{{{ else }}}}{first}{{{{ end }}}}"
        elif self.system is not None and self.late is not None:
            first = f"{{{{ if and $last $.System }}}}{with_system(self.system)}{{{{ else }}}}{first}{{{{ end }}}}"
            next_ = f"{{{{ if and $last $.System }}}}{with_system(self.late)}{{{{ else }}}}{next_}{{{{ end }}}}"
        return (
            "{{ $first := true }}{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"
            f'{{{{ if eq .Role "user" }}}}{{{{ if $first }}}}{first}{{{{ else }}}}{next_}{{{{ end }}}}'
            "{{ $first = false }}{{ .Content }}"
            f"{{{{ if $last }}}}{_literal(self.prompt)}{{{{ end }}}}"
            f'{{{{ else if eq .Role "assistant" }}}}{_literal(self.answered)}'
            "{{ .Content }}{{ end }}{{ end }}"
        )


def modelfile(model: Decoder, tokenizer: Tokenizer, file: str, missing: Sequence[str] = ()) -> tuple[str, list[str]]:
    """(the text of Ollama's Modelfile for a GGUF file, notes).

    model: that was exported, for its end tokens and sampling settings.
    tokenizer: whose chat template becomes TEMPLATE.
    file: the name of the GGUF file, which lies beside the Modelfile.
    missing: sentences on what the file lacks, which become comments.
    """
    turns, why = turns_of(tokenizer)
    lines = [f"FROM ./{file}", *(f"# {sentence}" for sentence in missing)]
    notes = []
    if turns is None:
        lines.append(f"# No TEMPLATE: {why}. Ollama takes one of those that it knows, if it resembles the GGUF file's.")
        notes.append(f"{MODELFILE} has no TEMPLATE: {why}; compare what 'ollama show --template' shows")
    else:
        if turns.system is None:
            lines.append("# The chat template has no place for a system message: SYSTEM would not be read.")
        lines.append(f'TEMPLATE """{turns.to_go()}"""')
    # A text that is no special token would also end answers that only contain it.
    ends = sorted(special_ids(tokenizer) & {*ends_of(model, tokenizer)})
    texts = [str(tokenizer.convert_ids_to_tokens(token)) for token in ends]
    lines += [f"PARAMETER stop {json.dumps(text, ensure_ascii=False)}" for text in texts]
    generation = model.source.generation_config if model.source is not None else None
    settings = json.loads(generation) if generation else {}
    for key, name in _PARAMETERS.items():
        if isinstance(value := settings.get(key), int | float):
            lines.append(f"PARAMETER {name} {value:g}")
    return "\n".join(lines) + "\n", notes


def create_command(folder: str | os.PathLike, name: str) -> str:
    """The command line that makes an Ollama model of `folder`."""
    allowed = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"
    return f"ollama create {allowed} -f {shlex.quote(os.path.join(folder, MODELFILE))}"


def turns_of(tokenizer: Tokenizer) -> tuple[Turns | None, str]:
    """(Turns of the chat template, ""), or (None, why there are none)."""
    template = template_for(tokenizer.chat_template, None)
    if template is None:
        return None, "the model has no chat template"
    if "strftime_now" in template:
        return None, "the chat template writes the day of asking"
    bos = tokenizer.bos_token if beginning(tokenizer) else None

    def write(messages: Sequence[Message]) -> str:
        # llama.cpp adds the BOS token that the tokenizer adds.
        return render(tokenizer, template, messages, add_generation_prompt=True).removeprefix(bos or "")

    try:
        turns = _read(write)
        if turns is not None and all(_is_same(turns, write, random.Random(seed)) for seed in range(_DRAWN)):
            return turns, ""
    except TemplateError:
        pass
    return None, "a Go template cannot write the same as the chat template"


def _conversation(system: str | None, turns: Sequence[str]) -> list[Message]:
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return messages + [
        {"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(turns)
    ]


def _read(write: Callable[[Sequence[Message]], str]) -> Turns | None:
    """Turns of four conversations, two of them with a system message; None if a mark is missing or in another order."""
    short, long = _USERS[:1], (_USERS[0], _ANSWER, _USERS[1])
    alone = _split(write(_conversation(None, short)), short)
    dialogue = _split(write(_conversation(None, long)), long)
    if alone is None or dialogue is None:
        return None
    (begin, prompt), (_, answered, asked, _) = alone, dialogue
    try:
        texts = [write(_conversation(_SYSTEM, turns)) for turns in (short, long)]
    except TemplateError:  # it refuses a system message
        return Turns(begin, None, answered, asked, prompt)
    first = _split(texts[0], (_SYSTEM, *short))
    if first is None:
        return None
    early, late = _split(texts[1], (_SYSTEM, *long)), _split(texts[1], (*long[:2], _SYSTEM, long[2]))
    if early is None and late is None:
        return None
    late_pair = None if late is None else (late[2], late[3])
    return Turns(begin, (first[0], first[1]), answered, asked, prompt, late_pair)


def _split(text: str, marks: Sequence[str]) -> list[str] | None:
    """The texts between marks that occur once each, in this order; else None."""
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            return None
        before, _, text = text.partition(mark)
        pieces.append(before)
    return [*pieces, text]


def _is_same(turns: Turns, write: Callable[[Sequence[Message]], str], draw: random.Random) -> bool:
    """Whether a drawn conversation is written alike, without white space around messages, which many templates drop."""

    def content() -> str:
        return draw.choice((" ", "\n", "")).join(draw.choices(_WORDS, k=draw.randint(1, 8))).strip() or "Hello"

    system = content() if turns.system is not None and draw.random() < 0.6 else None
    contents = [content() for _ in range(2 * draw.randint(0, 3) + 1)]
    return write(_conversation(system, contents)) == turns.text(system, contents)


def _literal(text: str) -> str:
    """A text in a Go template in a Modelfile's quotes."""
    if "{{" in text or '"""' in text or text.endswith("{"):
        return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}"
    return text
