"""uvicorn's HTTP connection with bounds on what a slow or endless client holds.

uvicorn's httptools protocol reads headers of any length, waits for them for ever, and keeps a client that stops
reading for ever. Bodies are bounded where they are read (`serve.exchange`).

A client may send further requests before the first one is answered. uvicorn answers them in turn, but writes a refusal
into whatever answer is being sent, and tells only the last request that the client went away. Here a refusal waits for
its turn, and every request is told.

A handshake that uvicorn's WebSocket protocol cannot read is neither answered nor closed by it, and fails the stop of
the whole server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serve.limits import HEAD_BYTES, HEAD_SECONDS, WRITE_PAUSE_SECONDS

LINGER_SECONDS = 1.0
"""What a client that still writes gets to read a refusal in."""
REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class HeadTooLongError(ValueError):
    """Request line and headers are longer than `HEAD_BYTES`."""


class BoundedConnection(HttpToolsProtocol):
    """One client's connection.

    Attributes:
        head_seconds: Bound on the arrival of a head, and on the rest of a body that nobody waits for any more.
        write_pause_seconds: Bound on a client that does not read.
    """

    head_seconds = HEAD_SECONDS
    write_pause_seconds = WRITE_PAUSE_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = False
        self._refusal: bytes | None = None
        # In the order in which they came: uvicorn works on the first one, the others wait for it.
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._reading_head = True
        self._messages = 0
        self._parsed_bytes = 0
        self._waiting_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected, and has not said anything yet."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever ended it."""
        self._stop_head_timer()
        self.resume_writing()
        for cycle in self._unanswered:
            _disconnect(cycle)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        if self._refused:
            return
        messages = self._messages
        super().data_received(data)
        if self._reading_head and self._messages == messages:
            # A header that has not ended yet waits in the parser, which tells nobody how long it is.
            self._waiting_bytes += len(data)
            if self._waiting_bytes > HEAD_BYTES:
                self._refuse(431, "the request's headers are too long")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._reading_head = True
        self._messages += 1
        self._parsed_bytes = self._waiting_bytes = 0
        if self._head_timer is None:
            self._start_head_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header, or a trailer after a chunked body."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is known but for its body."""
        super().on_headers_complete()
        if self._is_begun:
            self._unanswered.append(self.cycle)
        self._reading_head = False
        self._stop_head_timer()

    def on_message_complete(self) -> None:
        """The body has ended."""
        self._stop_head_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is sent. Where the body still arrives, it was refused: it is thrown away, for a while."""
        if self._unanswered.popleft().more_body and self._head_timer is None:
            self._start_head_timer()
        super().on_response_complete()
        self._send_refusal()

    def pause_writing(self) -> None:
        """The client does not read what is sent."""
        self._write_timer = self.loop.call_later(self.write_pause_seconds, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def handle_websocket_upgrade(self) -> None:
        """A WebSocket is asked for."""
        if self._unanswered:
            self._refuse(400, "a WebSocket needs a connection of its own")
            return
        super().handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        # It was given the whole request, so it has begun or never will. Another library's protocol answers by itself.
        if not getattr(protocol, "handshake_initiated", True):
            self.connections.discard(protocol)
            self.connections.add(self)
            self.transport.set_protocol(self)
            self._refuse(400, "the request is no handshake of a WebSocket")

    def send_400_response(self, msg: str) -> None:
        """The parser refused the request; where our own count made it, say so."""
        if self._parsed_bytes > HEAD_BYTES:
            self._refuse(431, "the request's headers are too long")
        else:
            self._refuse(400, msg)

    def _count(self, size: int) -> None:
        self._parsed_bytes += size
        if self._parsed_bytes > HEAD_BYTES:
            raise HeadTooLongError

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._reading_head and self._messages:
            self._refuse(408, "the request did not arrive in time")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Refuse the request that arrives, and read nothing more."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if not self._reading_head:
            self._give_up_body()
        body = message.encode()
        head = (
            f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._refusal = head.encode() + body
        self._send_refusal()

    @property
    def _is_begun(self) -> bool:
        """Whether the request that arrives is known to the app, or waits for those before it; no WebSocket is."""
        return self.cycle is not None and self.cycle.scope is self.scope

    def _give_up_body(self) -> None:
        """Take back the request whose body cannot be read."""
        if not (self._is_begun and self.cycle.more_body):
            return
        if self.cycle not in self._unanswered or self.cycle.response_started:
            self.transport.close()  # an answer that has begun is cut, which its framing shows
            return
        self._unanswered.remove(self.cycle)
        if self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        else:
            _disconnect(self.cycle)

    def _send_refusal(self) -> None:
        """Send what was refused, once every request before it is answered."""
        if self._refusal is None or self._unanswered or self.transport.is_closing():
            return
        self.transport.write(self._refusal)
        self._refusal = None
        # Closed at once, what the client still sends would be answered by a reset, and the answer lost with it.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell the app that its client is gone; what it still sends goes nowhere."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
