"""The ASGI application of the server.

If a client closes its connection, the rows that are generated for it are cancelled, and their slots become free. A slow
client delays nobody: what it has not read waits in memory until the time limit, when the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxtune.models.generation.requests import Piece
from jaxtune.serve.engine import Answers, Engine, PromptScores
from jaxtune.serve.errors import ApiError, encoded, panics
from jaxtune.serve.forms import Answer, ResponsesAnswer, answer_to
from jaxtune.serve.loading import AdapterFolder
from jaxtune.serve.metrics import Metrics, Progress
from jaxtune.serve.page import page
from jaxtune.serve.readers import Readers
from jaxtune.serve.reading import Reading
from jaxtune.serve.requests import ParsedRequest, Row
from jaxtune.serve.served import ServedModel
from jaxtune.serve.shares import Shares
from jaxtune.system.loopback import refusal
from jaxtune.system.terminal import say

_MOST_BODY_BYTES = 16 * 2**20
_MOST_BODIES_BYTES = 16 * _MOST_BODY_BYTES  # of all that arrive or wait to be read, by address
_MOST_PICTURES_BYTES = 4 << 30  # of patches, of all requests whose answers are made
_MOST_GRAMMARS_BYTES = 1 << 30  # of what is compiled, of all requests whose answers are made
_BODY_SECONDS = 30.0  # within which a body must have arrived
_CLIENT_LEFT = 499  # the status that proxies log for it
_OPEN = {"/", "/health"}  # answered without the key
_LAST_WORDS_SECONDS = 1.0  # for the error that ends a stream


def make_app(
    engine: Engine, key: str | None, local: bool, seconds: float, readers: Readers, folder: AdapterFolder | None
) -> ASGIApp:
    """The ASGI application with all routes of the server.

    engine: has the models, and decodes the answers to their requests.
    key: the API key of all requests but those for / and /health; None: no key.
    local: the server listens on a loopback address only: Host and Origin are checked, so that no web page in the
      user's browser can ask it.
    seconds: from the arrival of a body until its answer has been made and, if streamed, read; else error 504.
    readers: read the bodies.
    folder: of adapters that clients may load; None: they may not.
    """
    api = _Api(engine, seconds, readers, folder)
    app = Starlette(
        routes=[
            Route("/", api.page),
            Route("/health", api.health),
            Route("/v1/models", api.list_models),
            Route("/v1/models/{name:path}", api.one_model),
            Route("/v1/load_lora_adapter", api.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", api.unload_adapter, methods=["POST"]),
            Route("/v1/chat/completions", api.answer, methods=["POST"]),
            Route("/v1/completions", api.answer, methods=["POST"]),
            Route("/v1/responses", api.answer, methods=["POST"]),
            Route("/tokenize", api.tokens, methods=["POST"]),
            Route("/detokenize", api.tokens, methods=["POST"]),
            Route("/metrics", api.metrics),
        ],
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _not_found,
            ClientDisconnect: _client_gone,
            Exception: _fault,
        },
    )
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    return _Counted(_Guard(app, key, local), api.numbers, paths)


class Json(Response):
    """A JSON response that does not fail on lone surrogates, unlike starlette's JSONResponse."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encoded(content)


def _error(error: ApiError) -> Json:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return Json(error.body(), error.status, headers)


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _not_found(request: Request, error: Exception) -> Response:
    """An unknown path (404) or method (405) in OpenAI's form."""
    assert isinstance(error, HTTPException)
    return _error(ApiError(error.status_code, f"{request.method} {request.scope['path']}: {error.detail}"))


async def _client_gone(_: Request, error: Exception) -> Response:
    """The client closed the connection before its request had arrived whole."""
    return Response(status_code=_CLIENT_LEFT)  # nobody reads it


async def _fault(_: Request, error: Exception) -> Response:
    return _error(_reported(error))


def _reported(error: Exception) -> ApiError:
    """Prints an unexpected error's traceback on stderr; the client gets only the name of its type (500)."""
    say("jaxtune: a request failed:\n" + "".join(traceback.format_exception(error)), file=sys.stderr)
    return ApiError(500, f"the server failed: {type(error).__name__}")


class _Counted:
    """Counts answers by path and status."""

    def __init__(self, app: ASGIApp, numbers: Metrics, paths: set[str]):
        self._app, self._numbers, self._paths = app, numbers, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._numbers.request(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting)


class _Guard:
    """The outermost ASGI layer: refuses a wrong API key (401), Host or Origin (403)."""

    def __init__(self, app: ASGIApp, key: str | None, local: bool):
        self._app, self._key, self._local = app, key, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refused(Request(scope))
            if error is not None:
                await _error(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refused(self, request: Request) -> ApiError | None:
        """The error for a request that must not be answered: Host and Origin for all paths, the key but for _OPEN."""
        origins = ", ".join(request.headers.getlist("origin")) or None  # browsers send one
        why = refusal(request.headers.get("host"), origins) if self._local else None
        if why is not None:
            return ApiError(403, why)
        # Not of `request.url`, which is made of the header Host too.
        trusted = request.state.trusted = self._key is None or _brings(request, self._key)
        if trusted or request.scope["path"] in _OPEN:
            return None
        return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


def _brings(request: Request, key: str) -> bool:
    """Whether a request has the key, compared in constant time."""
    kind, _, presented = request.headers.get("authorization", "").partition(" ")
    return kind.lower() == "bearer" and hmac.compare_digest(presented.strip().encode("latin-1"), key.encode())


class _Api:
    """The handlers of the routes."""

    def __init__(self, engine: Engine, seconds: float, readers: Readers, folder: AdapterFolder | None):
        self._engine, self._seconds, self._readers, self._folder = engine, seconds, readers, folder
        self._changes = asyncio.Lock()  # of the models
        self.numbers = Metrics(engine)
        self._bodies, self._pictures = Shares(_MOST_BODIES_BYTES), Shares(_MOST_PICTURES_BYTES)
        self._grammars = Shares(_MOST_GRAMMARS_BYTES)
        self._forms = ThreadPoolExecutor(2, "answers")
        self._began = int(time.time())

    async def page(self, _: Request) -> Response:
        """GET /: chats with the models in a browser."""
        return page()

    async def health(self, request: Request) -> Response:
        """GET /health: 200, or 503 from a failed round of the engine until one succeeds."""
        if self._engine.failure is None:
            return Json({"status": "ok"})
        error = {"error": self._engine.failure} if request.state.trusted else {}
        return Json({"status": "failing", **error}, 503)

    async def metrics(self, _: Request) -> Response:
        """GET /metrics, in Prometheus' text form."""
        return Response(self.numbers.text(), media_type="text/plain; version=0.0.4")

    async def tokens(self, request: Request) -> Response:
        """POST /tokenize and /detokenize."""
        answer, _ = await self._read(request)
        return Response(await self._in_thread(lambda: encoded(answer, large=True)), media_type=Json.media_type)

    async def list_models(self, _: Request) -> Response:
        """GET /v1/models: the base model first, then its adapters."""
        return Json({"object": "list", "data": [self._card(served) for served in self._engine.models.values()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME, where NAME may contain slashes; ApiError (404) for an unknown one."""
        return Json(self._card(self._engine.served(request.path_params["name"])))

    def _card(self, served: ServedModel) -> dict[str, object]:
        """OpenAI's JSON of a model, with `parent` (an adapter's base) and vLLM's `max_model_len` (prompt and
        answer).
        """
        card = {"id": served.name, "object": "model", "created": self._began, "owned_by": "jaxtune"}
        return card | {"parent": served.base, "max_model_len": self._engine.plan.length}

    async def load_adapter(self, request: Request) -> Response:
        """POST /v1/load_lora_adapter: adds an adapter of the server's folder to the models, while others answer."""
        folder, values = self._folder_of_adapters(), await self._values(request)
        name, path = str(values["lora_name"]), str(values["lora_path"])
        async with self._changes:
            models = self._engine.models
            if name in models:
                message = f"lora_name = {name!r}: is served already: unload it first, or take another name"
                raise ApiError(400, message, "lora_name", "invalid_value")
            base = next(served for served in models.values() if served.base is None)
            served, adapter = await self._engine.unless_ended(asyncio.to_thread(folder.load, base, name, path))
            await self._engine.load(served, adapter)
            await self._tell_readers()
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: takes an adapter off the models; answers under way go on."""
        self._folder_of_adapters()
        name = str((await self._values(request))["lora_name"])
        async with self._changes:
            await self._engine.unload(name)
            self.numbers.forget(name)
            await self._tell_readers()
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    def _folder_of_adapters(self) -> AdapterFolder:
        if self._folder is None:
            message = "adapters are neither loaded nor unloaded: start the server with --adapters-below FOLDER"
            raise ApiError(403, message, code="forbidden")
        return self._folder

    async def _values(self, request: Request) -> dict[str, object]:
        values, _ = await self._read(request)
        assert isinstance(values, dict)
        return values

    async def _tell_readers(self) -> None:
        models = {name: served.readable for name, served in self._engine.models.items()}
        await asyncio.to_thread(self._readers.serve, models)

    async def answer(self, request: Request) -> Response:
        """Answers a request, whole or as a stream, whose last event an error is."""
        with contextlib.ExitStack() as arrival:
            arrival.enter_context(self._engine.arrival())
            return await self._answered(request, arrival)

    async def _answered(self, request: Request, arrival: contextlib.ExitStack) -> Response:
        """`answer`; closes `arrival` when the rows are submitted."""
        request_values, arrived = await self._read(request)
        assert isinstance(request_values, ParsedRequest)
        deadline = arrived + self._seconds
        served = self._engine.served(request_values.model)
        progress = self.numbers.answer(served.name, request_values.prompt_tokens, arrived)
        answer = answer_to(request_values, served)  # before there are rows that an error would leave behind
        client = request_values.client or _host(request)
        with contextlib.ExitStack() as held:
            for kind, shares, size in (
                ("pictures", self._pictures, request_values.picture_bytes),
                ("grammars", self._grammars, request_values.grammar_bytes),
            ):
                if not shares.take(client, size):
                    raise ApiError(429, f"{kind} of requests fill the memory for them: ask again later", code="busy")
                held.callback(shares.give_back, client, size)
            try:
                async with asyncio.timeout_at(deadline):
                    rows = request_values.rows
                    if any(row.grammar is not None for row in rows):
                        rows = await self._in_thread(lambda: _constrained(request_values, served))
                    arrival.close()
                    answers = await self._engine.submit(served.name, rows, client)
            except TimeoutError:
                raise self._too_late() from None
            held.callback(answers.close)
            if request_values.stream:
                frames = self._events(answer, answers, progress)
                return _Stream(frames, held.pop_all(), deadline, self._too_late(), answer.error_frame)
            try:
                async with asyncio.timeout_at(deadline):
                    data = await _unless_gone(request.receive, self._whole(answer, answers, progress))
            except TimeoutError:
                raise self._too_late() from None
        return Response(status_code=_CLIENT_LEFT) if data is None else Response(data, media_type=Json.media_type)

    async def _read(self, request: Request) -> tuple[Reading, float]:
        """What a request asks for, and when its body had arrived."""
        length, host = 0, _host(request)

        def count(arrived_bytes: int) -> None:
            nonlocal length
            if not self._bodies.take(host, arrived_bytes):
                raise ApiError(429, "bodies of requests fill the memory for them: ask again later", code="busy")
            length += arrived_bytes

        try:
            data = await self._engine.unless_ended(_body(request, count))
            arrived = asyncio.get_running_loop().time()
            lengths = dict.fromkeys(self._engine.models, self._engine.plan.length)
            async with asyncio.timeout_at(arrived + self._seconds):
                reading = self._readers.read(request.scope["path"], data, lengths, host, count)
                return await self._engine.unless_ended(reading), arrived
        except TimeoutError:
            raise self._too_late() from None
        finally:
            self._bodies.give_back(host, length)

    async def _whole(self, answer: Answer | ResponsesAnswer, answers: Answers, progress: Progress) -> bytes:
        while answers.left:
            for index, piece in await answers.ready():
                progress.add(_new_tokens(piece))
                with panics():
                    answer.add(index, piece)
        progress.end(answer.usage)
        return await self._in_thread(lambda: encoded(answer.whole(), large=True))

    async def _events(
        self, answer: Answer | ResponsesAnswer, answers: Answers, progress: Progress
    ) -> AsyncIterator[bytes]:
        """What is ready at the same time comes together, as each write takes long."""
        if first := b"".join(map(answer.frame, answer.first_chunks())):
            yield first
        frames: list[bytes] = []
        while answers.left:
            for index, piece in await answers.ready():
                progress.add(_new_tokens(piece))
                make = functools.partial(_frames, answer, index, piece)
                frames += await self._in_thread(make) if answer.is_large else make()
            if frames and answers.left:
                yield b"".join(frames)
                frames = []
        progress.end(answer.usage)
        yield b"".join((*frames, *map(answer.frame, answer.last_chunks()), answer.last_frame))

    async def _in_thread[T](self, make: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._forms, make)

    def _too_late(self) -> ApiError:
        message = f"the answer was not made and read within {self._seconds:g} s: ask for fewer tokens (max_tokens)"
        return ApiError(504, message, code="timeout")


def _host(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _constrained(request_values: ParsedRequest, served: ServedModel) -> list[Row]:
    try:
        with panics():
            return served.constrained(request_values)
    except ValueError as error:
        raise ApiError(400, f"the grammar is not followed: {error}", code="invalid_value") from None


def _new_tokens(piece: Piece | PromptScores) -> int:
    return len(piece.ids) if isinstance(piece, Piece) else 0


def _frames(answer: Answer | ResponsesAnswer, index: int, piece: Piece | PromptScores) -> list[bytes]:
    with panics():
        return [*map(answer.frame, answer.chunks(index, piece))]


async def _body(request: Request, count: Callable[[int], None]) -> bytes:
    """A request's body; ApiError for more than 16 MiB (413), over 30 s (408), or of `count`."""
    too_large = ApiError(413, f"the body has more than {_MOST_BODY_BYTES:,} bytes: send less", code="too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > _MOST_BODY_BYTES:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in request.stream():
                count(len(piece))
                data += piece
                if len(data) > _MOST_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:g} s") from None
    return bytes(data)


async def _unless_gone[T](receive: Receive, work: Coroutine[object, object, T]) -> T | None:
    """The result of `work`; None if the client closes its connection first, which cancels `work`."""

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
    """An answer as server-sent events while it is made, an error as the last one; `held` is closed at its end."""

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        held: contextlib.ExitStack,
        deadline: float,
        too_late: ApiError,
        error_frame: Callable[[ApiError], bytes],
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._frames, self._held, self._deadline, self._too_late = frames, held, deadline, too_late
        self._error_frame = error_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await _unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        """Sends all events; an error is the last one, which has one second."""

        async def say_frame(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async with asyncio.timeout_at(self._deadline):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for frame in self._frames:
                    await say_frame(frame)
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
                await say_frame(self._error_frame(error))
                await send({"type": "http.response.body", "body": b""})
