"""Requests within limits, and their ends: every client is told, and vLLM's app sees a client that went away."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from serve.exchange import CLOSE, RETRY, Ending, Exchanges
from serve.limits import Limits

STOPPING = Ending(503, "service_unavailable", "stopping", (RETRY, CLOSE))
LIMITS = Limits(body_bytes=100, requests=2, request_seconds=30)


class Client:
    """One request as uvicorn would hand it over."""

    def __init__(self, path: str = "/v1/completions", method: str = "POST", **headers: str) -> None:
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"type": "http", "method": method, "path": path, "headers": raw}
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: list[Any] = []

    def writes(self, body: bytes, more: bool = False) -> "Client":
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})
        return self

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def complete(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False)


class App:
    """Stands where vLLM's app is: reads the body, then answers when it is let, or never; sees who went away."""

    def __init__(self, content_type: str = "application/json", first: bytes | None = None) -> None:
        self.first = first
        self.content_type = content_type
        self.bodies: list[bytes] = []
        self.aborted = 0
        self.go = asyncio.Event()

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.aborted += 1
                return
            body += message["body"]
            more = message.get("more_body", False)
        self.bodies.append(body)
        if self.first is not None:
            await self._start(send)
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
        gone, go = asyncio.create_task(receive()), asyncio.create_task(self.go.wait())
        await asyncio.wait((gone, go), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not go.done():
            go.cancel()
            self.aborted += 1
        if self.first is None:
            await self._start(send)
        await send({"type": "http.response.body", "body": b"done"})

    async def _start(self, send: Any) -> None:
        headers = [(b"content-type", self.content_type.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(bounded())


async def begin(exchanges: Exchanges, app: Any, *clients: Client) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(exchanges.carry(app, c.scope, c.incoming.get, c.send)) for c in clients]
    await asyncio.sleep(0.02)
    return tasks


def test_an_answer_passes_unchanged_and_leaves_nothing() -> None:
    async def scenario() -> None:
        exchanges, app, client = Exchanges(LIMITS), App(), Client().writes(b"ab", more=True).writes(b"c")
        tasks = await begin(exchanges, app, client)
        assert exchanges.under_way == 1
        assert exchanges.body_bytes == 3
        app.go.set()
        await asyncio.gather(*tasks)
        assert (client.status, client.text, app.bodies, app.aborted) == (200, "done", [b"abc"], 0)
        assert (exchanges.under_way, exchanges.body_bytes) == (0, 0)

    run(scenario)


def test_a_request_that_is_ended_gets_one_error_and_the_app_sees_a_disconnect() -> None:
    async def scenario() -> None:
        exchanges, app, client = Exchanges(LIMITS), App(), Client().writes(b"x")
        tasks = await begin(exchanges, app, client)
        exchanges.end(STOPPING)
        exchanges.end(Ending(500, "server_error", "later reasons do not count"))
        await asyncio.gather(*tasks)
        assert app.aborted == 1
        assert client.status == 503
        assert client.headers["retry-after"] == "5"
        assert client.headers["connection"] == "close"
        assert json.loads(client.text)["error"]["message"] == "stopping"
        assert client.complete

    run(scenario)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", 'data: {"error": {"message": "stopping", '),
        ("/v1/responses", 'data: {"error": {"message": "stopping", '),
        ("/v1/messages", 'event: error\ndata: {"type": "error", "error": {'),
    ],
)
def test_a_stream_that_is_ended_gets_one_more_event(path: str, last: str) -> None:
    async def scenario() -> None:
        exchanges, app = Exchanges(LIMITS), App("text/event-stream; charset=utf-8", first=b"data: {}\n\n")
        client = Client(path).writes(b"x")
        tasks = await begin(exchanges, app, client)
        exchanges.end(STOPPING)
        await asyncio.gather(*tasks)
        assert client.status == 200
        assert client.text.startswith("data: {}\n\n" + last)
        assert client.text.endswith("\n\n")
        assert ("[DONE]" in client.text) == (path != "/v1/messages")
        assert "done" not in client.text
        assert client.complete

    run(scenario)


def test_another_answer_that_has_begun_is_cut_short_and_not_completed() -> None:
    async def scenario() -> None:
        exchanges, app, client = Exchanges(LIMITS), App(first=b'{"half": '), Client().writes(b"x")
        tasks = await begin(exchanges, app, client)
        exchanges.end(STOPPING)
        await asyncio.gather(*tasks)
        assert client.text == '{"half": '
        assert not client.complete

    run(scenario)


def test_an_app_that_ignores_the_disconnect_is_cancelled() -> None:
    async def deaf(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(600)

    async def scenario() -> None:
        exchanges, client = Exchanges(LIMITS), Client().writes(b"x")
        tasks = await begin(exchanges, deaf, client)
        exchanges.end(STOPPING)
        await asyncio.gather(*tasks)
        assert client.status == 503

    run(scenario)


def test_a_client_that_takes_nothing_holds_nobody_up() -> None:
    async def scenario() -> None:
        exchanges, app, client = Exchanges(LIMITS), App("text/event-stream", first=b"data: {}\n\n"), Client()

        async def stuck(message: Any) -> None:
            await asyncio.sleep(600)

        client.writes(b"x")
        task = asyncio.create_task(exchanges.carry(app, client.scope, client.incoming.get, stuck))
        await asyncio.sleep(0.02)
        exchanges.end(STOPPING)
        await exchanges.ended(10)
        assert task.done()

    run(scenario)


def test_a_body_that_does_not_arrive_is_not_under_way_and_can_be_ended_alone() -> None:
    async def scenario() -> None:
        exchanges, app = Exchanges(LIMITS), App()
        whole, half = Client().writes(b"x"), Client(content_length="9").writes(b"x", more=True)
        tasks = await begin(exchanges, app, whole, half)
        assert exchanges.under_way == 1
        exchanges.end(STOPPING, only_arriving=True)
        await tasks[1]
        assert half.status == 503
        assert not tasks[0].done()
        app.go.set()
        await tasks[0]
        assert whole.status == 200

    run(scenario)


def test_a_body_that_pauses_too_long_gets_408() -> None:
    async def scenario() -> None:
        exchanges, client = Exchanges(LIMITS, body_pause_seconds=0.05), Client(content_length="9").writes(b"x", True)
        await asyncio.gather(*await begin(exchanges, App(), client))
        assert client.status == 408
        assert client.headers["connection"] == "close"

    run(scenario)


@pytest.mark.parametrize("length", ["101", None])
def test_a_longer_body_gets_413_declared_or_not(length: str | None) -> None:
    async def scenario() -> None:
        exchanges, app = Exchanges(LIMITS), App()
        headers = {"transfer_encoding": "chunked"} if length is None else {"content_length": length}
        client = Client(**headers).writes(b"x" * 60, more=True).writes(b"x" * 41)
        await asyncio.gather(*await begin(exchanges, app, client))
        assert client.status == 413
        assert "MiB" in json.loads(client.text)["error"]["message"]
        assert app.bodies == []
        assert exchanges.body_bytes == 0

    run(scenario)


def test_all_bodies_together_are_bounded() -> None:
    async def scenario() -> None:
        exchanges, app = Exchanges(Limits(body_bytes=100, requests=99)), App()
        clients = [Client(content_length="100").writes(b"x" * 100) for _ in range(17)]
        tasks = await begin(exchanges, app, *clients)
        app.go.set()
        await asyncio.gather(*tasks)
        assert sorted(client.status for client in clients) == [200] * 16 + [429]
        assert exchanges.body_bytes == 0

    run(scenario)


def test_one_request_too_many_gets_429_and_a_probe_still_passes() -> None:
    async def scenario() -> None:
        exchanges, app = Exchanges(LIMITS), App()
        clients = [Client().writes(b"x") for _ in range(3)]
        tasks = await begin(exchanges, app, *clients)
        assert clients[2].status == 429
        assert clients[2].headers["retry-after"] == "5"
        probe = Client("/health", "GET").writes(b"")
        tasks += await begin(exchanges, app, probe)
        app.go.set()
        await asyncio.gather(*tasks)
        assert [c.status for c in (*clients, probe)] == [200, 200, 429, 200]
        again = Client().writes(b"x")
        await asyncio.gather(*await begin(exchanges, app, again))
        assert again.status == 200

    run(scenario)


def test_a_request_that_takes_too_long_gets_504() -> None:
    async def scenario() -> None:
        exchanges, app, client = Exchanges(Limits(request_seconds=0.05)), App(), Client().writes(b"x")
        await asyncio.gather(*await begin(exchanges, app, client))
        assert client.status == 504
        assert app.aborted == 1

    run(scenario)


@pytest.mark.parametrize(("fault", "status"), [(RecursionError, 400), (KeyError, 500)])
def test_a_body_that_is_nested_too_deeply_is_the_clients_fault(fault: type[Exception], status: int) -> None:
    """vLLM answers 500 to it, as starlette does to any fault of a route, before it raises."""

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"Internal Server Error"})
        raise fault

    async def scenario() -> None:
        exchanges, client = Exchanges(LIMITS), Client().writes(b"[[[")
        (task,) = await begin(exchanges, failing, client)
        await asyncio.wait((task,))
        assert client.status == status
        assert client.complete
        assert isinstance(task.exception(), KeyError) == (status == 500)

    run(scenario)


def test_a_fault_of_the_app_is_its_own_and_leaves_nothing() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ConnectionResetError

    async def scenario() -> None:
        exchanges = Exchanges(LIMITS)
        with pytest.raises(ConnectionResetError):
            await asyncio.gather(*await begin(exchanges, failing, Client().writes(b"x")))
        assert exchanges.under_way == 0

    run(scenario)


def test_a_client_that_leaves_while_its_body_is_read_is_no_fault() -> None:
    """Starlette raises it out of the app, and uvicorn would log a traceback each time."""

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        await Request(scope, receive).body()

    async def scenario() -> None:
        client = Client(content_length="50").writes(b"x", more=True)
        client.incoming.put_nowait({"type": "http.disconnect"})
        exchanges = Exchanges(LIMITS)
        await exchanges.carry(reads, client.scope, client.incoming.get, client.send)
        assert client.sent == []
        assert exchanges.body_bytes == 0

    asyncio.run(scenario())


def test_a_websocket_is_closed_with_the_reason() -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass

    async def scenario() -> None:
        exchanges, client = Exchanges(LIMITS), Client()
        client.scope["type"] = "websocket"
        client.incoming.put_nowait({"type": "websocket.connect"})
        tasks = await begin(exchanges, echo, client)
        assert client.sent == [{"type": "websocket.accept"}]
        exchanges.end(STOPPING)
        await asyncio.gather(*tasks)
        assert client.sent[1:] == [{"type": "websocket.close", "code": 1013, "reason": "stopping"}]

    run(scenario)


def test_a_server_that_is_forced_to_end_cancels_the_work() -> None:
    async def scenario() -> None:
        exchanges, app = Exchanges(LIMITS), App()
        (task,) = await begin(exchanges, app, Client().writes(b"x"))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert exchanges.under_way == 0

    run(scenario)
