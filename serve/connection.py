"""uvicorn's HTTP connection with bounds on what a slow or endless client holds.

uvicorn's httptools protocol reads headers of any length, waits for them for ever, and keeps a client that stops
reading for ever. Bodies are bounded where they are read (`serve.exchange`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.limits import HEAD_BYTES, HEAD_SECONDS, WRITE_PAUSE_SECONDS

LINGER_SECONDS = 1.0
"""What a client that still writes gets to read a refusal in."""


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
        self._reading_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body has ended."""
        self._stop_head_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is sent. Where the body still arrives, it was refused: it is thrown away, for a while."""
        if self.cycle.more_body and self._head_timer is None:
            self._start_head_timer()
        super().on_response_complete()

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

    def send_400_response(self, msg: str) -> None:
        """The parser refused the request; where our own count made it, say so."""
        if self._parsed_bytes > HEAD_BYTES:
            self._refuse(431, "the request's headers are too long")
        else:
            super().send_400_response(msg)

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
        if self._refused or self.transport.is_closing():
            return
        body = message.encode()
        reason = {408: "Request Timeout", 431: "Request Header Fields Too Large"}[status]
        head = (
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._refused = True
        self.transport.write(head.encode() + body)
        # Closed at once, what the client still sends would be answered by a reset, and the answer lost with it.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)
