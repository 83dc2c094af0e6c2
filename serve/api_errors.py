"""Errors of our own paths, in the shape that OpenAI clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse


class ApiError(Exception):
    """A request that is refused or failed.

    Attributes:
        status: HTTP status.
        kind: The error's `type`.
        headers: Headers that the status asks for.
        details: Further keys of the error.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        **details: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers
        self.details = details


def error_body(status: int, kind: str, message: str, **details: Any) -> dict[str, Any]:
    """The body that tells an OpenAI client what went wrong."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status, **details}}


async def answer_api_error(_: Request, error: Exception) -> JSONResponse:
    """FastAPI's handler for `ApiError`."""
    assert isinstance(error, ApiError)
    return JSONResponse(error_body(error.status, error.kind, str(error), **error.details), error.status, error.headers)
