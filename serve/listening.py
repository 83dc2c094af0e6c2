"""The socket the server listens on, taken before anything else so that nobody has the port meanwhile."""

from __future__ import annotations

import socket

BACKLOG = 2048
"""Connections that may wait, as many as uvicorn allows by default."""


class ListenError(OSError):
    """The address cannot be listened on; the message names it and says why."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait in its queue until the server takes them.

    Args:
        host: A name or an IPv4 or IPv6 address of this machine.
        port: 0 for any free one.

    Raises:
        ListenError: the port is taken, or the address is not this machine's.
    """
    if not 0 <= port <= 65535:  # the resolver would take it modulo 65536
        raise ListenError(_problem(host, port, ValueError("a port is 0 to 65535")))
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(info[0], info[1])
    except OSError as error:
        raise ListenError(_problem(host, port, error)) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ListenError(_problem(host, port, error)) from error
    return sock


def port_problem(host: str, port: int) -> str | None:
    """Why a server could not listen there, or None."""
    try:
        listen(host, port).close()
    except ListenError as error:
        return str(error)
    return None


def url_of(sock: socket.socket) -> str:
    """Where a person on this machine reaches a listening socket."""
    address, port = sock.getsockname()[:2]
    if address in ("0.0.0.0", "::"):
        address = "127.0.0.1"
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _problem(host: str, port: int, error: Exception) -> str:
    return f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}"
