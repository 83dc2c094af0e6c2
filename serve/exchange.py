"""One request to vLLM's app, from its first byte to the last of its answer, within limits and with a told end.

vLLM's app is called as it is. This stands around the call: it counts the body as it is read, and when the server has to
end a request (a drain's deadline, a dead or stalled engine, a limit) it tells vLLM that the client went away, which
aborts the work in the engine, and tells the client what happened, in the shape that its API has for errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.api_errors import error_body
from serve.limits import BODY_PAUSE_SECONDS, MIB, Limits

logger = logging.getLogger("dspark-serve")

ABORT_SECONDS = 1.0
"""What vLLM gets to notice that a request is over."""
TELL_SECONDS = 2.0
"""What a client gets to take the error."""
RETRY_AFTER_SECONDS = 5
"""What a client is told to wait where waiting helps."""
RETRY = (b"retry-after", str(RETRY_AFTER_SECONDS).encode())
CLOSE = (b"connection", b"close")


@dataclass(frozen=True)
class Ending:
    """Why the server ends a request.

    Attributes:
        status: HTTP status, where no answer has begun.
        kind: The error's `type`.
        message: What happened and what helps.
        headers: Headers that the status asks for.
    """

    status: int
    kind: str
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


TOO_DEEP = Ending(400, "invalid_request_error", "the body is nested too deeply")


class Exchanges:
    """Every request that vLLM's app has, and the limits on all of them together."""

    def __init__(self, limits: Limits, body_pause_seconds: float = BODY_PAUSE_SECONDS) -> None:
        self.limits = limits
        self.body_pause_seconds = body_pause_seconds
        self.body_bytes = 0
        self._working = 0
        self._open: set[Exchange] = set()

    @property
    def under_way(self) -> int:
        """Requests that have arrived whole and are not answered to the end."""
        return sum(exchange.arrived for exchange in self._open)

    async def carry(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM's app serve a scope, or refuse it where a limit is reached."""
        refusal = self._refusal(scope)
        if refusal is not None:
            await tell(refusal, scope, send)
            return
        exchange = Exchange(self, scope, receive, send)
        self._open.add(exchange)
        self._working += _is_work(scope)
        try:
            await exchange.run(app)
        finally:
            self._open.discard(exchange)
            self._working -= _is_work(scope)
            self.body_bytes -= exchange.body_bytes

    def end(self, ending: Ending, *, only_arriving: bool = False) -> None:
        """End every request, or only those whose body has not arrived; `carry` returns for each in a moment."""
        for exchange in list(self._open):
            if not (only_arriving and exchange.arrived):
                exchange.end(ending)

    async def ended(self, seconds: float) -> None:
        """Return when no request is open, or after some seconds."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._open and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    def _refusal(self, scope: Scope) -> Ending | None:
        if not _is_work(scope):
            return None
        if self._working >= self.limits.requests:
            return Ending(429, "rate_limit_error", f"{self.limits.requests} requests are under way already", (RETRY,))
        length = Headers(scope=scope).get("content-length", "")
        return self.over_body(int(length)) if length.isdecimal() else None

    def over_body(self, size: int) -> Ending | None:
        """Why a body of so many bytes is refused, or None."""
        if size <= self.limits.body_bytes:
            return None
        limit = f"{self.limits.body_bytes / MIB:g} MiB"
        return Ending(413, "invalid_request_error", f"the body is longer than {limit}, the most that this server takes")


class Exchange:
    """One request. `run` it once; `end` it from anywhere on the event loop.

    Attributes:
        arrived: Whether the body is complete, so that the model may be working on it.
        body_bytes: Bytes of its body so far.
    """

    def __init__(self, exchanges: Exchanges, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self.arrived = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        self.body_bytes = 0
        self._exchanges = exchanges
        self._scope = scope
        self._outer_receive = receive
        self._outer_send = send
        self._started: Message | None = None
        self._held: list[Message] = []
        self._finished = False
        self._ending: Ending | None = None
        self._ended = asyncio.Event()

    def end(self, ending: Ending) -> None:
        """Ask for the end; the first reason counts."""
        if self._ending is None and not self._finished:
            self._ending = ending
            self._ended.set()

    async def run(self, app: ASGIApp) -> None:
        """Serve it, to its own end or the asked one."""
        loop = asyncio.get_running_loop()
        limit = self._exchanges.limits.request_seconds
        late = loop.call_later(limit, self.end, _late(limit))
        work = loop.create_task(self._call(app))
        ended = loop.create_task(self._ended.wait())
        try:
            await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
            if self._ending is not None:
                await asyncio.wait((work,), timeout=ABORT_SECONDS)
        finally:
            late.cancel()
            ended.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,), timeout=ABORT_SECONDS)
        if self._ending is None:
            await self._settle(work)
            return
        if work.done() and not work.cancelled() and (fault := work.exception()) is not None:
            logger.debug("a request failed while it was ended", exc_info=fault)
        if not self._finished:
            # Whoever does not read is not told: the connection's own limit drops it.
            with contextlib.suppress(TimeoutError, OSError):
                await asyncio.wait_for(tell(self._ending, self._scope, self._outer_send, self._started), TELL_SECONDS)

    async def _settle(self, work: asyncio.Task[None]) -> None:
        """Send what was held back, unless it turns out that the request itself was at fault."""
        fault = None if work.cancelled() else work.exception()
        if self._held and isinstance(fault, RecursionError):
            # Only a body makes Python go that deep, and vLLM blames itself for it.
            await tell(TOO_DEEP, self._scope, self._outer_send)
            return
        for message in self._held:
            await self._outer_send(message)
        if not isinstance(fault, ClientDisconnect):  # that it left while its body was read is nobody's fault here
            work.result()

    async def _call(self, app: ASGIApp) -> None:
        await app(self._scope, self._receive, self._send)

    async def _next_message(self) -> Message:
        return await self._outer_receive()

    async def _receive(self) -> Message:
        """What vLLM's app reads: the client's messages, and a disconnect once the exchange is ended."""
        if self._ending is None:
            loop = asyncio.get_running_loop()
            message = loop.create_task(self._next_message())
            ended = loop.create_task(self._ended.wait())
            pause = None if self.arrived else self._exchanges.body_pause_seconds
            try:
                await asyncio.wait((message, ended), timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    return self._count(message.result())
            finally:
                message.cancel()
                ended.cancel()
            self.end(Ending(408, "invalid_request_error", "the body did not arrive in time", (RETRY, CLOSE)))
        return self._disconnect()

    def _count(self, message: Message) -> Message:
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self.body_bytes += size
            self._exchanges.body_bytes += size
            self.arrived = not message.get("more_body", False)
            over = self._exchanges.over_body(self.body_bytes)
            if over is None and self._exchanges.body_bytes > self._exchanges.limits.bodies_bytes:
                over = Ending(429, "rate_limit_error", "the requests under way hold all the memory there is", (RETRY,))
            if over is not None:
                self.end(over)
                return self._disconnect()
        return message

    async def _send(self, message: Message) -> None:
        """What vLLM's app sends, until the exchange is ended."""
        if self._ending is not None:
            return
        if self._held or message.get("status") == 500:
            self._held.append(message)
            return
        if message["type"] in ("http.response.start", "websocket.accept"):
            self._started = message
        elif message["type"] == "websocket.close" or not message.get("more_body", False):
            self._finished = self._scope["type"] == "http" or message["type"] == "websocket.close"
        await self._outer_send(message)

    def _disconnect(self) -> Message:
        return {"type": "websocket.disconnect", "code": 1012} if self._is_websocket else {"type": "http.disconnect"}

    @property
    def _is_websocket(self) -> bool:
        return bool(self._scope["type"] == "websocket")


async def tell(ending: Ending, scope: Scope, send: Send, started: Message | None = None) -> None:
    """Send an error in the shape that the client's API has for it.

    Args:
        ending: What happened.
        scope: The request's.
        send: The client's.
        started: The start of an answer that has been sent, or None. A stream of events gets one more; another answer
            that has begun cannot be changed and is cut short, which its length or its framing shows.
    """
    if scope["type"] == "websocket":
        # 1013: try again later. 1008: the request itself is refused.
        code = 1013 if RETRY in ending.headers or ending.status >= 500 else 1008
        await send({"type": "websocket.close", "code": code, "reason": ending.message})
    elif started is None:
        body = json.dumps(_body(ending, scope)).encode()
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length, *ending.headers]
        await send({"type": "http.response.start", "status": ending.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
    elif Headers(raw=started["headers"]).get("content-type", "").startswith("text/event-stream"):
        event = json.dumps(_body(ending, scope))
        text = f"event: error\ndata: {event}\n\n" if _speaks_anthropic(scope) else f"data: {event}\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": text.encode()})


def _body(ending: Ending, scope: Scope) -> dict[str, object]:
    if _speaks_anthropic(scope):
        return {"type": "error", "error": {"type": ending.kind, "message": ending.message}}
    return error_body(ending.status, ending.kind, ending.message)


def _speaks_anthropic(scope: Scope) -> bool:
    return bool(scope["path"].startswith("/v1/messages"))


def _is_work(scope: Scope) -> bool:
    """Whether it counts towards the requests at once: a probe of vLLM's own must answer under any load."""
    return scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD", "OPTIONS")


def _late(seconds: float) -> Ending:
    return Ending(504, "timeout_error", f"the request took longer than {seconds:g} s, the most that it gets here")
