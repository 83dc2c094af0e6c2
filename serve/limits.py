"""What one client, or all of them together, may cost the server."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024

HEAD_BYTES = 64 * 1024
"""Request line and headers, as h11 allows by default; httptools itself has no bound."""
HEAD_SECONDS = 60.0
"""From a connection's or a request's first byte to the end of its headers."""
BODY_PAUSE_SECONDS = 60.0
"""How long a body may make no progress."""
WRITE_PAUSE_SECONDS = 60.0
"""How long a client may take nothing of what waits for it."""


@dataclass(frozen=True)
class Limits:
    """The limits that an operator sets.

    Attributes:
        body_bytes: Of one request.
        requests: That may be under way or waiting for the engine at once; one more gets 429.
        request_seconds: What one request may take, from its first byte on.
    """

    body_bytes: int = 32 * MIB
    requests: int = 1024
    request_seconds: float = 3600.0

    @property
    def bodies_bytes(self) -> int:
        """Of all requests that arrive or are worked on, together: many small ones, few of the largest."""
        return 16 * self.body_bytes
