"""The ASGI application of the server (`make_app`). `_Guard` checks who may ask (API key, Host and Origin). `_Api` has a
handler for each route, such as /v1/chat/completions, and limits the time of an answer; `_body` reads a request, and
limits its size and the time in which it must arrive. An answer is made by `_whole` as one JSON object, or by `_events`
and sent by `_Stream`. `_error` turns an error into a response; the functions from `_refuse` to `_fault` are starlette's
exception handlers.

If a client closes its connection (`_unless_gone`), the answers that are generated for it (rows of the batch) are
cancelled, and their slots become free. A client that reads slowly delays nobody: generation does not wait for it, and
what it has not read waits in memory until the time limit, when the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Executor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxtune.serve.bodies import Asked, read_chat, read_completion
from jaxtune.serve.engine import Answers, Engine
from jaxtune.serve.errors import ApiError, encoded
from jaxtune.serve.forms import Answer
from jaxtune.serve.served import Served
from jaxtune.system.loopback import refusal
from jaxtune.system.terminal import say

_MOST_BODY_BYTES = 16 * 2**20
_BODY_SECONDS = 30.0  # within which a body must have arrived
_CLIENT_LEFT = 499  # the status that proxies log for it
_LAST_WORDS_SECONDS = 1.0  # for the error that ends a stream

type Reader = Callable[[object, Mapping[str, Served]], Asked]


def make_app(
    models: Mapping[str, Served], engine: Engine, key: str | None, local: bool, seconds: float, encoding: Executor
) -> ASGIApp:
    """Returns the ASGI application that answers all routes of the server.

    Args:
      models: the served models, by name.
      engine: the engine, which has a sampler for each of the models.
      key: the API key that every request except those to /health must bring; None: no key is needed.
      local: True: the server listens on a loopback address only, and the headers Host and Origin are checked, so that
        no web page in the user's browser can ask the server. False: they are not checked.
      seconds: the time from when a request's body has arrived until its answer has been made, and, if it is streamed,
        been read by the client. A later answer fails with error 504, which is the last event of a stream that is being
        sent.
      encoding: its one thread tokenises prompts, also while it still does for a request that has run out of time.
    """
    api = _Api(models, engine, seconds, encoding)
    app = Starlette(
        routes=[
            Route("/health", api.health),
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.one_model),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
        ],
        exception_handlers={ApiError: _refuse, HTTPException: _not_found, ClientDisconnect: _left, Exception: _fault},
    )
    return _Guard(app, key, local)


class Json(Response):
    """A response whose content, any JSON value, is encoded by `errors.encoded`, which does not fail on any text.
    starlette's JSONResponse fails on lone surrogates, which UTF-8 cannot encode. Every response of
    the application that has a body and is not a stream is one."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Encodes `content`, a JSON value, as the bytes of the response's body, in UTF-8. Lone surrogates in its texts,
        which UTF-8 cannot encode, are written as escapes, and NaN and infinities as null. Of log-probabilities only NaN
        becomes null: forms.py has replaced minus infinity by -9999. starlette calls it."""
        return encoded(content)


def _error(error: ApiError) -> Json:
    """Makes the response for an ApiError: its HTTP status, and a body in OpenAI's form of an error; for 401 also the
    header WWW-Authenticate. The exception handlers except `_left`, and `_Guard`, call it."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return Json(error.body(), error.status, headers)


async def _refuse(_: Request, error: Exception) -> Response:
    """The exception handler that starlette calls for an ApiError (`error`) that a handler of a route raises: returns a
    response with its status, and a body in OpenAI's form of an error."""
    assert isinstance(error, ApiError)
    return _error(error)


async def _not_found(request: Request, error: Exception) -> Response:
    """The exception handler for starlette's HTTPException (`error`), which it raises for an unknown path (404) or a
    method that the path does not have (405): returns a response with the same status, and a body in OpenAI's form of an
    error, whose message names the method and path of `request`, and what is wrong."""
    assert isinstance(error, HTTPException)
    return _error(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def _left(_: Request, error: Exception) -> Response:
    """The exception handler for starlette's ClientDisconnect (`error`, not used): the client closed the connection
    before its request had arrived whole. It returns an empty response with status 499, which nobody reads."""
    return Response(status_code=_CLIENT_LEFT)  # nobody reads it


async def _fault(_: Request, error: Exception) -> Response:
    """The exception handler for an exception (`error`) that has no other handler: prints its traceback on the server's
    stderr, and returns a response with status 500 whose message has only the exception's type."""
    return _error(_reported(error))


def _reported(error: Exception) -> ApiError:
    """Prints the traceback of an unexpected error on stderr, and returns the ApiError (500) for the client, which has
    only the name of its type. `_fault` calls it, and `_Stream` for an error while it sends."""
    say("jaxtune: a request failed:\n" + "".join(traceback.format_exception(error)), file=sys.stderr)
    return ApiError(500, f"the server failed: {type(error).__name__}")


class _Guard:
    """The outermost ASGI layer. Called with each request, it answers one with a wrong API key (401), or a wrong Host or
    Origin (403), itself, and passes all others to the application.

    Args:
      app: the application behind it.
      key: the API key that every request except those to /health must bring; None: no key is needed.
      local: True: the headers Host and Origin are checked, because the server listens on a loopback address only.
        False: they are not.
    """

    def __init__(self, app: ASGIApp, key: str | None, local: bool):
        self._app, self._key, self._local = app, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an HTTP request that `_refused` refuses with its error; passes everything else to the application.
        The arguments are those of ASGI: what is asked, and the functions that receive from and send to the client."""
        if scope["type"] == "http":
            error = self._refused(Request(scope))
            if error is not None:
                await _error(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refused(self, request: Request) -> ApiError | None:
        """Returns the error for a request that must not be answered, or None if it may be. With `local`, a missing
        Host, or a Host or Origin that is not this machine, is a 403, also for /health. With a key, a missing or wrong
        one ("Authorization: Bearer KEY") is a 401, except for /health, which needs none. Keys are compared in constant
        time, so that the time does not show how many characters of a key are right. They are compared as bytes: the
        header, which starlette decodes as Latin-1, is encoded so again, and `key` as UTF-8."""
        why = refusal(request.headers.get("host"), request.headers.get("origin")) if self._local else None
        if why is not None:
            return ApiError(403, why)
        if self._key is None or request.url.path == "/health":
            return None
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        right = kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key.encode())
        return None if right else ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


class _Api:
    """The handlers of the server's routes: each public method takes a request and returns the response.

    Args:
      models: the served models, by name.
      engine: the engine, which samples the answers.
      seconds: the time from when a request's body has arrived until its answer has been made, and, if it is streamed,
        been read by the client. A later answer fails with error 504.
      encoding: tokenises prompts, for one request at a time.
    """

    def __init__(self, models: Mapping[str, Served], engine: Engine, seconds: float, encoding: Executor):
        self._models, self._engine, self._seconds, self._encoding = models, engine, seconds, encoding
        self._began = int(time.time())

    async def health(self, _: Request) -> Response:
        """GET /health: 200 with {"status": "ok"}; or 503 with {"status": "failing", "error"} if the engine failed in
        its last round (of any model), or in starting a request since; it stays so until a round succeeds. It needs no
        API key: a supervisor or load balancer asks it whether the server works."""
        if self._engine.failure is not None:
            return Json({"status": "failing", "error": self._engine.failure}, 503)
        return Json({"status": "ok"})

    async def list_models(self, _: Request) -> Response:
        """GET /v1/models: OpenAI's list of all served models, in the order of `models`: the base model first and then
        its adapters. Clients find in it the names for `model` in their requests."""
        return Json({"object": "list", "data": [self._card(served) for served in self._models.values()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME: OpenAI's JSON object of one model, whose NAME is in the path of `request`. Raises
        ApiError (404) if none has the name, which may contain slashes."""
        name = request.path_params["name"]
        if name not in self._models:
            raise ApiError(404, f"model {name!r}: there are {', '.join(self._models)}", "model", "model_not_found")
        return Json(self._card(self._models[name]))

    def _card(self, served: Served) -> dict[str, object]:
        """OpenAI's JSON object of a served model, for `list_models` and `one_model`, with two more keys: `parent` is
        the name of an adapter's base model (null for the base itself), and `max_model_len` the most tokens of a prompt
        with its answer, as vLLM names it. `created` is the time at which the server was made."""
        card = {"id": served.name, "object": "model", "created": self._began, "owned_by": "jaxtune"}
        return card | {"parent": served.base, "max_model_len": self._engine.plans[served.name].length}

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions: answers a conversation (messages), whole or as a stream, as the body asks. Returns
        a JSON response, or an empty one (499) if the client left before that was made; or a stream of events. Raises
        ApiError for a wrong body, rows that the engine refuses, an engine that fails or stops, or an answer that takes
        too long; in a stream that is being sent, the latter two are its last event."""
        return await self._answer(request, read_chat)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions: continues a prompt, or several, whole or as a stream, as the body asks. Returns a JSON
        response, or an empty one (499) if the client left before that was made; or a stream of events. Raises ApiError
        for a wrong body, rows that the engine refuses, an engine that fails or stops, or an answer that takes too long;
        in a stream that is being sent, the latter two are its last event."""
        return await self._answer(request, read_completion)

    async def _answer(self, request: Request, read: Reader) -> Response:
        """Answers a request, whole or as a stream, as its body asks. If the client leaves before a whole answer is
        made, its rows (the sequences that the engine samples for it) are cancelled, and the response is empty with
        status 499. A stream is returned as soon as its rows are submitted. starlette then sends it, and a later error
        is its last event. `chat` and `completions` call it. Prompts are tokenised in a thread, because that may
        take seconds, and for one request at a time, because two threads must not encode with one tokenizer at once.

        Args:
          request: the request, whose body was not read yet.
          read: the function that checks the body and makes an Asked of it: read_chat or read_completion.
        Raises:
          ApiError: the body is wrong, too large or late; the engine refuses the rows; the engine fails or stops, or
            (504) the time is over, before a whole answer is made or the rows of a stream are submitted.
          ClientDisconnect: the client left before its body had arrived; `_left` answers it.
        """
        body = await self._engine.unless_ended(_body(request))
        deadline = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(deadline):
                loop = asyncio.get_running_loop()
                reading = loop.run_in_executor(self._encoding, read, body, self._models)
                asked = await self._engine.unless_ended(reading)
                answers = await self._engine.submit(asked.served.name, asked.rows)
        except TimeoutError:
            raise self._too_late() from None
        if asked.stream:
            return _Stream(_events(asked, answers), answers, deadline, self._too_late())
        with contextlib.closing(answers):
            try:
                async with asyncio.timeout_at(deadline):
                    form = await _unless_gone(request.receive, _whole(asked, answers))
            except TimeoutError:
                raise self._too_late() from None
        return Response(status_code=_CLIENT_LEFT) if form is None else Json(form)

    def _too_late(self) -> ApiError:
        """The error (504) of an answer that is not complete, or, if it is streamed, not read, within the server's time
        limit. `_answer` raises it, for a stream only before its rows are submitted, and gives it to `_Stream` for the
        time after that."""
        message = f"the answer was not made and read within {self._seconds:g} s: ask for fewer tokens (max_tokens)"
        return ApiError(504, message, code="timeout")


async def _body(request: Request) -> object:
    """Reads a request's body and returns its decoded JSON, which read_chat or read_completion then checks.

    Raises:
      ApiError: 413 for more than 16 MiB, 408 for a body that does not arrive within 30 s, 400 for what is not JSON.
      ClientDisconnect: the client closed the connection before the body had arrived.
    """
    too_large = ApiError(413, f"the body has more than {_MOST_BODY_BYTES:,} bytes: send less", code="too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > _MOST_BODY_BYTES:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in request.stream():
                data += piece
                if len(data) > _MOST_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:g} s") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ApiError(400, f"the body is not JSON: {error}") from None


async def _whole(asked: Asked, answers: Answers) -> dict[str, object]:
    """For `_answer`: waits until all answers to a request that is not streamed are complete, and returns OpenAI's JSON
    object of the response. asked: what the request asks for. answers: the queue through which the engine's thread hands
    over the tokens, which the caller closes. Raises ApiError if the engine fails or the server stops."""
    answer = Answer(asked)
    while answers.left:
        answer.add(*await answers.next())
    return answer.whole()


async def _events(asked: Asked, answers: Answers) -> AsyncIterator[dict[str, object]]:
    """For `_Stream`: yields OpenAI's JSON objects (chunks) of a streamed response, as its tokens arrive. asked: what
    the request asks for. answers: the queue through which the engine's thread hands over the tokens, which `_Stream`
    closes. Raises ApiError if the engine fails or the server stops."""
    answer = Answer(asked)
    for chunk in answer.first_chunks():
        yield chunk
    while answers.left:
        for chunk in answer.chunks(*await answers.next()):
            yield chunk
    for chunk in answer.last_chunks():
        yield chunk


async def _unless_gone[T](receive: Receive, work: Coroutine[object, object, T]) -> T | None:
    """Awaits `work` and returns its result, or raises its error. If the client closes its connection first, `work` is
    cancelled and None is returned. The caller then closes the request's Answers, so that no slot decodes for a client
    that is gone.

    Args:
      receive: the request's ASGI function that returns the client's messages, of which a disconnect is one.
      work: the coroutine that makes or sends the answer.
    """

    async def gone() -> None:
        """Ends when the client has closed its connection; what else it sends is dropped."""
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    tasks = working, asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _Stream(Response):
    """A response that sends an answer as server-sent events while it is made. It ends with [DONE], or with an error as
    its last event. If the client closes the connection, sending ends.

    Args:
      events: yields the JSON objects, one for each event.
      answers: the request's rows in the engine. It is closed when the response ends, however it ends, which cancels
        those that are not complete.
      deadline: the time, in seconds of the event loop's clock, at which the stream is cut off.
      too_late: the error that is then sent as its last event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[object], answers: Answers, deadline: float, too_late: ApiError):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._answers, self._deadline, self._too_late = events, answers, deadline, too_late

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream, as ASGI calls a response. It ends early if the client closes the connection. In any case
        the answers are closed afterwards. `scope` is not used."""
        with contextlib.closing(self._answers):
            await _unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        """Sends all events and then [DONE], each by the ASGI function `send`. If the deadline passes, the last event is
        the error `too_late`. If an ApiError is raised, it is the last event; any other exception is printed on stderr
        and sent as error 500. None of these is raised again, and [DONE] does not follow them. An OSError, with which
        the client is gone, ends the stream without an event and is not raised; a cancellation (`_unless_gone`) is. The
        error event has one second to be sent: if the client does not read, the body stays incomplete, and the server
        closes the connection."""

        async def say_event(data: bytes) -> None:
            """Sends `data`, a JSON text in UTF-8 or [DONE], as one server-sent event."""
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

        try:
            async with asyncio.timeout_at(self._deadline):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for event in self._events:
                    await say_event(encoded(event))
                await say_event(b"[DONE]")
                await send({"type": "http.response.body", "body": b""})
                return
        except TimeoutError:
            error = self._too_late
        except ApiError as failed:
            error = failed
        except OSError:  # the client went away
            return
        except Exception as fault:
            error = _reported(fault)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await say_event(encoded(error.body()))
                await send({"type": "http.response.body", "body": b""})
