"""Telemetry against a trace of every decision, on a real engine that never comes to rest.

One server for all: its head is too sure of itself (`bold_head`), calibration is on, requests come and go for 500 steps.
"""

import json
import os
import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from patches.telemetry.tally import BINS
from patches.telemetry.timing import EVERY
from serve.metrics import BIN_NAMES
from serve.tiny.calibration import expected_calibration_error
from serve.tiny.corpus import read_sources
from tests.e2e.prompts import python_prompts
from tests.e2e.running import MODEL, Server, serving

STEPS = 500
DRAFTS = 5
CLIENTS = 3
HERE = Path(__file__).parent


@dataclass
class Churn:
    """What was served, once nothing runs any more.

    Attributes:
        server: The server, at rest.
        answers: Bodies of the requests that were not given up.
        given_up: How many were.
        steps: (ranking, outcome) of every verification step, from the trace.
        scrape: (series, labels but `engine` and `model_name`) -> value.
    """

    server: Server
    answers: list[dict[str, Any]]
    given_up: int
    steps: list[tuple[dict[str, Any], dict[str, Any]]]
    scrape: dict[tuple[str, str], float]

    def of(self, series: str, *labels: str) -> list[float]:
        """The values of a series, by the value of its one label."""
        return [self.scrape[series, label] for label in labels]

    def by_position(self, what: str) -> list[float]:
        """Counter of drafts, by position."""
        return self.of(f"dspark_{what}_draft_tokens_total", *map(str, range(DRAFTS)))


def scrape(server: Server) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            found[sample.name, ",".join(labels.values())] += sample.value
    return found


def give_up(server: Server, prompt: str) -> None:
    """Leave in the middle of a stream."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 200, "stream": True, "temperature": 0.7, "ignore_eos": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        for chunk, _ in enumerate(response.iter_lines()):
            if chunk >= 6:
                return


def keep_busy(server: Server, seed: int, enough: threading.Event) -> tuple[list[dict[str, Any]], int]:
    """Send one request after another, of every kind; returns the answers, and how many were given up."""
    draw = random.Random(seed)
    prompts = python_prompts()
    long = [source.text[:1800] for source in read_sources("held_out")][:3]
    answers, given_up = [], 0
    while not enough.is_set():
        kind = draw.choice(["short", "short", "long", "one token", "given up"])
        if kind == "given up":
            give_up(server, draw.choice(prompts))
            given_up += 1
            continue
        # Long prompts are prefilled in chunks, and from the prefix cache when they come again.
        prompt = {"short": draw.choice(prompts), "long": draw.choice(long), "one token": [draw.randrange(40, 90)]}[kind]
        tokens, temperature = draw.randrange(4, 40), draw.choice([0, 0.8])
        answers.append(server.complete(prompt, max_tokens=tokens, temperature=temperature, seed=draw.randrange(99)))
    return answers, given_up


@pytest.fixture(scope="module")
def churn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Churn]:
    """Serve until `STEPS` verification steps were decided, then come to rest."""
    search_path = os.pathsep.join(filter(None, (str(HERE / "bold_head"), os.environ.get("PYTHONPATH"))))
    with serving(
        tmp_path_factory.mktemp("telemetry"),
        "--calibration",
        "on",
        vllm=("--per-request-spec-decode-metrics", "detailed"),
        PYTHONPATH=search_path,
    ) as server:
        server.wait_until_ready()
        enough = threading.Event()
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(keep_busy, server, seed, enough) for seed in range(CLIENTS)]
            try:
                server.wait_until(lambda: len(outcomes(server)) >= STEPS or any(c.done() for c in clients))
            finally:
                enough.set()
            answers = [answer for client in clients for answer in client.result()[0]]
            given_up = sum(client.result()[1] for client in clients)
        server.wait_until(lambda: server.samples()["vllm:num_requests_running", ""] == 0)
        server.wait_until(
            lambda: sum(sum(r["eligible"]) > 0 for r in server.decisions("ranking")) == len(outcomes(server))
        )
        rankings = [ranking for ranking in server.decisions("ranking") if sum(ranking["eligible"])]
        steps = list(zip(rankings, outcomes(server), strict=True))
        yield Churn(server, answers, given_up, steps, scrape(server))


def outcomes(server: Server) -> list[dict[str, Any]]:
    return server.decisions("verification")


def test_the_run_was_eventful(churn: Churn) -> None:
    plans = {plan: churn.scrape["dspark_verification_steps_total", plan] for plan in ("full", "trimmed", "none")}
    assert sum(plans.values()) == len(churn.steps) >= STEPS
    assert plans["full"] > 20
    assert plans["trimmed"] > 20
    assert churn.scrape["vllm:prefix_cache_hits_total", ""] > 0
    assert churn.given_up > 3
    finished = sum(churn.of("vllm:request_success_total", "stop", "length"))
    assert finished == len(churn.answers), "whoever was given up was not served to the end"
    chunk = 256  # max_num_batched_tokens
    assert max(answer["usage"]["prompt_tokens"] for answer in churn.answers) > chunk
    assert any(0 in ranking["eligible"] for ranking, _ in churn.steps), "no padded request was scheduled"


def test_every_count_is_the_traces_own(churn: Churn) -> None:
    positions = np.arange(DRAFTS)
    sums = {name: np.zeros(DRAFTS) for name in ("proposed", "verified", "accepted", "expected_accepted")}
    acceptance, width = np.zeros(DRAFTS + 2), np.zeros(DRAFTS + 2)
    predictions, confirmed = np.zeros(BINS), np.zeros(BINS)
    for ranking, outcome in churn.steps:
        rows = np.flatnonzero(ranking["eligible"])
        assert outcome["requests"] == [ranking["requests"][row] for row in rows]
        for row, accepted in zip(rows, outcome["accepted"], strict=True):
            eligible, admitted = ranking["eligible"][row], ranking["admitted"][row]
            confidences = np.array(ranking["confidences"][row])
            assert accepted <= admitted <= eligible
            sums["proposed"] += positions < eligible
            sums["verified"] += positions < admitted
            sums["accepted"] += positions < accepted
            sums["expected_accepted"] += np.where(positions < admitted, np.cumprod(confidences), 0)
            acceptance[accepted + 1] += 1
            width[admitted + 1] += 1
            for position in range(min(admitted, accepted + 1)):
                which = min(int(np.float32(confidences[position]) * np.float32(BINS)), BINS - 1)
                predictions[which] += 1
                confirmed[which] += position < accepted
    assert churn.by_position("proposed") == sums["proposed"].tolist()
    assert churn.by_position("verified") == sums["verified"].tolist()
    assert churn.by_position("accepted") == sums["accepted"].tolist()
    assert churn.by_position("expected_accepted") == pytest.approx(sums["expected_accepted"], rel=1e-5)
    for series, lengths in (("dspark_acceptance_length", acceptance), ("dspark_verified_length", width)):
        bounds = [f"{n}.0" for n in range(1, DRAFTS + 2)]
        assert churn.of(f"{series}_bucket", *bounds) == np.cumsum(lengths)[1:].tolist()
        assert churn.scrape[f"{series}_sum", ""] == lengths @ np.arange(DRAFTS + 2)
    assert churn.of("dspark_confidence_predictions_total", *BIN_NAMES) == predictions.tolist()
    assert churn.of("dspark_confidence_accepted_total", *BIN_NAMES) == confirmed.tolist()
    assert sum(predictions) > STEPS


def test_each_requests_own_account_agrees(churn: Churn) -> None:
    """What the response says was accepted, by upstream's scheduler, is what the worker counted for that request."""
    counted: dict[str, int] = defaultdict(int)
    for _, outcome in churn.steps:
        for request, accepted in zip(outcome["requests"], outcome["accepted"], strict=True):
            counted[request] += accepted
    compared = 0
    for answer in churn.answers:
        own = answer["metrics"]["speculative_decoding"]
        mine = [count for request, count in counted.items() if answer["id"] in request]
        if own is None or not mine:
            continue
        assert mine == [own["num_accepted_draft_tokens"]]
        compared += 1
    assert compared > 10


def test_one_step_of_sixteen_is_timed(churn: Churn) -> None:
    timed = (len(churn.steps) + EVERY - 1) // EVERY
    counts = churn.of("dspark_step_seconds_count", "verify", "draft")
    assert counts == [timed - 1, timed - 1], "each is told when the next is"
    seconds = churn.of("dspark_step_seconds_sum", "verify", "draft")
    assert all(0 < total / count < 30 for total, count in zip(seconds, counts, strict=True))
    # The CPU engine's table says 12 to 20 ms for these sizes, whatever the CPU needs.
    assert 0.012 < churn.scrape["dspark_step_predicted_seconds_total", ""] / counts[0] < 0.1


def test_a_bold_head_is_made_humbler(churn: Churn) -> None:
    temperatures = churn.of("dspark_calibration_temperature", *map(str, range(DRAFTS)))
    assert all(0.25 <= temperature <= 4 for temperature in temperatures)
    # The head's log-odds are doubled; the first positions are verified most and are told most.
    assert min(temperatures[:2]) > 1.3
    errors = [survival_error(churn.steps[part]) for part in (slice(0, 100), slice(-200, None))]
    assert errors[1] < 0.75 * errors[0]


def survival_error(steps: list[tuple[dict[str, Any], dict[str, Any]]]) -> float:
    """Expected calibration error of the survival that steps were planned with."""
    predicted, happened = [], []
    for ranking, outcome in steps:
        rows = np.flatnonzero(ranking["eligible"])
        for row, accepted in zip(rows, outcome["accepted"], strict=True):
            admitted = ranking["admitted"][row]
            predicted += np.cumprod(ranking["confidences"][row])[:admitted].tolist()
            happened += [position < accepted for position in range(admitted)]
    return expected_calibration_error(np.array(predicted), np.array(happened))


def test_the_log_and_the_status_say_it_too(churn: Churn) -> None:
    lines = [line for line in churn.server.log.read_text().splitlines() if "drafts per second" in line]
    assert len(lines) > 2
    assert all("mean acceptance length" in line and "steps: " in line for line in lines)
    # The first may end before there is anything to compare an expectation with.
    assert all("were expected" in line for line in lines[1:])
    assert churn.server.client.get("/dspark/status").json()["calibration"] == "on"
    assert json.dumps(churn.server.client.get("/dspark/status").json())
