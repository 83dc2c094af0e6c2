"""`/dspark/mode`: read and change the verification mode of a running server."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect

from patches.modes import Mode
from serve.access import same_origin
from serve.api_errors import ApiError, described
from serve.limits import BODY_PAUSE_SECONDS
from serve.modes import ModeSwitch, SwitchRefusedError, SwitchUnconfirmedError

MAX_BODY_BYTES = 1024

EXPECTED = (
    'send {"mode": "adaptive"} or {"mode": "fixed"}; \'off\' can be chosen only at start, with dspark-serve up '
    "--verification off"
)


class ModeRequest(BaseModel):
    """The body of a PUT."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["adaptive", "fixed"]


def mode_routes(modes: ModeSwitch) -> APIRouter:
    """The routes of the mode.

    Args:
        modes: The mode of every engine.
    """
    router = APIRouter()

    @router.get(
        "/dspark/mode", summary="The verification mode in force, and the configured one", responses=described(401)
    )
    async def get_mode() -> dict[str, Any]:
        return modes.as_json()

    @router.put(
        "/dspark/mode",
        summary="Switch verification between adaptive and fixed, from the next step on",
        dependencies=[Depends(same_origin)],
        responses=described(401, 403, 408, 409, 413, 422, 504),
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": ModeRequest.model_json_schema()}},
            }
        },
    )
    async def put_mode(request: Request) -> dict[str, Any]:
        mode = await _read_mode(request)
        try:
            await modes.switch(mode)
        except SwitchRefusedError as error:
            raise ApiError(409, "conflict_error", str(error)) from error
        except SwitchUnconfirmedError as error:
            raise ApiError(504, "unconfirmed_error", str(error), **modes.as_json()) from error
        return modes.as_json()

    return router


async def _read_mode(request: Request) -> Mode:
    """The mode that the body asks for.

    The body is read here and not by FastAPI, which would read any length of it before it asks for the key.

    Raises:
        ApiError: 422, it is anything but an object with a mode; 413, it is too long for one; 408, it does not arrive.
    """
    body = b""
    try:
        async with asyncio.timeout(BODY_PAUSE_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise ApiError(413, "invalid_request_error", f"the body is too long: {EXPECTED}")
    except (TimeoutError, ClientDisconnect) as error:
        raise ApiError(408, "timeout_error", f"the body did not arrive: {EXPECTED}") from error
    try:
        return Mode(ModeRequest.model_validate_json(body).mode)
    except ValidationError as error:
        raise ApiError(422, "invalid_request_error", f"no such mode: {EXPECTED}") from error
