"""The ASGI app that uvicorn serves: our few paths, and everything else handed to vLLM's app as a plain call.

There is no proxy between a client and vLLM: a streamed token takes no extra socket and is never parsed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.access import Access
from serve.api_errors import ApiError, answer_api_error, error_body
from serve.exposition import choose_format
from serve.lifecycle import Lifecycle, State
from serve.metrics import Combined
from serve.mode_routes import mode_routes
from serve.modes import ModeSwitch
from serve.page import page_routes

RETRY_AFTER_SECONDS = 5
"""What a client is told to wait while the server starts."""

OWN_PATHS = ("/livez", "/readyz", "/metrics", "/version", "/dspark")


@dataclass
class Gateway:
    """Routes each request to our app or to vLLM's, and counts what is under way there."""

    lifecycle: Lifecycle
    own: ASGIApp
    inner: ASGIApp | None = None
    in_flight: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's scope; uvicorn calls this."""
        if is_own(scope["path"]):
            # Load balancers ask with HEAD; uvicorn leaves the body out by itself.
            await self.own({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)
        elif self.inner is not None and self.lifecycle.state is State.READY:
            self.in_flight += 1
            try:
                await self.inner(scope, receive, send)
            finally:
                self.in_flight -= 1
        else:
            await refuse(self.lifecycle, scope, send)


def is_own(path: str) -> bool:
    """Whether a path is ours: one of `OWN_PATHS` or below it."""
    return any(path == own or path.startswith(own + "/") for own in OWN_PATHS)


async def refuse(lifecycle: Lifecycle, scope: Scope, send: Send) -> None:
    """Answer 503 in the shape of an OpenAI error, with when to come back."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": unavailable(lifecycle)})
        return
    body = json.dumps(error_body(503, "service_unavailable", unavailable(lifecycle))).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_SECONDS).encode()),
    ]
    if lifecycle.state is not State.STARTING:
        headers.append((b"connection", b"close"))
    start: Message = {"type": "http.response.start", "status": 503, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})


def unavailable(lifecycle: Lifecycle) -> str:
    """Why the model does not answer now."""
    match lifecycle.state:
        case State.STARTING:
            return f"the server is starting ({lifecycle.phase.value}): try again in a few seconds"
        case State.READY:
            return "this node runs ranks for the server of another node, which has the API"
        case State.FAILED:
            return f"the engine is not running: {lifecycle.reason}"
        case _:
            return "the server is shutting down and takes no new requests"


def build_own_app(
    lifecycle: Lifecycle,
    metrics: Combined,
    status: Callable[[], dict[str, Any]],
    version: dict[str, Any],
    modes: ModeSwitch,
    access: Access,
) -> FastAPI:
    """The routes that are not vLLM's. They answer in every state.

    Args:
        lifecycle: The server's state.
        metrics: Every metric to expose.
        status: Builds the body of `/dspark/status`.
        version: The body of `/version`.
        modes: The verification mode of every engine.
        access: Asks for the key where one is set; probes and metrics need none.
    """
    app = FastAPI(
        title="dspark-serve",
        docs_url=None,
        redoc_url=None,
        openapi_url="/dspark/openapi.json",
        redirect_slashes=False,
    )
    app.add_exception_handler(ApiError, answer_api_error)
    app.include_router(page_routes())
    app.include_router(mode_routes(modes, access))

    @app.get("/livez", summary="Whether to leave the process alone: 200 until the engine is dead")
    async def livez() -> JSONResponse:
        return JSONResponse(_state(lifecycle), 503 if lifecycle.state is State.FAILED else 200)

    @app.get("/readyz", summary="Whether the model answers: 200 only then")
    async def readyz() -> JSONResponse:
        ready = lifecycle.state is State.READY
        headers = {} if ready else {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return JSONResponse(_state(lifecycle), 200 if ready else 503, headers)

    @app.get("/metrics", summary="Prometheus metrics of vLLM and of verification")
    async def prometheus(request: Request) -> Response:
        encode, content_type = choose_format(request.headers.get("accept", ""))
        return Response(encode(metrics), headers={"Content-Type": content_type})

    @app.get("/version", summary="Versions of vLLM and of this server, and the patch set")
    async def show_version() -> dict[str, Any]:
        return version

    @app.get(
        "/dspark/status",
        summary="State, effective configuration, patches, mode and recent acceptance",
        dependencies=[Depends(access)],
    )
    async def dspark_status() -> dict[str, Any]:
        return {**_state(lifecycle), **status()}

    return app


def _state(lifecycle: Lifecycle) -> dict[str, Any]:
    body: dict[str, Any] = {"state": lifecycle.state.value, "seconds": round(lifecycle.seconds, 1)}
    if lifecycle.state is State.STARTING:
        body |= {"phase": lifecycle.phase.value, "progress": lifecycle.phase.progress}
    if lifecycle.state is State.FAILED:
        body |= {"phase": lifecycle.phase.value, "reason": lifecycle.reason}
    return body
