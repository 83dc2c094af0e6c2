"""Who may read and change what: the key, where one is set, and the origin of what changes something."""

from __future__ import annotations

import argparse
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from fastapi import Request

from serve.api_errors import ApiError

KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's variable for a key, where `--api-key` gives none."""


class Access:
    """Asks for a key as vLLM's `AuthenticationMiddleware` does: `Authorization: Bearer KEY`, any of the keys.

    An instance is a FastAPI dependency.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __call__(self, request: Request) -> None:
        """Let a request pass.

        Raises:
            ApiError: 401, a key is set and the request does not have it.
        """
        if not self._digests:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key)
        # Every key is compared, each in constant time: how long it takes tells nothing.
        matches = [secrets.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "authentication_error",
                "this server asks for a key: send the header 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )


def keys_of(command_line: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The keys that vLLM will ask for, known before vLLM is even imported.

    Args:
        command_line: The arguments of `vllm serve`.
        environment: Has `VLLM_API_KEY` where that is set; an option goes before it.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--api-key", "--api_key", nargs="*", default=[])
    given = parser.parse_known_args(command_line)[0].api_key or [environment.get(KEY_VARIABLE, "")]
    return [key for key in given if key]


def same_origin(request: Request) -> None:
    """Let pass what no browser sent, or sent from a page of this server. A FastAPI dependency.

    Schemes are not compared: behind a proxy that ends TLS, the browser's is another than ours.

    Raises:
        ApiError: 403, a browser sent it from a page of another origin.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return
    try:
        host = urlsplit(origin).netloc
    except ValueError:
        host = ""
    if not host or host.lower() != request.headers.get("host", "").lower():
        raise ApiError(
            403,
            "permission_error",
            "a page of another origin may not change this server; behind a proxy, let it pass the Host header on",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="backslashreplace")).digest()
