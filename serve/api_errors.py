"""Errors of our own paths, in the shape that OpenAI clients read."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
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


async def answer_wrong_method(request: Request, _: Exception) -> JSONResponse:
    """FastAPI's handler for 405. Starlette names the methods of one route only, where a path has one for each."""
    routes = (route for route in request.app.routes if getattr(route, "path", None) == request.url.path)
    allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
    message = f"{request.url.path} takes {allowed}"
    return JSONResponse(error_body(405, "invalid_request_error", message), 405, {"Allow": allowed})


def described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's description of the statuses that a route answers beside 200."""
    return {status: {"description": HTTPStatus(status).phrase} for status in statuses}
