"""The mode of two engines whose answers are scripted: what no real engine does on demand, and every refusal.

tests/e2e/test_modes.py switches real ones.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from patches.modes import Mode
from serve.access import Access
from serve.app import Gateway, build_own_app
from serve.exchange import Exchanges
from serve.lifecycle import Lifecycle
from serve.limits import Limits
from serve.metrics import Combined
from serve.modes import ModeSwitch, SwitchRefusedError, SwitchUnconfirmedError
from serve.profile import Verification

Script = Callable[[int, str, tuple[Any, ...]], Awaitable[list[str]]]


class Engines:
    """As much of vLLM's client as answers a call, for two engines of two workers."""

    engine_ranks_managed = (0, 1)
    core_engines = (b"first", b"second")

    def __init__(self, script: Script | None = None) -> None:
        self.engine_core = self
        self.workers = {0: "adaptive", 1: "adaptive"}
        self.calls: list[tuple[int, str]] = []
        self._script = script

    async def _call_utility_async(self, utility: str, method: str, timeout: None, arguments: tuple, *_: Any, **to: Any):
        assert utility == "collective_rpc"
        engine = self.core_engines.index(to["engine"])
        if method == "dspark_mode":
            return [self.workers[engine]] * 2
        assert method == "dspark_switch_mode"
        self.calls.append((engine, arguments[0]))
        if self._script is not None:
            return await self._script(engine, method, arguments)
        await asyncio.sleep(0)
        self.workers[engine] = arguments[0]
        return [arguments[0]] * 2


def ready() -> Lifecycle:
    life = Lifecycle()
    life.ready()
    return life


async def attached(engines: Engines, configured: Verification = Verification.ADAPTIVE, **kwargs: Any) -> ModeSwitch:
    switch = ModeSwitch(ready(), configured, **kwargs)
    await switch.attach(engines)
    return switch


def test_every_engine_switches_and_the_configured_mode_stays() -> None:
    async def scenario() -> None:
        engines = Engines()
        modes = await attached(engines)
        await modes.switch(Mode.FIXED)
        assert engines.workers == {0: "fixed", 1: "fixed"}
        assert modes.as_json() == {
            "mode": "fixed",
            "configured": "adaptive",
            "switchable": True,
            "reason": None,
            "engines": [{"engine": 0, "mode": "fixed"}, {"engine": 1, "mode": "fixed"}],
        }

    asyncio.run(scenario())


def test_switches_are_carried_out_one_after_the_other() -> None:
    async def scenario() -> None:
        engines = Engines()
        modes = await attached(engines)
        wanted = [Mode.FIXED, Mode.ADAPTIVE, Mode.FIXED, Mode.FIXED, Mode.ADAPTIVE]
        await asyncio.gather(*(modes.switch(mode) for mode in wanted))
        assert engines.calls == [(engine, mode) for mode in wanted for engine in (0, 1)]
        assert modes.current == "adaptive"

    asyncio.run(scenario())


def test_an_engine_that_answers_late_is_unknown_until_it_does() -> None:
    async def scenario() -> None:
        free = asyncio.Event()

        async def second_is_slow(engine: int, method: str, arguments: tuple[Any, ...]) -> list[str]:
            if engine == 1:
                await free.wait()
            return [arguments[0]] * 2

        modes = await attached(Engines(second_is_slow), confirm_seconds=0.01)
        with pytest.raises(SwitchUnconfirmedError, match=r"engine 1 did not answer within 0.01 s$"):
            await modes.switch(Mode.FIXED)
        assert modes.current is None
        assert [engine["mode"] for engine in modes.as_json()["engines"]] == ["fixed", None]
        free.set()
        await asyncio.sleep(0.01)
        assert modes.current == "fixed"

    asyncio.run(scenario())


def test_an_engine_that_fails_is_named_and_can_be_asked_again() -> None:
    async def scenario() -> None:
        failures = ["first\nline"]

        async def fails_once(engine: int, method: str, arguments: tuple[Any, ...]) -> list[str]:
            if engine == 0 and failures:
                raise RuntimeError(failures.pop())
            return [arguments[0]] * 2

        modes = await attached(Engines(fails_once))
        with pytest.raises(SwitchUnconfirmedError, match="engine 0: first line"):
            await modes.switch(Mode.FIXED)
        assert [engine["mode"] for engine in modes.as_json()["engines"]] == [None, "fixed"]
        await modes.switch(Mode.FIXED)
        assert modes.current == "fixed"

    asyncio.run(scenario())


def test_workers_that_answer_differently_confirm_nothing() -> None:
    async def scenario() -> None:
        async def one_stays(engine: int, method: str, arguments: tuple[Any, ...]) -> list[str]:
            return [arguments[0], "adaptive"]

        modes = await attached(Engines(one_stays))
        with pytest.raises(SwitchUnconfirmedError, match="engine 0: its workers answered fixed, adaptive; engine 1"):
            await modes.switch(Mode.FIXED)
        assert modes.current is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("configured", "does", "reason"),
    [
        (Verification.FIXED, "fixed", "started with --verification fixed and does fixed"),
        (Verification.OFF, "off", "started with --verification off and does off"),
        # Upstream clears the flag for a draft that it cannot do it with.
        (Verification.ADAPTIVE, "fixed", "was asked for and the engine does fixed"),
    ],
)
def test_only_what_does_adaptive_verification_is_switched(configured: Verification, does: str, reason: str) -> None:
    async def scenario() -> None:
        engines = Engines()
        engines.workers = {0: does, 1: does}
        modes = await attached(engines, configured)
        assert modes.current == does
        assert not modes.as_json()["switchable"]
        with pytest.raises(SwitchRefusedError, match=reason):
            await modes.switch(Mode.FIXED)
        assert engines.calls == []

    asyncio.run(scenario())


def test_a_switch_that_waited_until_the_server_drains_is_refused() -> None:
    async def scenario() -> None:
        life, free = ready(), asyncio.Event()

        async def slow(engine: int, method: str, arguments: tuple[Any, ...]) -> list[str]:
            await free.wait()
            return [arguments[0]] * 2

        modes = ModeSwitch(life, Verification.ADAPTIVE)
        await modes.attach(Engines(slow))
        first = asyncio.create_task(modes.switch(Mode.FIXED))
        second = asyncio.create_task(modes.switch(Mode.ADAPTIVE))
        await asyncio.sleep(0)
        life.drain()
        free.set()
        await first
        with pytest.raises(SwitchRefusedError, match="the server is draining"):
            await second
        assert modes.current == "fixed"

    asyncio.run(scenario())


KEY = {"authorization": "Bearer k"}
FIXED = b'{"mode": "fixed"}'


def guarded(life: Lifecycle, modes: ModeSwitch) -> Gateway:
    """Our app behind the check of the key."""
    return Gateway(life, Access(["k"]), Exchanges(Limits()), build_own_app(life, Combined(), dict, {}, modes))


def put(body: bytes = FIXED, life: Lifecycle | None = None, script: Script | None = None, **headers: str):
    """A PUT with a key to a server that has one, its two engines attached."""

    async def scenario() -> httpx.Response:
        modes = ModeSwitch(life or ready(), Verification.ADAPTIVE, confirm_seconds=0.05)
        await modes.attach(Engines(script))
        app = guarded(life or ready(), modes)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server:8000") as client:
            return await client.put("/dspark/mode", content=body, headers=KEY | headers)

    return asyncio.run(scenario())


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves"])
def test_a_body_that_never_arrives_is_given_up(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    monkeypatch.setattr("serve.mode_routes.BODY_PAUSE_SECONDS", 0.05)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if leaves:
            return {"type": "http.disconnect"}
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def scenario() -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in KEY.items()]
        scope = {"type": "http", "method": "PUT", "path": "/dspark/mode", "query_string": b"", "headers": headers}
        app = guarded(ready(), ModeSwitch(ready(), Verification.ADAPTIVE))
        await asyncio.wait_for(app(scope, receive, send), 10)  # type: ignore[arg-type]

    asyncio.run(scenario())
    assert sent[0]["status"] == 408


def test_a_put_answers_with_what_is_then_in_force() -> None:
    answer = put()
    assert answer.status_code == 200
    assert answer.json()["mode"] == "fixed"
    assert put(origin="http://server:8000").status_code == 200


def test_no_page_is_told_that_it_may() -> None:
    for answer in (put(), put(origin="http://evil")):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"fixed",
        b'"fixed"',
        b"[]",
        b"{}",
        b'{"mode": "off"}',
        b'{"mode": "Fixed"}',
        b'{"mode": null}',
        b'{"mode": ["fixed"]}',
        b'{"mode": "fixed", "for": 60}',
        b"\xff\xfe",
        b'{"mode": "fixed"' + b" " * 1000 + b"]",
        b"[" * 1000,
    ],
)
def test_anything_but_a_mode_is_told_which_there_are(body: bytes) -> None:
    refused(body, 422)


def refused(body: bytes, status: int) -> None:
    answer = put(body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert '"adaptive"' in error["message"]
    assert '"fixed"' in error["message"]
    assert "only at start" in error["message"]


def test_a_body_that_is_too_long_for_a_mode_gets_413() -> None:
    refused(b'{"mode": "fixed"' + b" " * 2000 + b"}", 413)


def test_the_key_comes_before_the_origin_and_the_origin_before_the_body() -> None:
    assert put(b"", authorization="Bearer wrong", origin="http://evil").status_code == 401
    assert put(b"", origin="http://evil").status_code == 403


def test_it_is_switched_only_while_the_server_is_ready() -> None:
    draining = ready()
    draining.drain()
    for life, state in ((Lifecycle(), "starting"), (draining, "draining")):
        answer = put(life=life)
        assert answer.status_code == 409
        assert state in answer.json()["error"]["message"]


def test_what_is_not_confirmed_is_answered_with_what_is_known() -> None:
    async def second_is_stuck(engine: int, method: str, arguments: tuple[Any, ...]) -> list[str]:
        if engine == 1:
            await asyncio.sleep(60)
        return [arguments[0]] * 2

    answer = put(script=second_is_stuck)
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert error["mode"] is None
    assert error["engines"] == [{"engine": 0, "mode": "fixed"}, {"engine": 1, "mode": None}]


@pytest.mark.parametrize("path", ["/dspark/status", "/dspark/mode"])
def test_reading_takes_the_key_too(path: str) -> None:
    async def scenario() -> list[int]:
        life = Lifecycle()
        app = guarded(life, ModeSwitch(life, Verification.ADAPTIVE))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return [(await client.get(path, headers=headers)).status_code for headers in ({}, KEY)]

    assert asyncio.run(scenario()) == [401, 200]
