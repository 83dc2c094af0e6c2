"""Real sockets against uvicorn with our connection: endless heads, slow writers and slow readers."""

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
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.sent < self.size:
            part = CHUNK[: self.size - self.sent]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self.sent += len(part)
        await send({"type": "http.response.body", "body": b""})
        self.gone.set()


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Served]:
    it = Served()
    server = uvicorn.Server(
        uvicorn.Config(it.app, interface="asgi3", http=Impatient, lifespan="off", log_level="critical")
    )
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
