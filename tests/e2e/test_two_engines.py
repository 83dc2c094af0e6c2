"""The mode of two data-parallel engines: confirmed by both, and told apart while one does not answer.

`make test-slow`: two engines load for minutes on two cores.
"""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from serve.modes import CONFIRM_SECONDS
from tests.bench.two_engines import ask_for_uneven_work, compared
from tests.e2e.prompts import python_prompts
from tests.e2e.running import MODEL, Server, engine_cores, serving
from tests.e2e.test_modes import complete_all, plans, switch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("two"), vllm=("--data-parallel-size", "2")) as running:
        running.wait_until_ready()
        yield running


def modes(server: Server) -> list[str | None]:
    return [engine["mode"] for engine in server.client.get("/dspark/mode").json()["engines"]]


def test_both_engines_switch_under_load_and_no_word_changes(two: Server) -> None:
    prompts, choices = python_prompts(), random.Random(7)
    expected = complete_all(two, prompts)
    before, done = plans(two), threading.Event()

    def load() -> None:
        while not done.is_set():
            assert complete_all(two, prompts) == expected

    with ThreadPoolExecutor(1) as loading:
        under_load = loading.submit(load)
        try:
            for _ in range(100):
                mode = choices.choice(("adaptive", "fixed"))
                assert switch(two, mode).json()["mode"] == mode
                assert modes(two) == [mode, mode]
        finally:
            done.set()
        under_load.result()
    after = plans(two)
    assert after["fixed"] > before["fixed"]
    assert after["trimmed"] + after["full"] > before["trimmed"] + before["full"]


def test_the_scrape_is_the_sum_of_both_engines_traces(two: Server) -> None:
    ask_for_uneven_work(two, MODEL, requests=12)
    found = compared(two)
    assert found["wrong"] == []
    assert all(engine["steps"] > 0 for engine in found["engines"].values())


def test_an_engine_that_is_held_still_confirms_when_it_goes_on(two: Server) -> None:
    assert switch(two, "adaptive").status_code == 200
    second: psutil.Process = engine_cores(two)[1]
    second.suspend()
    try:
        answer = switch(two, "fixed")
        assert answer.status_code == 504
        error = answer.json()["error"]
        assert f"engine 1 did not answer within {CONFIRM_SECONDS:g} s" in error["message"]
        assert error["mode"] is None
        assert modes(two) == ["fixed", None]
        metrics = two.client.get("/metrics").text
        for mode in ("adaptive", "fixed", "off"):
            assert f'dspark_mode{{mode="{mode}"}} 0.0' in metrics
    finally:
        second.resume()
    two.wait_until(lambda: modes(two) == ["fixed", "fixed"])
    assert switch(two, "adaptive").json()["mode"] == "adaptive"
