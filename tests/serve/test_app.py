"""The gateway and our own routes, in every state."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from serve.access import Access
from serve.app import Gateway, build_own_app, is_own
from serve.errors import ExitCode
from serve.exchange import Exchanges
from serve.lifecycle import Lifecycle, Phase
from serve.limits import Limits
from serve.metrics import Combined
from serve.modes import ModeSwitch
from serve.profile import Verification


class Good(Collector):
    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("vllm:good", "Answers.", value=1)


class Broken(Collector):
    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily("half", "Seen before the fault.", value=1)
        raise OSError("stale file handle")


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands where vLLM's app is: says which path reached it."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def gateway(lifecycle: Lifecycle) -> Gateway:
    metrics, modes = Combined(Broken(), Good()), ModeSwitch(lifecycle, Verification.ADAPTIVE)
    version = {"version": "0.32.0"}
    own = build_own_app(lifecycle, metrics, lambda: {"profile": "tiny-cpu"}, version, modes)
    return Gateway(lifecycle, Access([]), Exchanges(Limits()), own, inner)


def ask(lifecycle: Lifecycle, path: str, method: str = "GET", **kwargs: Any) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(gateway(lifecycle))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(request())


def starting() -> Lifecycle:
    life = Lifecycle()
    life.begin(Phase.LOADING)
    return life


def ready() -> Lifecycle:
    life = Lifecycle()
    life.ready()
    return life


def draining() -> Lifecycle:
    life = ready()
    life.drain()
    return life


def failed() -> Lifecycle:
    life = ready()
    life.fail("the engine died: killed", ExitCode.ENGINE_DIED)
    return life


@pytest.mark.parametrize(
    ("life", "livez", "readyz", "model"),
    [(starting, 200, 503, 503), (ready, 200, 200, 200), (draining, 200, 503, 503), (failed, 503, 503, 503)],
)
def test_what_each_state_answers(life: Any, livez: int, readyz: int, model: int) -> None:
    assert ask(life(), "/livez").status_code == livez
    assert ask(life(), "/readyz").status_code == readyz
    assert ask(life(), "/v1/models").status_code == model
    assert ask(life(), "/health").status_code == model
    assert ask(life(), "/metrics").status_code == 200
    assert ask(life(), "/version").json() == {"version": "0.32.0"}
    assert ask(life(), "/dspark/status").json()["profile"] == "tiny-cpu"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/version", "/dspark/status"])
def test_a_load_balancer_may_ask_with_head(path: str) -> None:
    assert ask(ready(), path, "HEAD").status_code == ask(ready(), path).status_code == 200
    refused = ask(ready(), path, "PUT")
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    assert refused.json()["error"]["code"] == 405


def test_every_method_of_a_path_is_named() -> None:
    assert ask(ready(), "/dspark/mode", "DELETE").headers["allow"] == "GET, PUT"


def test_while_starting_a_client_is_told_when_to_come_back() -> None:
    response = ask(starting(), "/v1/chat/completions", "POST", json={})
    assert response.headers["retry-after"] == "5"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == 503
    assert "starting the engine and loading weights" in error["message"]
    assert "connection" not in response.headers
    assert ask(starting(), "/readyz").json() == {
        "state": "starting",
        "seconds": 0.0,
        "phase": "starting the engine and loading weights",
        "progress": 0.5,
    }


def test_a_draining_server_sends_clients_elsewhere() -> None:
    response = ask(draining(), "/v1/models")
    assert response.headers["connection"] == "close"
    assert "shutting down" in response.json()["error"]["message"]


def test_a_failure_is_named_everywhere() -> None:
    assert ask(failed(), "/livez").json()["reason"] == "the engine died: killed"
    assert "the engine died: killed" in ask(failed(), "/v1/models").json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/", "/livezz", "/metricsx", "/dsparks", "/v1/metrics", "//livez"])
def test_every_other_path_is_vllms(path: str) -> None:
    assert not is_own(path)
    assert ask(ready(), f"http://server{path}").text == path


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics", "/dspark/status", "/dspark/nothing"])
def test_our_paths_never_reach_vllm(path: str) -> None:
    assert ask(ready(), path).text != path


def test_one_failing_source_does_not_fail_the_scrape() -> None:
    response = ask(ready(), "/metrics")
    names = [family.name for family in text_string_to_metric_families(response.text)]
    assert names == ["vllm:good"]


PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.5"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (PROMETHEUS_2, "application/openmetrics-text"),
        (PROMETHEUS_3, "application/openmetrics-text"),
        ("application/openmetrics-text;version=1.0.0;escaping=underscores", "application/openmetrics-text"),
        ("text/plain;version=1.0.0;escaping=underscores", "text/plain"),
        ("*/*", "text/plain"),
    ],
)
def test_every_scraper_gets_its_format_and_the_same_names(accept: str, content_type: str) -> None:
    response = ask(ready(), "/metrics", headers={"accept": accept})
    assert response.headers["content-type"].startswith(content_type)
    assert "\nvllm:good 1.0\n" in response.text
    assert response.text.count("# EOF") == (content_type != "text/plain")


def test_a_websocket_is_closed_while_starting() -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(gateway(starting())({"type": "websocket", "path": "/v1/realtime"}, receive, send))
    assert [(m["type"], m["code"]) for m in sent] == [("websocket.close", 1013)]


def test_a_headless_node_says_who_has_the_api() -> None:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(Gateway(ready(), Access([]), Exchanges(Limits()), own=inner))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/v1/models")

    answer = asyncio.run(request())
    assert answer.status_code == 503
    assert "another node" in answer.json()["error"]["message"]
