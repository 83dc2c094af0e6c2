"""Switching a real engine while it serves."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest

from tests.e2e.conftest import KEY
from tests.e2e.prompts import python_prompts
from tests.e2e.running import Server

ROWS = 64
"""What `small_sampler` lets the rejection sampler take."""


def complete_all(server: Server, prompts: list[str], max_tokens: int = 32) -> list[str]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda prompt: server.complete(prompt, max_tokens=max_tokens), prompts)
        return [answer["choices"][0]["text"] for answer in answers]


def switch(server: Server, mode: str) -> httpx.Response:
    return server.client.put("/dspark/mode", json={"mode": mode})


def plans(server: Server) -> dict[str, float]:
    samples = server.samples()
    return {plan: samples["dspark_verification_steps_total", plan] for plan in ("full", "trimmed", "none", "fixed")}


def drafts(server: Server, what: str) -> float:
    return server.samples()[f"dspark_{what}_draft_tokens_total", ""]


@pytest.mark.parametrize("switches", [200, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_random_switches_under_load_change_no_word(guarded: Server, switches: int) -> None:
    """And no step asks more of the rejection sampler at once than it takes: upstream's engine would die of it."""
    prompts, choices = python_prompts(), random.Random(6)
    assert switch(guarded, "adaptive").status_code == 200
    expected = complete_all(guarded, prompts)
    seen, done = len(guarded.decisions("verification")), threading.Event()

    def load() -> int:
        rounds = 0
        while not done.is_set():
            assert complete_all(guarded, prompts) == expected
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as loading, ThreadPoolExecutor(16) as switching:
        rounds = loading.submit(load)
        try:
            modes = [choices.choice(("adaptive", "fixed")) for _ in range(switches)]
            answers = list(switching.map(lambda mode: switch(guarded, mode), modes))
        finally:
            done.set()
        assert rounds.result() >= 1
    assert {answer.status_code for answer in answers} == {200}
    # An answer says what is in force by then, which another thread may have switched once more.
    assert {answer.json()["mode"] for answer in answers} == {"adaptive", "fixed"}

    steps = guarded.decisions("verification")[seen:]
    fixed = [step["plan"] == "fixed" for step in steps]
    assert sum(before != after for before, after in pairwise(fixed)) > 10
    assert {step["plan"] for step in steps} >= {"fixed", "trimmed"}
    for step in steps:
        room = ROWS - len(step["requests"])
        # Only everything can be sampled in chunks.
        assert step["verified"] <= room or step["verified"] == step["proposed"]
        if step["plan"] == "fixed":
            assert step["verified"] == step["proposed"]
    assert any(step["plan"] == "fixed" and step["verified"] > ROWS for step in steps)


def test_the_mode_is_seen_in_every_place(guarded: Server) -> None:
    """Eight requests of six rows: fewer than the sampler takes, and enough that an adaptive budget binds."""
    prompts = python_prompts()[:8]
    for mode in ("fixed", "adaptive"):
        answer = switch(guarded, mode)
        assert answer.status_code == 200
        assert answer.json() == guarded.client.get("/dspark/mode").json()
        before = plans(guarded) | {what: drafts(guarded, what) for what in ("proposed", "verified")}
        complete_all(guarded, prompts)
        after = plans(guarded) | {what: drafts(guarded, what) for what in ("proposed", "verified")}
        grown = {name: after[name] - before[name] for name in after}
        assert grown["proposed"] > 100
        if mode == "fixed":
            assert grown["verified"] == grown["proposed"]
            assert grown["fixed"] > 0
            assert grown["full"] == grown["trimmed"] == grown["none"] == 0
        else:
            assert grown["verified"] < grown["proposed"]
            assert grown["fixed"] == 0
            assert grown["trimmed"] > 0
        said = guarded.client.get("/dspark/status").json()["mode"]
        assert (said["mode"], said["configured"], said["switchable"]) == (mode, "adaptive", True)
        assert said["engines"] == [{"engine": 0, "mode": mode}]
        lines = guarded.client.get("/metrics").text.splitlines()
        shown = [line for line in lines if line.startswith("dspark_mode{") and line.endswith(" 1.0")]
        assert shown == [f'dspark_mode{{mode="{mode}"}} 1.0']


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Authorization": ""}, {"mode": "fixed"}, 401),
        ({"Authorization": "Bearer guessed"}, {"mode": "fixed"}, 401),
        ({"Origin": "http://elsewhere.example"}, {"mode": "fixed"}, 403),
        ({"Origin": "null"}, {"mode": "fixed"}, 403),
        ({}, {"mode": "off"}, 422),
        ({}, {}, 422),
    ],
)
def test_a_refused_switch_changes_nothing(guarded: Server, headers: dict, body: dict, status: int) -> None:
    assert switch(guarded, "adaptive").status_code == 200
    refused = guarded.client.put("/dspark/mode", json=body, headers=headers)
    assert refused.status_code == status
    assert refused.json()["error"]["code"] == status
    assert not [name for name in refused.headers if name.startswith("access-control-")]
    assert guarded.client.get("/dspark/mode").json()["mode"] == "adaptive"


def test_what_tells_of_the_server_takes_the_key_and_probes_do_not(guarded: Server) -> None:
    with httpx.Client(base_url=guarded.url) as stranger:
        for path in ("/dspark/status", "/dspark/mode", "/v1/models"):
            assert stranger.get(path).status_code == 401
        for path in ("/livez", "/readyz", "/metrics"):
            assert stranger.get(path).status_code == 200
    assert KEY not in guarded.client.get("/dspark/status").text


def test_no_page_elsewhere_is_allowed_to_ask(guarded: Server) -> None:
    asked = {"Origin": "http://elsewhere.example", "Access-Control-Request-Method": "PUT"}
    answer = guarded.client.options("/dspark/mode", headers=asked)
    assert answer.status_code == 405
    assert not [name for name in answer.headers if name.startswith("access-control-")]
