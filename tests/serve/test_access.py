"""Who passes: keys however they are sent and however a path is spelt, and origins as browsers send them."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import Request

from serve.access import Access, same_origin
from serve.api_errors import ApiError
from serve.app import Gateway, build_own_app
from serve.exchange import Exchanges
from serve.lifecycle import Lifecycle
from serve.limits import Limits
from serve.metrics import Combined
from serve.modes import ModeSwitch
from serve.page import ASSETS
from serve.profile import Verification
from tests.serve.mangled import mangled


def request(**headers: str) -> Request:
    return Request({"type": "http", "method": "PUT", "path": "/", "headers": raw(headers)})


def raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def admitted(access: Access, path: str = "/v1/models", kind: str = "http", **headers: str) -> bool:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return access.admit({"type": kind, "method": "GET", "path": path, "headers": raw(named)})


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "BEARER two"])
def test_any_of_the_keys_passes(header: str) -> None:
    assert admitted(Access(["one", "two"]), authorization=header)


@pytest.mark.parametrize("header", [None, "", "one", "Bearer", "Bearer ", "Bearer three", "Basic one", "Bearer one "])
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_anything_else_does_not(header: str | None, kind: str) -> None:
    headers = {} if header is None else {"authorization": header}
    assert not admitted(Access(["one", "two"]), kind=kind, **headers)


def test_anthropics_header_carries_a_key_too() -> None:
    access = Access(["one"])
    assert admitted(access, "/v1/messages", x_api_key="one")
    assert admitted(access, "/v1/messages", x_api_key="one", authorization="Bearer other")
    assert not admitted(access, "/v1/messages", x_api_key="other")
    assert not admitted(access, "/v1/messages", x_api_key="")


def test_without_keys_nobody_is_asked() -> None:
    assert admitted(Access([]))
    assert admitted(Access([]), authorization="Bearer anything")


OPEN = ["/livez", "/readyz", "/metrics", "/dspark", *ASSETS]


@pytest.mark.parametrize("path", OPEN)
def test_what_is_open_is_open_exactly(path: str) -> None:
    assert admitted(Access(["k"]), path)
    assert admitted(Access(["k"], metrics_need_one=True), path) == (path != "/metrics")
    assert not admitted(Access(["k"]), path, kind="websocket")


class ReachedError(Exception):
    """A request got past the check."""


async def reached(*_: Any) -> None:
    raise ReachedError


def guarded() -> Gateway:
    life = Lifecycle()
    life.ready()
    own = build_own_app(life, Combined(), dict, {}, ModeSwitch(life, Verification.ADAPTIVE))
    return Gateway(life, Access(["k"]), Exchanges(Limits()), own, reached)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/tokenize", "/health", "/dspark/mode", *OPEN])
def test_no_spelling_of_a_path_leads_around_the_key(path: str) -> None:
    """Whatever a spelling is decoded to: it is one of the open paths and answered by our app, or refused."""

    async def scenario() -> None:
        for target in mangled(path):
            scope = {"type": "http", "method": "GET", "path": target, "headers": [], "query_string": b""}
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            await guarded()(scope, reached, send)
            assert sent[0]["status"] == 401 or target in OPEN, target

    asyncio.run(scenario())


def test_the_refusal_says_what_to_send_and_nothing_of_the_key() -> None:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(guarded())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.post("/v1/completions", json={}, headers={"authorization": "Bearer guess"})

    answer = asyncio.run(scenario())
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == 401
    assert "guess" not in answer.text


def test_a_browsers_question_about_another_origin_needs_no_key() -> None:
    """It cannot carry one. On our own paths there is nothing to allow."""

    async def ask(path: str, **headers: str) -> int | None:
        transport = httpx.ASGITransport(guarded())
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            try:
                return (await client.options(path, headers=named)).status_code
            except ReachedError:
                return None

    whole = {"origin": "http://page", "access_control_request_method": "POST"}
    assert asyncio.run(ask("/v1/completions", **whole)) is None
    assert asyncio.run(ask("/v1/completions", origin="http://page")) == 401
    assert asyncio.run(ask("/v1/completions")) == 401
    assert asyncio.run(ask("/dspark/mode", **whole)) == 401


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "server:8000"),
        ("http://server:8000", "server:8000"),
        ("https://server:8000", "server:8000"),
        ("http://SERVER", "server"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_no_origin_and_our_own_pass(origin: str | None, host: str) -> None:
    same_origin(request(host=host, **({} if origin is None else {"origin": origin})))


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://other:8000", "http://server", "http://server:80", "http://server:8000.evil", "http://[", "x"],
)
@pytest.mark.parametrize("host", ["server:8000", ""])
def test_every_other_origin_is_refused(origin: str, host: str) -> None:
    with pytest.raises(ApiError) as refused:
        same_origin(request(host=host, origin=origin))
    assert refused.value.status == 403


@pytest.mark.parametrize("origins", [("http://server", "http://evil"), ("http://evil", "http://server")])
def test_of_several_origins_each_must_be_ours(origins: tuple[str, ...]) -> None:
    several = request(host="server")
    several.scope["headers"] += [(b"origin", origin.encode()) for origin in origins]
    with pytest.raises(ApiError):
        same_origin(several)
