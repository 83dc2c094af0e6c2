"""Real sockets against uvicorn with our connection: endless heads, slow writers, slow readers, several requests sent
before the first is answered."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from serve.connection import BoundedConnection

CHUNK = b"x" * 65536


class Impatient(BoundedConnection):
    head_seconds = 0.3
    write_pause_seconds = 0.3


class Served:
    """A server whose app reads nothing and answers `size` bytes, counting what it could send."""

    def __init__(self) -> None:
        self.size = 2
        self.sent = 0
        self.port = 0
        self.gone = asyncio.Event()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.sent < self.size:
            part = CHUNK[: self.size - self.sent]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.sent += len(part)
        await send({"type": "http.response.body", "body": b""})
        self.gone.set()


class Slow(Served):
    """A server whose app answers in two halves, the second one when it is told to or its client is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.told: list[str] = []
        self.go_on = asyncio.Event()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        if scope["method"] == "POST":
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
            self.told.append(message["type"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        if scope["method"] == "GET":
            going = asyncio.create_task(self.go_on.wait())
            gone = asyncio.create_task(self.wait_until_gone(receive))
            await asyncio.wait((going, gone), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
        await send({"type": "http.response.body", "body": b"other"})

    async def wait_until_gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


@contextlib.asynccontextmanager
async def served(it: Served | None = None) -> AsyncIterator[Served]:
    it = it or Served()
    config = uvicorn.Config(it.app, interface="asgi3", http=Impatient, lifespan="off", log_level="critical")
    config.date_header = config.server_header = False
    server = uvicorn.Server(config)
    sock = socket.create_server(("127.0.0.1", 0))
    it.port = sock.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield it
    finally:
        server.should_exit = server.force_exit = True
        await task
        sock.close()


async def exchange(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """What the server says to these bytes, until it closes or says nothing for a while."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        while part := await asyncio.wait_for(reader.read(65536), 5):
            answer += part
    writer.close()
    return answer


def check(*parts: bytes, pause: float = 0.0) -> bytes:
    async def scenario() -> bytes:
        async with served() as it:
            return await exchange(it.port, *parts, pause=pause)

    return asyncio.run(scenario())


GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


def test_a_head_of_common_length_passes() -> None:
    assert check(GET + b"a: " + b"b" * 60_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "parts",
    [
        (GET + b"a: " + b"b" * 70_000 + b"\r\n\r\n",),
        (GET, *[b"a%d: %s\r\n" % (i, b"b" * 1000) for i in range(80)]),
        (GET + b"a: ", *[b"b" * 10_000] * 40),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",),
        (b"GET /", *[b"x" * 10_000] * 40),
    ],
    ids=["one header", "many headers", "a header without end", "path", "a path without end"],
)
def test_a_longer_one_gets_431(parts: tuple[bytes, ...]) -> None:
    assert check(*parts, pause=0.001).startswith(b"HTTP/1.1 431 ")


def test_a_head_that_does_not_end_gets_408() -> None:
    assert check(GET).startswith(b"HTTP/1.1 408 ")
    assert check(b"G").startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_says_nothing_is_closed() -> None:
    assert check() == b""


def test_a_slow_second_request_is_bounded_too() -> None:
    answer = check(GET.replace(b"Connection: close\r\n", b"") + b"\r\n", b"GET / HT", pause=0.1)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408 " in answer


def test_a_refused_body_that_goes_on_is_read_for_a_while_only() -> None:
    """So that a client that writes before it reads gets the answer; but not for ever."""

    async def scenario() -> None:
        async with served() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            with pytest.raises(ConnectionError):
                await _write_on(writer)

    asyncio.run(scenario())


def test_a_client_that_does_not_read_is_dropped_and_little_waits_for_it() -> None:
    async def scenario() -> None:
        async with served() as it:
            it.size = 1 << 30
            _, writer = await asyncio.open_connection("127.0.0.1", it.port, limit=1024)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.write(GET + b"\r\n")
            # Once it is dropped, what the app sends goes nowhere, and it ends.
            await asyncio.wait_for(asyncio.shield(_stable(it)), 10)
            held = it.sent
            await asyncio.wait_for(it.gone.wait(), 30)
            assert held < 8 << 20  # the kernel's buffers of both ends, and 64 KiB of ours
            writer.transport.abort()

    asyncio.run(scenario())


async def _write_on(writer: asyncio.StreamWriter) -> None:
    """A byte now and then, for ten seconds."""
    for _ in range(200):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _stable(it: Served) -> None:
    """Return once nothing more can be sent."""
    while True:
        before = it.sent
        await asyncio.sleep(0.1)
        if before and it.sent == before:
            return


GET_NUMBER = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /posted HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nfirstother"
SOCKET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
SOCKET += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
REFUSED = {
    "no HTTP": (b"\x00\x01\r\n\r\n", 400),
    "no URL": (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
    "an endless head": (GET + b"a: " + b"b" * 400_000, 431),
    "a head that does not end": (b"GET / HT", 408),
    "a broken body": (POST + b"zz\r\n", 400),
    "a WebSocket": (SOCKET + b"\r\n", 400),
    "a broken trailer": (POST + b"0\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431),
}


@pytest.mark.parametrize(("refused", "status"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_waits_until_the_requests_before_it_are_answered(refused: bytes, status: int) -> None:
    """In the middle of an answer it would be taken for a part of it."""

    async def scenario() -> bytes:
        it = Slow()
        async with served(it):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(GET_NUMBER % 0 + GET_NUMBER % 1 + refused)
            answer = await asyncio.wait_for(reader.readuntil(b"first"), 5)
            await asyncio.sleep(0.4)  # longer than a head may take
            it.go_on.set()
            answer += await asyncio.wait_for(reader.read(), 5)
            writer.close()
            assert it.paths == ["/0", "/1"]
            return answer

    answer = asyncio.run(scenario())
    assert answer.startswith(WHOLE * 2 + b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1") == 3


@pytest.mark.parametrize(
    "request_",
    [
        SOCKET + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        SOCKET + b"Content-Length: 5\r\n\r\nhello",
        SOCKET + b"a: b\r\n" * 200 + b"\r\n",
        SOCKET + b"a: " + b"b" * 10_000 + b"\r\n\r\n",
    ],
    ids=["broken body", "body", "many headers", "a long header"],
)
def test_a_websocket_that_cannot_begin_is_refused_and_the_server_still_stops(request_: bytes) -> None:
    assert check(request_).startswith(b"HTTP/1.1 400 ")


def test_a_websocket_that_can_is_answered_by_the_app_or_by_its_library() -> None:
    assert check(SOCKET + b"\r\n").startswith(b"HTTP/1.1 403 ")
    assert check(SOCKET.replace(b"GET", b"POST") + b"\r\n").startswith(b"HTTP/1.1 405 ")


@pytest.mark.parametrize(
    ("rest", "status"), [(b"zz\r\n", 400), (b"0\r\na: " + b"b" * 70_000 + b"\r\n\r\n", 431)], ids=["body", "trailer"]
)
def test_a_body_that_breaks_is_refused_once_and_the_app_is_told(rest: bytes, status: int) -> None:
    async def scenario() -> bytes:
        it = Slow()
        async with served(it):
            answer = await exchange(it.port, POST, rest, pause=0.1)
            assert it.told == ["http.disconnect"]
            return answer

    answer = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1") == 1


def test_a_client_that_sent_two_requests_and_left_has_neither_answered() -> None:
    """The first one works on: it is told, and the second one never begins."""

    async def scenario() -> None:
        it = Slow()
        async with served(it):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(GET_NUMBER % 0 + GET_NUMBER % 1)
            await asyncio.wait_for(reader.readuntil(b"first"), 5)
            writer.transport.abort()
            await asyncio.wait_for(it.gone.wait(), 5)
            await asyncio.sleep(0.1)
            assert it.paths == ["/0"]

    asyncio.run(scenario())


def test_a_second_request_whose_body_is_slow_but_arrives_is_answered() -> None:
    async def scenario() -> bytes:
        it = Slow()
        it.go_on.set()
        async with served(it):
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(GET_NUMBER % 0 + POST)
            for _ in range(12):  # twice as long as a head may take
                await asyncio.sleep(0.05)
                writer.write(b"1\r\nx\r\n")
            writer.write(b"0\r\n\r\n")
            answer = await asyncio.wait_for(reader.readexactly(2 * len(WHOLE)), 5)
            assert it.told == ["http.request"]
            writer.close()
            return answer

    assert asyncio.run(scenario()) == WHOLE * 2
