"""Connections, their deadlines, and an end that loses no request: uvicorn with h11, and what they leave open."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import socket
import time
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any, Self

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime import Bundle
from runtime.errors import UsageError
from runtime.serving.app import LINGER, Service
from runtime.serving.limits import ServingLimits
from runtime.serving.protocol import ServedModel

LONGEST_HEAD = 16 * 1024
"""Bytes of a request's first line and headers."""
FRAMING = re.compile(rb"(?i)content-length: *[0-9]{1,18} *|transfer-encoding: *chunked *")
FRAMING_NAMES = (b"content-length", b"transfer-encoding")
BLANK_LINE = re.compile(rb"\n\r?\n")


class HttpServer:
    """A bundle bound to `port`, which answers while `run` runs."""

    def __init__(self, bundle: Bundle, host: str, port: int, limits: ServingLimits, log: bool) -> None:
        self._socket = _bind_socket(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._service = Service(ServedModel(bundle, limits.max_batch), limits)
        config = uvicorn.Config(
            self._service.app,
            http=partial(GuardedProtocol, self._service),  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="info" if log else "error",
            access_log=log,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=math.ceil(limits.request_timeout),
            timeout_graceful_shutdown=1,  # requests under way have been waited for before: `DrainingServer.on_tick`
        )
        self._server = DrainingServer(config, self._service)

    def run(self) -> bool:
        """Answer requests until a signal or `stop` says to end; False where the model was still computing then."""
        self._server.run([self._socket])
        return self._service.close()

    def stop(self) -> None:
        """End `run` as SIGTERM does, from any thread."""
        self._server.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        self._service.close()


class DrainingServer(uvicorn.Server):
    """Ends at a signal with exit code 0, once what is under way is answered or its time is over; at once at a second.

    Until then connections are taken: /v2/health/ready says 503 there, and so does every request that comes too late.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service, self._drain_end = service, 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end, or end. uvicorn's own raises the signal again afterwards, which no exit code 0 survives."""
        if self._service.draining:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.drain()

    def drain(self) -> None:
        """Take no further request."""
        self._drain_end = time.monotonic() + self._service.limits.drain_timeout
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end now."""
        await super().on_tick(counter)
        done = not self._service.under_way or time.monotonic() >= self._drain_end
        return self._service.draining and done


class GuardedProtocol(H11Protocol):
    """A connection that must bring a whole request in time, in one spelling, and is one of not too many."""

    def __init__(self, service: Service, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.conn = StrictConnection(h11.SERVER, LONGEST_HEAD)
        self._service = service
        self._deadline: asyncio.TimerHandle | None = None
        self._refused = False
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and give it time for its first request."""
        super().connection_made(transport)
        # asyncio sets it only where the socket says its protocol number, which one of socket.create_server does not;
        # without it the second write of an answer waits 40 ms for the acknowledgement of the first
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limits = self._service.limits
        beyond = len(self.connections) - limits.max_connections
        if beyond > limits.max_connections:
            transport.abort()  # not even a refusal: those that wait for theirs are as many as those that are served
            return
        if beyond > 0:
            self.app = self._service.busy_app
        self._start_deadline(limits.request_timeout if beyond <= 0 else min(1.0, limits.request_timeout))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read the data, or throw it away where the connection is about to end."""
        if not self._refused:
            super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep a connection whose client sends no more: while it waits for an answer."""
        self._half_closed = True
        return self._answer_waits()

    def _answer_waits(self) -> bool:
        whole = self.conn.their_state is not h11.SEND_BODY
        return self.cycle is not None and not self.cycle.response_complete and whole

    def shutdown(self) -> None:
        """Begin to end; a request that is on its way is told so, where closing would reset it."""
        if self.cycle is None or self.cycle.response_complete:
            self._start_deadline(LINGER)
        else:
            super().shutdown()

    def handle_events(self) -> None:
        """Read on; a request that is whole has met its deadline."""
        super().handle_events()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_deadline()

    def on_response_complete(self) -> None:
        """Give the connection time for its next request, and for taking the answer."""
        self._start_deadline(self._service.limits.request_timeout)
        super().on_response_complete()
        if self._half_closed and not self._answer_waits():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in JSON."""
        self._refuse_request(HTTPStatus.BAD_REQUEST, msg)

    def _start_deadline(self, seconds: float) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(seconds, self._end_late_connection)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_late_connection(self) -> None:
        began = self.conn.their_state is not h11.IDLE or bool(self.conn.trailing_data[0])
        if began and not self.transport.is_closing() and not self.transport.get_write_buffer_size():
            self._refuse_request(HTTPStatus.REQUEST_TIMEOUT, "the request did not come whole in time")
            return
        self.transport.close()
        self.loop.call_later(LINGER, self.transport.abort)  # where an answer is not taken, close waits for ever

    def _refuse_request(self, status: HTTPStatus, error: str) -> None:
        """Answer without the application, where no answer has begun, and close once the client has seen it."""
        self.logger.info("%s: %s", self.client, error)
        self._refused = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": error}).encode()
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            events = (
                h11.Response(status_code=status, headers=headers, reason=status.phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application's own answer has nowhere to go
            self.cycle.message_event.set()
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.abort)


class StrictConnection(h11.Connection):
    """h11, without what it forgives: servers in front may see another end of such a request than it does."""

    def next_event(self) -> Any:
        """Return the next event. RemoteProtocolError for a request where two servers could disagree where it ends."""
        data = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request):
            check_head(data)
        return event


def check_head(data: bytes) -> None:
    """Raise RemoteProtocolError unless the request at the beginning of `data` tells its length once, and plainly.

    h11 takes a length that is told twice alike, a length beside chunks, folded lines and lines without a carriage
    return, and a head of any size that comes at once.
    """
    end = BLANK_LINE.search(data)
    head = data[: end.end()] if end else data
    if len(head) > LONGEST_HEAD:
        raise h11.RemoteProtocolError(f"the request has more than {LONGEST_HEAD} bytes of headers")
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    framing = [line for line in lines[1:] if line.partition(b":")[0].strip().lower() in FRAMING_NAMES]
    folded = any(b"\n" in line or line[:1] in (b" ", b"\t") for line in lines)
    chunks_unknown = bool(framing) and framing[0][:1] in b"tT" and lines[0].endswith(b"HTTP/1.0")
    if folded or chunks_unknown or len(framing) > 1 or not all(map(FRAMING.fullmatch, framing)):
        raise h11.RemoteProtocolError("the request does not tell its length in one plain header")


def _bind_socket(host: str, port: int) -> socket.socket:
    """Open a socket that waits for connections. UsageError."""
    if not 0 <= port < 2**16:
        raise UsageError(f"{host}:{port} cannot be served: ports go from 0 to 65535; choose another --host or --port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{host}:{port} cannot be served: {error}; choose another --host or --port") from error
