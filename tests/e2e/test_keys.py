"""A crawl without the key over every route of both apps, spelt in every way that a socket can send."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Iterator

import pytest

from serve.page import ASSETS
from tests.e2e.conftest import KEY
from tests.e2e.running import MODEL, Server
from tests.serve.mangled import mangled

OPEN = {"/livez", "/readyz", "/metrics", "/dspark", *ASSETS}
UNLISTED = ["/docs", "/redoc", "/openapi.json", "/dspark/openapi.json", "/v1/realtime", "/", "/v1", "/nothing", "*"]
"""Routes that stand in no description, and paths that are none."""


def asked(server: Server, *requests: bytes) -> Iterator[http.client.HTTPResponse | None]:
    """The answer to each, over a connection of its own; None where the server closes without one."""
    for request in requests:
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=30) as sock:
            sock.sendall(request)
            answer = http.client.HTTPResponse(sock)
            try:
                answer.begin()
            except http.client.HTTPException:
                yield None
            else:
                yield answer


@pytest.fixture(scope="module")
def routes(guarded: Server) -> list[tuple[str, str]]:
    """(method, path) of every route that is described, and of some that are not."""
    found = [("GET", path) for path in UNLISTED]
    for description in ("/openapi.json", "/dspark/openapi.json"):
        paths = guarded.client.get(description).json()["paths"]
        found += [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert len(found) > 25
    return found


def request(method: str, target: str, version: str = "1.1", **headers: str) -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "Host: x", "Connection: close", "Content-Length: 0"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")


def test_no_route_answers_without_the_key(guarded: Server, routes: list[tuple[str, str]]) -> None:
    """401, or 400 for what is no HTTP at all; anything else is a way in."""
    crawl = []
    for method, path in routes:
        if path in OPEN:
            continue
        crawl += [(request(method, target), target) for target in mangled(path)]
        crawl += [
            (request(method, path, "1.0"), path),
            (request(method, f"http://x{path}"), path),
            (request(method, f"http://x/livez/..{path}"), path),
            (request(method, f"{path}?api_key={'k'}&path=/livez"), path),
            (request(method, path, Authorization="Bearer wrong"), path),
            (request(method, path, Authorization=f"Basic {KEY}"), path),
            (request(method, path, X_Forwarded_Prefix="/livez", X_Original_URL="/livez"), path),
            (request("OPTIONS", path), path),
            (request("HEAD", path), path),
            (request("get", path), path),
        ]
        crawl.append(
            (request("GET", path, Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Version="13"), path)
        )
    let_in = []
    for (sent, target), answer in zip(crawl, asked(guarded, *(sent for sent, _ in crawl)), strict=True):
        opened = target in OPEN and answer is not None and answer.status in (200, 307, 405)
        if not opened and answer is not None and answer.status not in (400, 401, 403):
            let_in.append((sent.decode(errors="replace"), answer.status))
    assert let_in == []
    assert len(crawl) > 1000


def test_the_page_s_files_and_the_probes_are_open(guarded: Server) -> None:
    for path in OPEN:
        (answer,) = asked(guarded, request("GET", path))
        assert answer is not None
        assert answer.status in (200, 307), path


def test_a_websocket_is_refused_before_it_is_one(guarded: Server) -> None:
    handshake = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for path in ("/v1/realtime", "/livez", "/dspark/"):
        (answer,) = asked(guarded, request("GET", path, **handshake).replace(b"Connection: close\r\n", b""))
        assert answer is not None
        assert answer.status == 403, path


def test_either_header_carries_it(guarded: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY, "authorization": ""}):
        assert guarded.client.post("/v1/messages", json=body, headers=headers).status_code == 200


def test_it_stands_in_no_log_status_scrape_error_or_process_list(guarded: Server) -> None:
    told = [guarded.log.read_text(), guarded.client.get("/metrics").text, guarded.client.get("/dspark/status").text]
    told.append(guarded.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}x"}).text)
    for process in guarded.descendants():
        told.append(" ".join(process.cmdline()))
        if process.pid != guarded.process.pid:
            told.append(open(f"/proc/{process.pid}/environ", errors="replace").read())  # noqa: SIM115
    assert os.getpid() not in [process.pid for process in guarded.descendants()]
    assert [text for text in told if KEY in text] == []
