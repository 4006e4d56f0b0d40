"""Tokenizers and conversations of Unsloth scripts: chat templates (`get_chat_template`, TRL's `setup_chat_format`),
data sets in ShareGPT's form (`standardize_sharegpt`), and arrays that tokenizers return in place of torch's tensors, so
that torch is not needed (`without_torch`, `NumpyTensor`)."""

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
from jaxtune.train.data.packaged import missing_marks, packaged_that_fit
from jaxtune.train.data.templates import resolve_template

# Unsloth's names of templates: (the packaged template, or None; a mark by which the tokenizer's own template is known).
_LLAMA, _QWEN, _TURN = "<|start_header_id|>", "<|im_start|>", "<start_of_turn>"
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
    """A NumPy array with the methods of torch's tensors that scripts use, so that scripts run without torch: `to`,
    `cpu`, `detach` and `numpy` return the array itself, and `argmax` accepts `dim` for `axis`. Tokenizers changed by
    without_torch return such arrays, and a script's preprocess_logits_for_metrics gets them."""

    def to(self, *_: Any, **__: Any) -> NumpyTensor:
        """Returns the array itself; arguments such as a device or a dtype are ignored."""
        return self

    cpu = detach = numpy = to

    def argmax(self, axis: Any = None, *arguments: Any, dim: Any = None, **options: Any) -> Any:
        """Returns the indices of the largest values along `axis`, or along torch's name for it, `dim`, if that is
        given. The other arguments are those of NumPy's argmax; without axis and dim, the index is that in the flattened
        array."""
        return np.asarray(self).argmax(axis if dim is None else dim, *arguments, **options)


def without_torch(tokenizer: Any) -> Any:
    """Changes a tokenizer in place (its class becomes a subclass), and returns it: for return_tensors="pt" or "np", an
    argument by name, its methods __call__, apply_chat_template, pad and encode give NumpyTensor arrays, so torch need
    not be installed. The functions that load a model or a tokenizer call it. The tokenizer prints a line at its first
    use of "pt". A tokenizer that was changed before stays as it is."""
    base = type(tokenizer)
    if getattr(base, "_answers_numpy", False):
        return tokenizer
    printed = False

    def asked(options: dict[str, Any]) -> bool:
        """Whether a call with these `options` asks for arrays. If so, changes return_tensors to "np" in place, and
        prints the line if it was the first "pt"."""
        nonlocal printed
        if options.get("return_tensors") not in ("pt", "np"):
            return False
        if options["return_tensors"] == "pt" and not printed:
            printed = True
            say('tokenizer: return_tensors="pt" is answered with NumPy arrays; torch is not needed')
        options["return_tensors"] = "np"
        return True

    def movable(answer: Any) -> Any:
        """Makes the arrays of a tokenizer's answer (an array, or a mapping, in place) NumpyTensors, and returns it. A
        mapping's `to` then returns the mapping itself, because its own needs torch."""
        if isinstance(answer, np.ndarray):
            return answer.view(NumpyTensor)
        for key, value in answer.items():
            if isinstance(value, np.ndarray):
                answer[key] = value.view(NumpyTensor)
        answer.to = lambda *_, **__: answer  # BatchEncoding's own needs torch
        return answer

    def wrapped(name: str) -> Any:
        """Makes the method that replaces the tokenizer's method `name`."""

        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            """Calls the tokenizer's own method, and returns NumpyTensors where arrays are asked for."""
            arrays = asked(options)
            if name == "apply_chat_template":
                arguments, options = _read_conversation(self.chat_template, arguments, options)
            answer = getattr(base, name)(self, *arguments, **options)
            return movable(answer) if arrays else answer

        return method

    def reduced(self: Any, protocol: Any) -> Any:
        """The __reduce_ex__ of the tokenizer: it is pickled as an object of its plain class, and changed again when it
        is loaded. `protocol` is not used."""
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
    """The arguments of apply_chat_template with its conversation, or each of several, as rows are read; what the reader
    refuses (such as pictures) stays for the template."""
    name = "conversation"
    given = arguments[0] if arguments else options.get(name)
    several = isinstance(given, list | tuple) and bool(given) and all(isinstance(one, list | tuple) for one in given)
    template = template_for(options.get("chat_template") or templates, options.get("tools")) or ""
    try:
        read = [for_template(read_messages(one), template) for one in (given if several else [given])]  # type: ignore[union-attr]
    except ConversationError:
        return arguments, options
    asked = read if several else read[0]
    return ((asked, *arguments[1:]), options) if arguments else (arguments, {**options, name: asked})


def get_chat_template(tokenizer: Any, chat_template: str = "chatml", **others: Any) -> Any:
    """Unsloth's function: sets the tokenizer's chat template, in place, and returns the tokenizer.

    With one of Unsloth's names that are known here (_FAMILIES) the tokenizer keeps its present template, which is
    printed, if _FAMILIES has no template for the name or the tokenizer lacks the template's special tokens. The present
    template must then contain a string that is typical of the named one, such as "[INST]" for llama. With "gpt-oss" the
    present template stays also if it contains gpt-oss's "<|channel|>", because it writes tools, and the packaged one
    does not. Unsloth's other names, such as "vicuna", are not found, which raises ValueError.

    Args:
      tokenizer: a tokenizer of transformers.
      chat_template: one of these names or the name of a packaged template, the path of a .jinja file, or Jinja text; or
        a pair, whose first item is one of these and whose second is ignored.
      others: Unsloth's other arguments. A printed line reports each one that has no effect here.
    Raises:
      ValueError: the tokenizer's present template would be kept and lacks that string; another template is not found,
        or writes special tokens that the tokenizer lacks; or one of `others` would change the result, or is unknown.
    """
    settle("get_chat_template", others, TEMPLATE, get_chat_template)
    if isinstance(chat_template, Sequence) and not isinstance(chat_template, str):
        chat_template = chat_template[0]  # a pair (template, end of a turn)
    name, mark = _FAMILIES.get(chat_template, (chat_template, None))
    fits = mark is not None and mark in (tokenizer.chat_template or "")
    stays = fits and name in _KEPT
    if mark is None or (name is not None and not stays and not missing_marks(tokenizer, name)):
        tokenizer.chat_template = asking_template(tokenizer, resolve_template(tokenizer, name))
        return tokenizer
    if not fits:
        fitting = ", ".join(map(repr, packaged_that_fit(tokenizer))) or "a tokenizer with the template's special tokens"
        raise ValueError(
            f"get_chat_template: chat_template = {chat_template!r} is not the template of this tokenizer, which has no "
            f"{mark}. Use its own, {fitting}, or the text of a template"
        )
    say(f"get_chat_template: {chat_template!r} is the tokenizer's own template, which stays")
    return tokenizer


def setup_chat_format[Model](
    model: Model, tokenizer: Any, format: str = "chatml", resize_to_multiple_of: int | None = None
) -> tuple[Model, Any]:
    """TRL's function: gives the tokenizer ChatML as its chat template, in place, with ChatML's marks as its bos_token
    (<|im_start|>) and its eos_token and pad_token (<|im_end|>), and returns (model, tokenizer). The model is not
    changed: no embeddings are added, so resize_to_multiple_of has no effect. A line is printed if the tokenizer had a
    template before. format: must be "chatml".

    Raises:
      ValueError: another format, or the tokenizer has no tokens for ChatML's marks, whose embeddings would be new.
    """
    del resize_to_multiple_of
    marks = ("<|im_start|>", "<|im_end|>")
    fitting = ", ".join(map(repr, packaged_that_fit(tokenizer))) or "one of its own, as text"
    instead = f"Instead: get_chat_template(tokenizer, NAME) with a template that fits it: {fitting}"
    if format != "chatml":
        raise ValueError(f"setup_chat_format: format = {format!r} is not supported; supported: 'chatml'. {instead}")
    known = tokenizer.get_vocab()
    if not all(mark in known for mark in marks):
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
    """Unsloth's: a new data set whose column `conversations` has messages, as rows are read: roles, contents, calls,
    thoughts and marks of training. In a data set of `datasets` the arguments of calls are JSON text, since all rows of
    a table have the same keys.

    Args:
      dataset: a datasets.Dataset or IterableDataset, a DatasetDict or IterableDatasetDict of splits (no plain dict), or
        a list of dicts, with a column conversations. Rows of an IterableDataset are changed as they are read.
      others: Unsloth's other arguments, which have no effect here.
    Raises:
      ValueError: an unknown argument, or a conversation that cannot be read.
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
        """The column of a row, in which every message has the same keys."""
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
    """The types of the keys of messages in a table."""
    from datasets import Value

    text, number, truth = Value("string"), Value("int64"), Value("bool")
    call = {"id": text, "type": text, "function": {"name": text, "arguments": text}}
    span = {"begin_offset": number, "end_offset": number, "train": truth}
    texts = dict.fromkeys(("role", "content", "reasoning_content", "name", "tool_call_id"), text)
    return {**texts, "tool_calls": [call], "train": truth, "train_detail": [span]}


standardize_data_formats = standardize_sharegpt
