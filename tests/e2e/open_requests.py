"""Requests of every shape that are under way when something happens, and what each client then saw."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.running import MODEL, Server

LONG = 900
"""Tokens: many more than are made before anything happens."""
ASK = [{"role": "user", "content": "def add(a, b):\n"}]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "def f(x):", "max_tokens": LONG, "ignore_eos": True}),
    "chat stream": (
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": LONG, "ignore_eos": True, "stream": True},
    ),
    "messages stream": ("/v1/messages", {"messages": ASK, "max_tokens": LONG, "stream": True}),
}


@dataclass
class Outcome:
    """What a client saw.

    Attributes:
        status: HTTP status.
        text: The whole body.
    """

    status: int
    text: str

    @property
    def error(self) -> dict[str, Any] | None:
        """The error that an answer is, or that the last event of a stream before `[DONE]` has; None in a result."""
        events = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: {")]
        last: dict[str, Any] = json.loads(events[-1] if events else self.text)
        return last.get("error")


@contextlib.contextmanager
def open_requests(server: Server, shapes: tuple[str, ...] = tuple(SHAPES)) -> Iterator[dict[str, Future[Outcome]]]:
    """Requests that are all under way: streams have begun. The futures raise where a client was cut."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(shapes)) as pool:
        futures = {shape: pool.submit(_ask, server, *SHAPES[shape], begun) for shape in shapes}
        for _ in [shape for shape in shapes if "stream" in shape]:
            assert begun.acquire(timeout=240), "no stream began"
        server.wait_until(lambda: under_way(server) >= len(shapes))
        yield futures


def under_way(server: Server) -> int:
    """Requests that the server says are under way."""
    return int(server.client.get("/dspark/status").json()["requests_under_way"])


def _ask(server: Server, path: str, body: dict[str, Any], begun: threading.Semaphore) -> Outcome:
    with (
        httpx.Client(base_url=server.url, headers=server.client.headers, timeout=300) as client,
        client.stream("POST", path, json={"model": MODEL, **body}) as response,
    ):
        parts = []
        for part in response.iter_text():
            if not parts:
                begun.release()
            parts.append(part)
        return Outcome(response.status_code, "".join(parts))
