"""What a server bears: spellings that hide a second request, clients that are slow, too many or gone, and its end."""

from __future__ import annotations

import json
import logging
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime.errors import MissingDependency, UsageError
from runtime.serving import ServingLimits, serve
from runtime.serving.server import HttpServer

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
INFER = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the server logs; where another test has given the root logger a stream, none of it comes to stderr."""
    handler = logging.Handler()
    messages: list[str] = []
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@contextmanager
def running(folder: Path, ends: bool | None = True, **limits: Any) -> Iterator[HttpServer]:
    """A server that answers from a thread; `ends`: what its `run` must give."""
    gave = []
    with runtime.open_bundle(folder) as bundle, serve(bundle, port=0, limits=ServingLimits(**limits)) as server:
        thread = threading.Thread(target=lambda: gave.append(server.run()))
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(30)
    assert gave == [ends]


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def connected(server: HttpServer, data: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(data)
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def read_answer(connection: socket.socket) -> tuple[int, Any]:
    """One answer, the connection stays."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1)
    length = int(data.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(data.split(b" ")[1]), json.loads(body)


def pixels(n: int = 1) -> bytes:
    about = {"name": "image", "shape": [n, 4, 4, 3], "datatype": "UINT8", "data": [7] * 48 * n}
    return json.dumps({"inputs": [about]}).encode()


def whole(body: bytes) -> bytes:
    return INFER + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event, list[int]]]:
    """A model that waits: (it began, let it go on, the calls)."""
    began, go_on, calls = threading.Event(), threading.Event(), []
    predict = runtime.Bundle.predict

    def wait(self: runtime.Bundle, *arguments: Any, **more: Any) -> Any:
        calls.append(1)
        began.set()
        assert go_on.wait(30)
        return predict(self, *arguments, **more)

    monkeypatch.setattr(runtime.Bundle, "predict", wait)
    yield began, go_on, calls
    go_on.set()


@pytest.fixture
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("app", "server"):
        monkeypatch.setattr(f"runtime.serving.{module}.LINGER", 0.05)


FRAMINGS = [
    "Content-Length: 5\r\nContent-Length: 50",
    "Content-Length: 5\r\nContent-Length: 5",
    "Content-Length: 5, 5",
    "Content-Length : 5",
    "Content-Length\t: 5",
    "Content-Length:\t5",
    "Content-Length: +5",
    "Content-Length: -1",
    "Content-Length: 0x5",
    "Content-Length: many",
    "Content-Length: " + "9" * 5000,
    "Content-Length: 5\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 5",
    "Transfer-Encoding:\tchunked",
    "Transfer-Encoding: \tchunked",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding: chunked, identity",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "X: y\r\n Content-Length: 5",
    "X: y\nContent-Length: 5",
]


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    from tests.runtime.conftest import write_image_bundle

    columns = {"image": np.zeros((7, 4, 4, 3), np.uint8), "label": np.zeros(7, np.int64)}
    with running(write_image_bundle(tmp_path_factory.mktemp("served") / "bundle", columns)) as server:
        yield server


@pytest.mark.parametrize("method", ["GET /v2/health/live", "POST /v2/models/tiny/infer"])
@pytest.mark.parametrize("framing", FRAMINGS, ids=lambda framing: repr(framing[:60]))
def test_a_length_told_in_two_ways_ends_the_connection(shared_server: HttpServer, method: str, framing: str) -> None:
    with connected(shared_server, f"{method} HTTP/1.1\r\nHost: x\r\n{framing}\r\n\r\n".encode() + LIVE) as connection:
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower() and "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


def test_chunks_of_http_1_0_are_refused(shared_server: HttpServer) -> None:
    with connected(shared_server, INFER.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + LIVE) as one:
        assert read_all(one).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("POST /v2/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 50", 404),
        ("GET /v2/health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 50", 200),
        ("GET /v2/health/live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked", 400),
        ("PUT /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 50", 405),
        ("POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999", 413),
        ("POST /v2/models/tiny/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked", 400),
        ("no HTTP at all", 400),
        ("\x16\x03\x01", 400),
        ("GET /v2/health/live HTTP/1.1", 400),
        ("GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX: " + "y" * 20_000, 400),
    ],
)
def test_a_body_that_was_not_read_is_never_taken_for_a_request(
    shared_server: HttpServer, short_linger: None, head: str, status: int
) -> None:
    with connected(shared_server, f"{head}\r\n\r\n".encode() + LIVE) as connection:
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer.lower()
    assert answer.startswith(b"HTTP/1.1 %d " % status)


def test_requests_that_are_whole_share_a_connection(shared_server: HttpServer) -> None:
    body = pixels()
    chunked = INFER + b"Transfer-Encoding: chunked\r\n\r\n"
    chunked += b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:10], body[10:])) + b"0\r\n\r\n"
    with connected(shared_server, whole(body) + chunked + whole(b"[]") + LIVE) as connection:
        answers = [read_answer(connection) for _ in range(4)]
    assert [status for status, _ in answers] == [200, 200, 400, 200] and answers[0] == answers[1]


def test_an_answer_never_waits_for_an_acknowledgement(shared_server: HttpServer) -> None:
    """Its head and its body are two writes; without TCP_NODELAY the second waits 40 ms."""
    with connected(shared_server, LIVE) as connection:
        assert read_answer(connection)[0] == 200
        (there,) = (one for one in open_connections(shared_server) if one.client == connection.getsockname())
        own: Any = there.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("framing", "status", "reason"),
    [("chunked", 413, "more than 1000 bytes"), ("xchunked", 400, "Invalid HTTP request")],
)
def test_a_refused_client_that_still_sends_sees_why(image_bundle: Path, framing: str, status: int, reason: str) -> None:
    """The rest is read and thrown away: a reset would end what the client sends, and could take the answer from it."""
    head = INFER + f"Transfer-Encoding: {framing}\r\n\r\n".encode()
    with running(image_bundle, max_body=1000) as server, connected(server, head) as connection:
        for _ in range(64):
            connection.sendall(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        given, answer = read_answer(connection)
        assert given == status and reason in answer["error"] and read_all(connection) == b""


def test_bodies_together_have_a_limit(image_bundle: Path) -> None:
    part = INFER + b"Content-Length: 1000\r\n\r\n" + b"x" * 999
    with running(image_bundle, max_body=1000) as server:
        with ExitStack() as stack:
            held = [stack.enter_context(connected(server, part)) for _ in range(9)]
            refused, _, _ = select.select(held, [], [], 30)
            assert len(refused) == 1 and read_answer(refused[0])[0] == 503
        with connected(server, whole(pixels())) as connection:
            assert read_answer(connection)[0] == 200


@pytest.mark.parametrize("pieces", [b"POST /v2/mo", INFER + b"Content-Length: 100\r\n\r\nxx", LIVE + b"GET", b"", LIVE])
def test_a_request_that_does_not_come_whole_in_time(image_bundle: Path, pieces: bytes) -> None:
    """However much of it came, and even if a byte comes now and then."""
    with running(image_bundle, request_timeout=0.3) as server, connected(server, pieces) as connection:
        stop = threading.Event()
        if pieces in (b"", LIVE):
            stop.set()
        drip = threading.Thread(target=_drip, args=(connection, stop))
        drip.start()
        answer = read_all(connection)
        stop.set()
        drip.join()
    late = answer.rpartition(b"HTTP/1.1 ")[2].startswith(b"408 ")
    assert late == (pieces not in (b"", LIVE)) and answer.count(b"HTTP/1.1 ") == late + pieces.startswith(LIVE)


def _drip(connection: socket.socket, stop: threading.Event) -> None:
    while not stop.wait(0.05):
        try:
            connection.send(b"y")
        except OSError:
            return


def open_connections(server: HttpServer) -> set[Any]:
    return server._server.server_state.connections


@pytest.mark.usefixtures("short_linger")
def test_an_answer_that_is_not_taken_ends_the_connection(image_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.serving.protocol.dump_json", lambda answer: b" " * 2**25)
    with running(image_bundle, request_timeout=0.3) as server, connected(server, whole(pixels())):
        for wanted in (1, 0):
            wait_until(lambda wanted=wanted: len(open_connections(server)) == wanted)


def test_connections_beyond_the_limit(image_bundle: Path) -> None:
    with running(image_bundle, max_connections=2) as server:
        with connected(server, LIVE) as first, connected(server, LIVE) as second:
            assert read_answer(first)[0] == read_answer(second)[0] == 200
            with connected(server, whole(pixels())) as third, connected(server, LIVE) as fourth:
                status, answer = read_answer(third)
                assert status == 503 and "2 connections are open" in answer["error"] and read_all(third) == b""
                assert read_answer(fourth)[0] == 200  # who asks whether the server lives is told
            second.sendall(whole(pixels()))
            assert read_answer(second)[0] == 200
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(connected(server))
            fifth = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            assert _read_until_gone(fifth) == b""  # as many as are served wait for a refusal, and no more


def _read_until_gone(connection: socket.socket) -> bytes:
    try:
        connection.sendall(LIVE)
        return read_all(connection)
    except (ConnectionResetError, BrokenPipeError):
        return b""


def test_who_computes_does_not_keep_from_telling_that_it_lives(image_bundle: Path, held: Any) -> None:
    began, go_on, _ = held
    with running(image_bundle) as server, connected(server, whole(pixels())) as connection:
        assert began.wait(30)
        with connected(server, LIVE) as other:
            assert read_answer(other)[0] == 200
        go_on.set()
        assert read_answer(connection)[0] == 200


def test_who_has_closed_its_half_is_answered(image_bundle: Path, held: Any) -> None:
    _, go_on, _ = held
    go_on.set()
    with running(image_bundle) as server:
        for request, status in ((whole(pixels()), b"200"), (LIVE, b"200"), (whole(b"{"), b"400")):
            with connected(server, request) as connection:
                connection.shutdown(socket.SHUT_WR)
                answer = read_all(connection)
                assert answer.startswith(b"HTTP/1.1 " + status) and answer.endswith((b"}", b"]"))
        with connected(server, whole(pixels())[:-1]) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""  # the rest cannot come


def test_who_reset_the_connection_is_not_computed_for(image_bundle: Path, held: Any, logged: list[str]) -> None:
    """Who only closes it cannot be told from who waits for the answer with its half closed."""
    began, go_on, calls = held
    reset = struct.pack("ii", 1, 0)
    with running(image_bundle) as server, connected(server, whole(pixels())) as first:
        assert began.wait(30)
        for _ in range(5):
            with connected(server, whole(pixels()) + LIVE) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        with connected(server, LIVE) as connection:
            assert read_answer(connection)[0] == 200  # those before it have been read
        go_on.set()
        assert read_answer(first)[0] == 200
        with connected(server, whole(pixels())) as last:
            assert read_answer(last)[0] == 200
    assert len(calls) == 2 and logged == []


def test_the_end_waits_for_what_is_under_way(image_bundle: Path, held: Any) -> None:
    began, go_on, _ = held
    ready = LIVE.replace(b"live", b"ready")
    with (
        running(image_bundle) as server,
        connected(server, whole(pixels())) as first,
        connected(server, ready) as second,
    ):
        assert read_answer(second)[0] == 200 and began.wait(30)
        server.stop()
        for request, status in ((ready, 503), (LIVE, 200)):
            with connected(server, request) as connection:
                assert read_answer(connection)[0] == status
        second.sendall(whole(pixels()))
        assert read_answer(second) == (503, {"error": "the server is ending"})
        go_on.set()
        assert read_answer(first)[0] == 200


def test_a_model_that_does_not_answer_in_time(image_bundle: Path, held: Any) -> None:
    _, go_on, _ = held
    ready = LIVE.replace(b"live", b"ready")
    with running(image_bundle, call_timeout=0.2) as server:
        for request in (whole(pixels()), ready, whole(pixels())):
            with connected(server, request) as connection:
                assert read_answer(connection) == (503, {"error": "the model has been computing for over 0.2 s"})
        go_on.set()
        with connected(server, ready) as connection:
            while read_answer(connection)[0] != 200:
                connection.sendall(ready)
        with connected(server, whole(pixels())) as connection:
            assert read_answer(connection)[0] == 200


def test_the_end_does_not_wait_for_ever(image_bundle: Path, held: Any, logged: list[str]) -> None:
    began, go_on, calls = held
    with (
        running(image_bundle, ends=False, drain_timeout=0.1) as server,
        connected(server, whole(pixels())) as first,
        connected(server, INFER + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(pixels())) as second,
    ):
        assert began.wait(30) and second.recv(100).startswith(b"HTTP/1.1 100 ")  # both are under way
        server.stop()
        second.sendall(pixels())
        answers = [read_answer(connection) for connection in (first, second)]
        assert answers == [(503, {"error": "the server ended before the model could answer"})] * 2
        # the thread that computes ends after the server has told that it could not wait
        threading.Timer(1.0, go_on.set).start()
    assert len(calls) == 1
    assert ["timeout graceful shutdown exceeded" in message for message in logged] == [True]


def test_a_port_that_is_taken(image_bundle: Path) -> None:
    with runtime.open_bundle(image_bundle) as bundle, serve(bundle, port=0) as server:
        with pytest.raises(UsageError, match=r"cannot be served: .* in use.*; choose another --host or --port"):
            serve(bundle, port=server.port)
        with pytest.raises(UsageError, match="choose another --host or --port"):
            serve(bundle, port=70_000)


@pytest.mark.parametrize("limits", [{"max_body": 0}, {"request_timeout": float("nan")}, {"drain_timeout": 1e400}])
def test_limits_that_are_none(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(limits))} is .*: give a number above 0"):
        ServingLimits(**limits)


def test_without_the_packages_it_says_what_to_install(
    image_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the rest works: `runtime` needs them for nothing else."""
    from runtime.__main__ import main

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(image_bundle)]) == MissingDependency.exit_code
    assert "pip install uvicorn" in capsys.readouterr().err
    assert main(["verify", str(image_bundle)]) == 0
