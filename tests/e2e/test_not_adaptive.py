"""Servers that were started without speculation or fixed, beside the adaptive one. The last test of each stops it."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.prompts import python_prompts
from tests.e2e.running import MODEL, Server, serving
from tests.e2e.test_start import DRAIN_SECONDS, finishes_what_is_under_way
from tests.e2e.test_verification import complete_all, counts
from tests.processes import left

COUNTED = ("dspark_proposed", "dspark_verif", "dspark_accept", "dspark_step")
PREDICTED = ("dspark_expected", "dspark_confidence", "dspark_step_predicted", "dspark_calibration")
"""Beginnings of the series that need speculation, and of those that need a prediction too."""


def texts(server: Server) -> list[str]:
    return [answer["choices"][0]["text"] for answer in complete_all(server, python_prompts(), max_tokens=48)]


@pytest.fixture(scope="module")
def adaptive_texts(server: Server) -> list[str]:
    return texts(server)


@pytest.fixture(scope="module", params=["off", "fixed"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp(request.param)
    with serving(directory, "--drain-seconds", DRAIN_SECONDS, verification=request.param) as running:
        running.wait_until_ready()
        yield running


off = pytest.mark.parametrize("other", ["off"], indirect=True)
fixed = pytest.mark.parametrize("other", ["fixed"], indirect=True)


def test_greedy_output_is_the_same_as_the_adaptive_servers(other: Server, adaptive_texts: list[str]) -> None:
    assert texts(other) == adaptive_texts
    assert len(set(adaptive_texts)) > 8, "the prompts hardly differ in their completions"


@off
def test_without_speculation_nothing_is_counted(other: Server) -> None:
    other.complete("def f(x):", max_tokens=16)
    assert not [name for name, _ in other.samples() if name.startswith(COUNTED + PREDICTED)]


@fixed
def test_fixed_verification_takes_every_draft_and_predicts_nothing(other: Server) -> None:
    other.complete("def f(x):", max_tokens=32, ignore_eos=True)
    counted, samples = counts(other), other.samples()
    assert counted["proposed"] == counted["verified"] > counted["accepted"] > 0
    assert samples["dspark_verification_steps_total", "fixed"] > 0
    assert samples["dspark_verification_steps_total", "trimmed"] == 0
    assert not [name for name, _ in samples if name.startswith(PREDICTED)]


def test_the_mode_cannot_be_switched(other: Server, request: pytest.FixtureRequest) -> None:
    refused = other.client.put("/dspark/mode", json={"mode": "adaptive"})
    assert refused.status_code == 409
    mode = other.client.get("/dspark/mode").json()["mode"]
    assert f"started with --verification {mode}" in refused.json()["error"]["message"]
    assert mode == request.node.callspec.params["other"]


@off
def test_ctrl_c_finishes_what_is_under_way(other: Server) -> None:
    """A terminal's Ctrl-C reaches every process of the group."""
    finishes_what_is_under_way(other, signal.SIGINT)


@fixed
def test_a_second_signal_ends_it_at_once(other: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        family = other.descendants()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 900, "ignore_eos": True}
        under_way = pool.submit(other.client.post, "/v1/completions", json=body)
        other.wait_until(lambda: other.client.get("/dspark/status").json()["requests_under_way"] > 0)
        other.process.send_signal(signal.SIGTERM)
        other.wait_until(lambda: other.client.get("/readyz").json()["state"] == "draining")
        other.process.send_signal(signal.SIGTERM)
        assert other.process.wait(20) == 0
        assert under_way.exception() is not None or under_way.result().status_code >= 500
        assert not left(family)
