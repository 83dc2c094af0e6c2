"""A start as a client sees it, and every way it can go wrong."""

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.running import MODEL, Server, engine_cores, serving
from tests.processes import left

DRAIN_SECONDS = "120"
"""Enough for 200 tokens also where other servers take most of the machine."""


def test_every_state_is_visible_from_the_first_second(tmp_path: Path) -> None:
    """Listening before vLLM is even imported; refusing politely; then ready; then a clean stop.

    With vLLM's own choice of cores, as whoever starts a server has it.
    """
    with serving(tmp_path, "--drain-seconds", DRAIN_SECONDS, VLLM_CPU_OMP_THREADS_BIND="auto") as server:
        server.wait_until_listening()
        ready = server.client.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["phase"] == "importing vLLM"
        refused = server.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == 503
        phases = []
        while (ready := server.client.get("/readyz")).status_code == 503:
            if ready.json()["phase"] not in phases:
                phases.append(ready.json()["phase"])
            assert server.client.get("/livez").status_code == 200
            metrics, status = server.client.get("/metrics"), server.client.get("/dspark/status").json()
            assert metrics.status_code == 200
            assert status["profile"] == MODEL
            if status["state"] == "starting":  # it may just have become ready
                assert 'dspark_state{state="starting"} 1.0' in metrics.text
            assert 'model_name=""' not in metrics.text
        assert phases == sorted(phases, key=PHASES.index)
        assert len(phases) >= 3

        assert re.search(r"curl (\S+)/v1/completions", server.log.read_text()), "no curl line was printed"
        assert server.complete("def f(x):", max_tokens=4)["usage"]["completion_tokens"] == 4
        status = server.client.get("/dspark/status").json()
        assert status["state"] == "ready"
        assert status["engine"]["speculative"]["adaptive_verification"] is True
        assert status["engine"]["speculative"]["num_speculative_tokens"] == 5
        version = server.client.get("/version").json()
        assert version["version"] == status["vllm_version"]
        applied = [row["id"] for row in status["patches"] if row["status"] == "applied"]
        assert version["dspark_serve"]["patches"] == applied
        assert f'patchset="{version["dspark_serve"]["patchset"]}"' in server.client.get("/metrics").text
        assert {row["status"] for row in status["patches"]} <= {"applied", "not needed", "not for this hardware"}
        finishes_what_is_under_way(server, signal.SIGTERM)


def finishes_what_is_under_way(server: Server, stop: signal.Signals) -> None:
    """Stop a server as an orchestrator does, or a terminal, whose Ctrl-C reaches every process of the group."""
    family = server.descendants()
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.complete, "def f(x):", max_tokens=200, ignore_eos=True)
        server.wait_until(lambda: server.client.get("/dspark/status").json()["requests_under_way"] > 0)
        if stop is signal.SIGINT:
            os.killpg(server.process.pid, stop)
        else:
            server.process.send_signal(stop)
        server.wait_until(lambda: server.client.get("/readyz").json()["state"] == "draining")
        refused = server.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        assert server.client.get("/livez").status_code == 200
        assert under_way.result()["usage"]["completion_tokens"] == 200
        assert server.process.wait(60) == 0
    assert not left(family)
    assert "Traceback" not in server.log.read_text(), "a stop that was asked for is no fault"


PHASES = [
    "importing vLLM",
    "checking the configuration",
    "starting the engine and loading weights",
    "building the API",
    "ready",
]


def test_the_printed_curl_line_works(server: Server) -> None:
    printed = re.search(r"-d '(\{.*\})'", server.log.read_text())
    assert printed is not None
    response = server.client.post("/v1/completions", json=json.loads(printed[1]))
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("vllm", "named"),
    [
        (("--max-num-seqs", "many"), "max_num_seqs"),
        (("--nosuch-option",), "--nosuch-option"),
        # only vLLM itself knows that this one cannot be
        (("--max-model-len", "9999999"), "max_model_len"),
    ],
)
def test_what_vllm_refuses_is_one_line_and_exit_code_2(tmp_path: Path, vllm: tuple[str, ...], named: str) -> None:
    with serving(tmp_path, vllm=vllm) as server:
        assert server.process.wait(120) == 2
        output = server.log.read_text()
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert "dspark-serve" in last
    assert named in last


def test_sigterm_while_loading_stops_at_once(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wait_until_listening()
        server.wait_until(lambda: server.client.get("/readyz").json()["phase"] == PHASES[2])
        family = server.descendants()
        assert server.terminate(30) == 0
        assert not left(family)


def test_an_engine_that_dies_while_it_is_started_is_noticed(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.wait_until(lambda: engine_cores(server) != [])
        engine_cores(server)[0].kill()
        assert server.process.wait(120) == 1
        assert "[dspark-serve] exit code 1" in server.log.read_text().splitlines()[-1]
