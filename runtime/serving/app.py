"""Routes, the limits of requests, and the one thread that runs the model; an ASGI application in starlette."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.errors import RuntimeFailure, UsageError
from runtime.serving.limits import ServingLimits
from runtime.serving.protocol import EXTENSIONS, HttpAnswer, ServedModel

Call = Callable[[bytearray, int | None], HttpAnswer]
HEADER_LENGTH = "Inference-Header-Content-Length"
LINGER = 0.5
"""Seconds in which what a refused client still sends is read and thrown away: a connection that is closed while bytes
wait is reset, and the client never sees the answer."""


class Service:
    """A model behind HTTP: what is under way, and whether it is ending. `app` is the ASGI application."""

    def __init__(self, model: ServedModel, limits: ServingLimits) -> None:
        self.model, self.limits = model, limits
        self.draining = False
        self.under_way = 0
        """Requests for an answer of the model, from their head on."""
        self.computing = False
        self._late = False  # the model is computing for longer than `call_timeout`
        self._held = 0  # bytes of all bodies
        self._worker = ThreadPoolExecutor(1, "model")
        self._turn = asyncio.Lock()
        self.app: ASGIApp = CloseUnread(self._build_routes())
        self.busy_app: ASGIApp = CloseUnread(self._answer_busy)
        """For connections beyond the limit."""

    def close(self) -> bool:
        """End the model's thread; False where it is still computing, which nothing can stop."""
        self._worker.shutdown(wait=not self.computing, cancel_futures=True)
        return not self.computing

    def _build_routes(self) -> Starlette:
        routes = [
            Route("/v2", self._show_server),
            Route("/v2/health/live", self._show_live),
            Route("/v2/health/ready", self._show_ready),
        ]
        for version in ("", "/versions/1"):
            at = f"/v2/models/{{name}}{version}"
            routes += [
                Route(at, self._show_model),
                Route(f"{at}/ready", self._show_ready),
                Route(f"{at}/infer", self._infer, methods=["POST"]),
                Route(f"{at}/generate", self._generate, methods=["POST"]),
            ]
        app = Starlette(
            routes=routes,
            exception_handlers={
                HTTPException: self._answer_refusal,
                ClientDisconnect: self._answer_refusal,
                Exception: self._answer_defect,
            },
        )
        app.router.redirect_slashes = False  # it would build a URL of the client's Host header
        return app

    async def _show_server(self, request: Request) -> Response:
        return json_response(200, {"name": "compress", "version": "2", "extensions": EXTENSIONS})

    async def _show_live(self, request: Request) -> Response:
        return json_response(200, {})

    async def _show_ready(self, request: Request) -> Response:
        self._check_name(request)
        self._check_in_time()
        return self._refuse_new() if self.draining else json_response(200, {})

    async def _show_model(self, request: Request) -> Response:
        self._check_name(request)
        return json_response(200, self.model.metadata())

    async def _infer(self, request: Request) -> Response:
        return await self._answer(request, self.model.infer)

    async def _generate(self, request: Request) -> Response:
        return await self._answer(request, self.model.generate)

    async def _answer(self, request: Request, call: Call) -> Response:
        self._check_name(request)
        if self.draining:
            return self._refuse_new()
        self._check_in_time()
        _refuse_encoding(request)
        self.under_way += 1
        try:
            length = _read_header_length(request)
            async with self._read_body(request) as body, self._turn:
                if await request.is_disconnected():
                    raise ClientDisconnect  # nobody waits for the answer
                self._check_in_time()
                return await self._await_model(call, body, length)
        except MemoryError:
            return json_response(503, {"error": "there is not enough memory for this request; send less at once"})
        except asyncio.CancelledError:
            if not self.draining:
                raise
            return json_response(503, {"error": "the server ended before the model could answer"})
        finally:
            self.under_way -= 1

    async def _await_model(self, call: Call, body: bytearray, length: int | None) -> Response:
        """Return the model's answer. HTTPException 503 where it takes longer than it may: no thread can be ended."""
        work = asyncio.get_running_loop().run_in_executor(self._worker, self._compute, call, body, length)
        try:
            answer = await asyncio.wait_for(asyncio.shield(work), self.limits.call_timeout)
        except TimeoutError:
            self._late = True
            work.add_done_callback(self._note_answered)
            self._check_in_time()
            raise
        if self.draining:
            answer.headers["Connection"] = "close"
        return answer

    def _note_answered(self, work: object) -> None:
        self._late = False

    def _compute(self, call: Call, body: bytearray, length: int | None) -> Response:
        """Return the model's answer or refusal, as a response."""
        self.computing = True
        try:
            answer = call(body, length)
            if not answer.tensors:
                return Response(answer.header, media_type="application/json")
            headers = {HEADER_LENGTH: str(len(answer.header))}
            return Response(answer.header + b"".join(answer.tensors), 200, headers, "application/octet-stream")
        # raised out of the thread, an error would keep all that was read of its request until the next request
        except UsageError as error:
            return json_response(400, {"error": str(error)})
        except RuntimeFailure as error:
            return json_response(500, {"error": str(error)})
        finally:
            self.computing = False

    @asynccontextmanager
    async def _read_body(self, request: Request) -> AsyncIterator[bytearray]:
        """Keep the request's body while the context is open, counted while it comes.

        HTTPException 413, 503; ClientDisconnect.
        """
        limit, body = self.limits.max_body, bytearray()
        declared = request.headers.get("Content-Length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise HTTPException(413, f"the request has {declared} bytes, more than {limit}")
        try:
            async for chunk in request.stream():
                body += chunk
                self._held += len(chunk)
                if len(body) > limit:
                    raise HTTPException(413, f"the request has more than {limit} bytes")
                # what all bodies together may hold
                if self._held > 8 * limit:
                    raise HTTPException(503, "the server holds as many bytes of requests as it may; try again")
            yield body
        finally:
            self._held -= len(body)

    def _check_name(self, request: Request) -> None:
        if request.path_params.get("name", self.model.name) != self.model.name:
            raise HTTPException(404)

    def _refuse_new(self) -> Response:
        return json_response(503, {"error": "the server is ending"}, {"Connection": "close"})

    def _check_in_time(self) -> None:
        """Raise HTTPException 503 while the model computes for longer than it may."""
        if self._late:
            raise HTTPException(503, f"the model has been computing for over {self.limits.call_timeout:g} s")

    async def _answer_refusal(self, request: Request, error: Exception) -> Response:
        """Answer what is refused before it comes to the model."""
        if not isinstance(error, HTTPException):
            return json_response(400, {"error": "the client hung up"})  # and never sees this
        text = error.detail
        if error.status_code == 404:
            text = f"{request.scope['path']}: there is no such path; the model here is /v2/models/{self.model.name}"
        return json_response(error.status_code, {"error": text}, error.headers)

    async def _answer_defect(self, request: Request, error: Exception) -> Response:
        """Answer an error that nobody foresaw; starlette raises it again, for the log."""
        return json_response(500, {"error": "a defect of the server, which its log describes"})

    async def _answer_busy(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v2/health/"):
            await self.app(scope, receive, send)
            return
        text = f"{self.limits.max_connections} connections are open, and no more are served; try again"
        await json_response(503, {"error": text}, {"Connection": "close"})(scope, receive, send)


class CloseUnread:
    """Ends the connection after an answer that came before its request was read: what follows is no request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        framing = {name: value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
        unread = b"transfer-encoding" in framing or framing.get(b"content-length", b"0").strip(b"0") != b""

        async def receive_and_note() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)
            return message

        async def send_and_close(message: Message) -> None:
            if unread and message["type"] == "http.response.start":
                kept = [header for header in message["headers"] if header[0].lower() != b"connection"]
                message = {**message, "headers": [*kept, (b"connection", b"close")]}
            elif unread and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await _throw_away(receive_and_note)
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, receive_and_note, send_and_close)


async def _throw_away(receive: Receive) -> None:
    with suppress(TimeoutError, asyncio.CancelledError):  # cancelled at the server's end, where nothing else is left
        async with asyncio.timeout(LINGER):
            while (await receive()).get("more_body", False):
                pass


def json_response(status: int, answer: Any, headers: Any = None) -> Response:
    """Make a response; a long error is cut."""
    if "error" in answer:
        answer = {"error": answer["error"][:2000]}
    return Response(json.dumps(answer), status, headers, "application/json")


def _refuse_encoding(request: Request) -> None:
    """Raise HTTPException for a body that is compressed."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise HTTPException(415, f"Content-Encoding: {encoding} is not read here; send the body as it is")


def _read_header_length(request: Request) -> int | None:
    """Return how many bytes of the request are JSON; None: all. HTTPException."""
    declared = request.headers.get(HEADER_LENGTH)
    if declared is not None and not (declared.isascii() and declared.isdecimal() and len(declared) < 16):
        raise HTTPException(400, f"{HEADER_LENGTH} is no number of bytes")
    return int(declared) if declared is not None else None
