"""The page's files as they are served, in every state and without a key. tests/e2e/test_page.py looks at them."""

import asyncio
import re

import httpx
import pytest

from serve.access import Access
from serve.app import Gateway, build_own_app
from serve.exchange import Exchanges
from serve.lifecycle import Lifecycle
from serve.limits import Limits
from serve.metrics import Combined
from serve.modes import ModeSwitch
from serve.page import ASSETS, HERE
from serve.profile import Verification


def get(path: str) -> httpx.Response:
    async def request() -> httpx.Response:
        life = Lifecycle()
        own = build_own_app(life, Combined(), dict, {}, ModeSwitch(life, Verification.ADAPTIVE))
        app = Gateway(life, Access(["k"]), Exchanges(Limits()), own)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get(path)

    return asyncio.run(request())


@pytest.mark.parametrize("path", ASSETS)
def test_a_starting_server_serves_the_page_without_a_key(path: str) -> None:
    answer = get(path)
    name, content_type = ASSETS[path]
    assert answer.status_code == 200
    assert answer.content == (HERE / name).read_bytes()
    assert answer.headers["content-type"] == content_type


def test_every_file_of_the_page_is_served_and_named_by_it() -> None:
    assert {name for name, _ in ASSETS.values()} == {p.name for p in HERE.iterdir() if p.is_file()} - {"__init__.py"}
    referred = re.findall(r'(?:href|src)="([\w.]+)"', get("/dspark/").text)
    assert set(referred) == {"style.css", "page.js", "icon.svg", "status"}


def test_without_a_slash_it_leads_to_the_page() -> None:
    answer = get("/dspark")
    assert answer.status_code == 307
    assert answer.headers["location"] == "dspark/"
