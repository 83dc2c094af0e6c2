"""Who may read and change what: the key, where one is set, and the origin of what changes something.

The key is asked for in front of both apps, on every path but a few exact ones, so no spelling of a path leads around it
(vLLM's own `AuthenticationMiddleware` guards four prefixes only: vllm#18892, #58144). Whoever compares a path here and
whoever routes it read the same string of the ASGI scope.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from urllib.parse import urlsplit

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import Scope

from serve.api_errors import ApiError
from serve.page import ASSETS

PROBES = frozenset({"/livez", "/readyz"})
SHELL = frozenset({"/dspark", *ASSETS})
"""The status page without its data: what it shows comes from `/dspark/status`, which asks for the key."""


class Access:
    """Says whether a request may pass. Holds digests only, so no key can be printed from here.

    Attributes:
        open_paths: Paths that need no key, exactly as spelt.
    """

    def __init__(self, keys: Collection[str], *, metrics_need_one: bool = False) -> None:
        self._digests = [_digest(key) for key in keys]
        self.open_paths = PROBES | SHELL | (frozenset() if metrics_need_one else frozenset({"/metrics"}))

    def admit(self, scope: Scope) -> bool:
        """Whether an HTTP or WebSocket scope needs no key or has one.

        `Authorization: Bearer KEY` as OpenAI's clients send it, or `x-api-key: KEY` as Anthropic's do.
        """
        if not self._digests or (scope["type"] == "http" and scope["path"] in self.open_paths):
            return True
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer] if scheme.lower() == "bearer" else []
        given += headers.getlist("x-api-key")
        # Every pair is compared, each in constant time: how long it takes tells nothing about a key.
        matches = [secrets.compare_digest(_digest(key), digest) for key in given for digest in self._digests]
        return any(matches)


def same_origin(request: Request) -> None:
    """Let pass what no browser sent, or sent from a page of this server. A FastAPI dependency.

    Of several origins, each must be ours. Schemes are not compared: behind a proxy that ends TLS, the browser's is
    another than ours.

    Raises:
        ApiError: 403, a browser sent it from a page of another origin.
    """
    host = request.headers.get("host", "").lower()
    if not all(host and _host_of(origin) == host for origin in request.headers.getlist("origin")):
        raise ApiError(
            403,
            "permission_error",
            "a page of another origin may not change this server; behind a proxy, let it pass the Host header on",
        )


def _host_of(origin: str) -> str:
    """Host and port of an origin as they stand in a Host header; empty where it has none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="backslashreplace")).digest()
