"""The ASGI app that uvicorn serves: our few paths, and everything else handed to vLLM's app as a plain call.

There is no proxy between a client and vLLM: a streamed token takes no extra socket and is never parsed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.access import Access
from serve.api_errors import ApiError, answer_api_error, answer_wrong_method, described
from serve.exchange import CLOSE, RETRY, RETRY_AFTER_SECONDS, Ending, Exchanges, tell
from serve.exposition import choose_format
from serve.lifecycle import Lifecycle, State
from serve.metrics import Combined
from serve.mode_routes import mode_routes
from serve.modes import ModeSwitch
from serve.page import page_routes

OWN_PATHS = ("/livez", "/readyz", "/metrics", "/version", "/dspark")

NO_KEY = Ending(
    401,
    "authentication_error",
    "this server asks for a key: send the header 'Authorization: Bearer KEY'",
    ((b"www-authenticate", b"Bearer"),),
)


@dataclass
class Gateway:
    """Asks for the key, and routes each request to our app or to vLLM's.

    Attributes:
        lifecycle: The server's state.
        access: Who may pass.
        exchanges: Every request that vLLM's app has.
        own: Our app; answers in every state.
        inner: vLLM's app, once there is one.
    """

    lifecycle: Lifecycle
    access: Access
    exchanges: Exchanges
    own: ASGIApp
    inner: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's scope; uvicorn calls this."""
        own = is_own(scope["path"])
        if not (self.access.admit(scope) or (not own and is_preflight(scope))):
            await tell(NO_KEY, scope, send)
        elif own:
            # Load balancers ask with HEAD; uvicorn leaves the body out by itself.
            await self.own({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)
        elif self.inner is not None and self.lifecycle.state is State.READY:
            await self.exchanges.carry(self.inner, scope, receive, send)
        else:
            await tell(unavailable(self.lifecycle), scope, send)


def is_own(path: str) -> bool:
    """Whether a path is ours: one of `OWN_PATHS` or below it."""
    return any(path == own or path.startswith(own + "/") for own in OWN_PATHS)


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks what it may send from another origin. It cannot send a key with that.

    vLLM's CORS middleware answers every such request itself, from its options alone.
    """
    headers = Headers(scope=scope)
    return scope.get("method") == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def unavailable(lifecycle: Lifecycle) -> Ending:
    """Why the model does not answer now."""
    headers = (RETRY,) if lifecycle.state is State.STARTING else (RETRY, CLOSE)
    match lifecycle.state:
        case State.STARTING:
            message = f"the server is starting ({lifecycle.phase.value}): try again in a few seconds"
        case State.READY:
            message = "this node runs ranks for the server of another node, which has the API"
        case State.FAILED:
            message = f"the engine is not running: {lifecycle.reason}"
        case _:
            message = "the server is shutting down and takes no new requests"
    return Ending(503, "service_unavailable", message, headers)


def build_own_app(
    lifecycle: Lifecycle,
    metrics: Combined,
    status: Callable[[], dict[str, Any]],
    version: dict[str, Any],
    modes: ModeSwitch,
) -> FastAPI:
    """The routes that are not vLLM's. They answer in every state; `Gateway` has asked for the key.

    Args:
        lifecycle: The server's state.
        metrics: Every metric to expose.
        status: Builds the body of `/dspark/status`.
        version: The body of `/version`.
        modes: The verification mode of every engine.
    """
    app = FastAPI(
        title="dspark-serve",
        docs_url=None,
        redoc_url=None,
        openapi_url="/dspark/openapi.json",
        redirect_slashes=False,
    )
    app.add_exception_handler(ApiError, answer_api_error)
    app.add_exception_handler(405, answer_wrong_method)
    app.include_router(page_routes())
    app.include_router(mode_routes(modes))

    @app.get(
        "/livez",
        summary="Whether to leave the process alone: 200 until the engine is dead or has stalled",
        responses=described(503),
    )
    async def livez() -> JSONResponse:
        return JSONResponse(_state(lifecycle), 503 if lifecycle.state is State.FAILED else 200)

    @app.get("/readyz", summary="Whether the model answers: 200 only then", responses=described(503))
    async def readyz() -> JSONResponse:
        ready = lifecycle.state is State.READY
        headers = {} if ready else {"Retry-After": str(RETRY_AFTER_SECONDS)}
        return JSONResponse(_state(lifecycle), 200 if ready else 503, headers)

    @app.get(
        "/metrics",
        summary="Prometheus metrics of vLLM and of verification",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}, **described(401)},
    )
    async def prometheus(request: Request) -> Response:
        encode, content_type = choose_format(request.headers.get("accept", ""))
        return Response(encode(metrics), headers={"Content-Type": content_type})

    @app.get("/version", summary="Versions of vLLM and of this server, and the patch set")
    async def show_version() -> dict[str, Any]:
        return version

    @app.get(
        "/dspark/status",
        summary="State, effective configuration, patches, mode and recent acceptance",
        responses=described(401),
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
