"""Tokenizers and conversations of Unsloth scripts: chat templates, data sets in ShareGPT's form, and NumPy arrays in
place of torch's tensors, so that torch is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtune.compat.arguments import settle
from jaxtune.compat.tables import TEMPLATE
from jaxtune.conversations.messages import (
    ConversationError,
    Message,
    for_template,
    read_messages,
    template_for,
    unknown_keys,
)
from jaxtune.conversations.templates import asking_template
from jaxtune.system.terminal import say
from jaxtune.train.data.rendering.packaged import missing_marks, packaged_that_fit
from jaxtune.train.data.rendering.templates import resolve_template

# Unsloth's names of templates: (the packaged template, or None; a mark by which the tokenizer's own template is known).
_LLAMA, _QWEN, _TURN, _TURN_4 = "<|start_header_id|>", "<|im_start|>", "<start_of_turn>", "<|turn>"
_FAMILIES = {
    "chatml": ("chatml", _QWEN),
    "alpaca": ("alpaca", "### Instruction:"),
    "llama-3": ("llama-3", _LLAMA),
    "llama3": ("llama-3", _LLAMA),
    "llama-31": ("llama-3.1", _LLAMA),
    "llama-3.1": ("llama-3.1", _LLAMA),
    "llama-3.2": ("llama-3.1", _LLAMA),
    "llama-3.3": ("llama-3.1", _LLAMA),
    "mistral": ("mistral", "[INST]"),
    "llama": (None, "[INST]"),
    "gemma": ("gemma", _TURN),
    "gemma2": ("gemma", _TURN),
    "gemma-2": ("gemma", _TURN),
    "gemma-3": ("gemma-3", _TURN),
    "gemma3": ("gemma-3", _TURN),
    "gemma-4": (None, _TURN_4),
    "gemma4": (None, _TURN_4),
    "gemma-4-thinking": (None, _TURN_4),
    "phi-3": ("phi-3", "<|assistant|>"),
    "phi-3.5": ("phi-3", "<|assistant|>"),
    "phi-35": ("phi-3", "<|assistant|>"),
    "phi-4": ("phi-4", "<|im_sep|>"),
    "qwen-2.5": ("qwen-2.5", _QWEN),
    "qwen2.5": ("qwen-2.5", _QWEN),
    "qwen-25": ("qwen-2.5", _QWEN),
    "qwen25": ("qwen-2.5", _QWEN),
    "qwen-3": ("qwen-3", _QWEN),
    "qwen3": ("qwen-3", _QWEN),
    "qwen3-thinking": (None, _QWEN),
    "qwen3-instruct": ("qwen-3-instruct", _QWEN),
    "gpt-oss": ("gpt-oss", "<|channel|>"),
    "gptoss": ("gpt-oss", "<|channel|>"),
}
_KEPT = ("gpt-oss",)  # packaged templates that write no tools, as the tokenizer's own one does, which therefore stays


class NumpyTensor(np.ndarray):
    """A NumPy array with the methods of torch's tensors that scripts use."""

    def to(self, *_: Any, **__: Any) -> NumpyTensor:
        return self

    cpu = detach = numpy = to

    def argmax(self, axis: Any = None, *arguments: Any, dim: Any = None, **options: Any) -> Any:
        """NumPy's argmax, with torch's `dim` for `axis`."""
        return np.asarray(self).argmax(axis if dim is None else dim, *arguments, **options)


def without_torch(tokenizer: Any) -> Any:
    """Changes a tokenizer in place, and returns it: it answers return_tensors="pt" or "np" with NumpyTensors.

    Its class becomes a subclass; it can still be pickled.
    """
    base = type(tokenizer)
    if getattr(base, "_answers_numpy", False):
        return tokenizer
    printed = False

    def asked(options: dict[str, Any]) -> bool:
        """Whether a call asks for arrays; sets return_tensors to "np", and prints a line at the first "pt"."""
        nonlocal printed
        if options.get("return_tensors") not in ("pt", "np"):
            return False
        if options["return_tensors"] == "pt" and not printed:
            printed = True
            say('tokenizer: return_tensors="pt" is answered with NumPy arrays; torch is not needed')
        options["return_tensors"] = "np"
        return True

    def movable(answer: Any) -> Any:
        """A tokenizer's answer with NumpyTensors."""
        if isinstance(answer, np.ndarray):
            return answer.view(NumpyTensor)
        for key, value in answer.items():
            if isinstance(value, np.ndarray):
                answer[key] = value.view(NumpyTensor)
        answer.to = lambda *_, **__: answer  # BatchEncoding's own needs torch
        return answer

    def wrapped(name: str) -> Any:

        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            arrays = asked(options)
            if name == "apply_chat_template":
                arguments, options = _read_conversation(self.chat_template, arguments, options)
            answer = getattr(base, name)(self, *arguments, **options)
            return movable(answer) if arrays else answer

        return method

    def reduced(self: Any, protocol: Any) -> Any:
        """The tokenizer's __reduce_ex__: pickled as an object of its plain class, and changed again when loaded."""
        # A class created here cannot be found by name, so pickling and copying create it again.
        plain = object.__new__(base)
        vars(plain).update(vars(self))
        return without_torch, (plain,)

    methods = {name: wrapped(name) for name in ("__call__", "apply_chat_template", "pad", "encode")}
    methods |= {"__reduce_ex__": reduced, "_answers_numpy": True}
    tokenizer.__class__ = type(base.__name__, (base,), methods)
    return tokenizer


def _read_conversation(
    templates: object, arguments: tuple[object, ...], options: Message
) -> tuple[tuple[object, ...], Message]:
    """The arguments of apply_chat_template with conversations as rows are read."""
    name = "conversation"
    value = arguments[0] if arguments else options.get(name)
    several = (
        isinstance(value, list | tuple) and bool(value) and all(isinstance(turns, list | tuple) for turns in value)
    )
    template = template_for(options.get("chat_template") or templates, options.get("tools")) or ""
    try:
        conversations = [for_template(read_messages(turns), template) for turns in (value if several else [value])]  # type: ignore[union-attr]
    except ConversationError:
        return arguments, options
    converted = conversations if several else conversations[0]
    return ((converted, *arguments[1:]), options) if arguments else (arguments, {**options, name: converted})


def get_chat_template(tokenizer: Any, chat_template: str = "chatml", **others: Any) -> Any:
    """Unsloth's: sets the chat template of a tokenizer, or of a processor's, in place.

    If the tokenizer lacks the named template's special tokens, its own stays, which must have a mark of that family
    ("[INST]" for llama); gpt-oss's own stays because it writes tools, and a processor's because it writes pictures.
    ValueError: no template fits.
      chat_template: a name of Unsloth's or of a packaged template, a .jinja file, Jinja text; or a pair that begins
        with one of these.
    """
    settle("get_chat_template", others, TEMPLATE, get_chat_template)
    if isinstance(chat_template, Sequence) and not isinstance(chat_template, str):
        chat_template = chat_template[0]  # a pair (template, end of a turn)
    name, mark = _FAMILIES.get(chat_template, (chat_template, None))
    given, tokenizer = tokenizer, getattr(tokenizer, "tokenizer", tokenizer)
    has_mark = mark is not None and mark in (tokenizer.chat_template or "")
    stays = has_mark and (name in _KEPT or given is not tokenizer)
    if mark is None or (name is not None and not stays and not missing_marks(tokenizer, name)):
        tokenizer.chat_template = asking_template(tokenizer, resolve_template(tokenizer, name))
        return given
    if not has_mark:
        fitting = ", ".join(map(repr, packaged_that_fit(tokenizer))) or "a tokenizer with the template's special tokens"
        raise ValueError(
            f"get_chat_template: chat_template = {chat_template!r} is not the template of this tokenizer, which has no "
            f"{mark}. Use its own, {fitting}, or the text of a template"
        )
    say(f"get_chat_template: {chat_template!r} is the tokenizer's own template, which stays")
    return given


def setup_chat_format[Model](
    model: Model, tokenizer: Any, format: str = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Model, Any]:
    """TRL's: gives the tokenizer ChatML and its marks as BOS, EOS and PAD, in place: (model, tokenizer).

    ValueError: another format, or the tokenizer lacks ChatML's marks; no embeddings are added.
    resize_to_multiple_of: has no effect.
    """
    del resize_to_multiple_of
    marks = ("<|im_start|>", "<|im_end|>")
    fitting = ", ".join(map(repr, packaged_that_fit(tokenizer))) or "one of its own, as text"
    instead = f"Instead: get_chat_template(tokenizer, NAME) with a template that fits it: {fitting}"
    if format != "chatml":
        raise ValueError(f"setup_chat_format: format = {format!r} is not supported; supported: 'chatml'. {instead}")
    vocabulary = tokenizer.get_vocab()
    if not all(mark in vocabulary for mark in marks):
        raise ValueError(
            f"setup_chat_format: the tokenizer has no {' and '.join(marks)}, and the model no embeddings for them. "
            f"{instead}"
        )
    if tokenizer.chat_template:
        say("setup_chat_format: ChatML takes the place of the tokenizer's own template")
    tokenizer.chat_template = resolve_template(tokenizer, "chatml")
    tokenizer.bos_token, tokenizer.eos_token = marks
    tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def standardize_sharegpt(dataset: Any, **others: Any) -> Any:
    """Unsloth's: a new data set with messages in its column `conversations`; ValueError if one cannot be read.

    In a data set of `datasets` the arguments of calls are JSON text, since all rows of a table have the same keys.
    """
    idle = {"tokenizer", "aliases_for_system", "aliases_for_user", "aliases_for_assistant", "batch_size", "num_proc"}
    if others.keys() - idle:
        raise ValueError(f"standardize_sharegpt: {min(others.keys() - idle)} is not an argument that it has")
    if isinstance(dataset, Mapping):  # splits
        kind: Any = type(dataset)
        return kind({name: standardize_sharegpt(split) for name, split in dataset.items()})
    names = getattr(dataset, "column_names", None) or next(iter(dataset), {"conversations": None})
    if "conversations" not in names:  # Unsloth returns it, too
        say(f"standardize_sharegpt: nothing to do: no column conversations among {', '.join(map(str, names))}")
        return dataset
    if not hasattr(dataset, "map"):
        return [dict(row) | {"conversations": _standard(row)} for row in dataset]
    if not hasattr(dataset, "__len__"):
        return dataset.map(lambda row: {"conversations": list(map(_as_text, _standard(row)))})
    keys = {key for row in dataset for message in _standard(row) for key in message}
    features = dataset.features.copy()
    features["conversations"] = [{key: kind for key, kind in _features().items() if key in keys}]

    def tabled(row: Mapping[str, object]) -> Message:
        return {"conversations": [{key: m.get(key) for key in keys} for m in map(_as_text, _standard(row))]}

    return dataset.map(tabled, features=features)


def _standard(row: Mapping[str, object]) -> list[Message]:
    """The messages of a row, without keys that only a template may read."""
    try:
        messages = read_messages(row["conversations"], "conversations")
    except ConversationError as error:
        raise ValueError(f"standardize_sharegpt: {error}") from None
    unknown = set(unknown_keys(messages))
    return [{key: cell for key, cell in message.items() if key not in unknown} for message in messages]


def _as_text(message: Message) -> Message:
    """A message whose calls have the same keys in every row: their arguments are JSON text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            "id": None if call.get("id") is None else str(call["id"]),
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False, default=str),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _features() -> Message:
    """The types of messages' keys in a table."""
    from datasets import Value

    text, number, truth = Value("string"), Value("int64"), Value("bool")
    call = {"id": text, "type": text, "function": {"name": text, "arguments": text}}
    span = {"begin_offset": number, "end_offset": number, "train": truth}
    texts = dict.fromkeys(("role", "content", "reasoning_content", "name", "tool_call_id"), text)
    return {**texts, "tool_calls": [call], "train": truth, "train_detail": [span]}


standardize_data_formats = standardize_sharegpt
