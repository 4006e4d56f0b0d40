"""The process that reads requests' bodies: JSON, checks, the chat template, tokens, pictures. It has no device and no
JAX.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping

from jaxtune.models.files import transformers_import
from jaxtune.serve import bodies
from jaxtune.serve.bodies import Lengths, Models, Unfetched
from jaxtune.serve.errors import ApiError, panics
from jaxtune.serve.requests import ParsedRequest
from jaxtune.serve.responses import read_responses
from jaxtune.serve.trials import limit_memory
from jaxtune.system import children
from jaxtune.system.terminal import say

MEMORY_BYTES = 2 << 30  # that one request may take
type Reading = ParsedRequest | dict[str, object]

READS: dict[str, Callable[[object, Models, Lengths], Reading]] = {
    "/v1/chat/completions": bodies.read_chat,
    "/v1/completions": bodies.read_completion,
    "/v1/responses": read_responses,
    "/tokenize": bodies.read_tokenize,
    "/detokenize": bodies.read_detokenize,
    "/v1/load_lora_adapter": bodies.read_load,
    "/v1/unload_lora_adapter": bodies.read_unload,
}


def serve(descriptor: int, parent: int) -> None:
    """Answers messages of the socket `descriptor`: first the models, then these again or (path, body, lengths,
    contents of addresses). Dies
    with the thread that started it.
    """
    if (connection := children.attach(descriptor, parent)) is None:
        return
    with transformers_import.without_torch() as transformers:
        _ = transformers.PreTrainedTokenizerFast  # which pickles of tokenizers need, imported before they arrive
        message = children.receive(connection)
        if message is None:
            return
        models = _prepared(pickle.loads(message))
    limit_memory(MEMORY_BYTES)
    children.send(connection, b"")
    while (message := children.receive(connection)) is not None:
        value = pickle.loads(message)
        if isinstance(value, dict):
            _end_trials(models)
            models = _prepared(value)
            children.send(connection, b"")
        else:
            *asked, contents = value
            now = _with_contents(models, contents) if contents else models
            children.send(connection, pickle.dumps(_answer(now, *asked)))


def _with_contents(models: Models, contents: Mapping[str, bytes | str]) -> Models:
    """contents: of pictures' addresses, which a reader does not wait for."""
    found = dict(models)
    for name, model in models.items():
        if (pictures := model.pictures) is not None:
            pictures = dataclasses.replace(pictures, access=dataclasses.replace(pictures.access, contents=contents))
            found[name] = dataclasses.replace(model, pictures=pictures)
    return found


def _end_trials(models: Models) -> None:
    for model in models.values():
        if model.trials is not None:
            model.trials.close()


def _prepared(models: Models) -> Models:
    models = bodies.with_trials(_with_contents(models, {}))
    for model in models.values():
        if model.tokenizer.chat_template:
            model.reader(tools=False)
        if model.pictures is not None:
            _ = model.pictures.processor.size  # which imports the image processor
    return models


def _answer(models: Models, path: str, data: bytes, lengths: Lengths) -> Reading | tuple:
    """What the body asks for, an ApiError's arguments, or the addresses of pictures that have to be fetched before."""
    try:
        with panics():
            return READS[path](_decoded(data), models, lengths)
    except Unfetched as missing:
        return missing.addresses
    except ApiError as error:
        return error.status, error.message, error.param, error.code
    except MemoryError:
        return 400, f"reading the body takes more than {MEMORY_BYTES >> 30} GiB of memory: send less"
    except Exception as error:
        say("jaxtune: a body was not read:\n" + "".join(traceback.format_exception(error)), file=sys.stderr)
        return 500, f"the server failed: {type(error).__name__}"


def _decoded(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}") from None
