"""A real Prometheus scrapes the real server under load: every rule and every panel has data, and a stall is noticed.

The rules are those of deploy/, with the stall's durations shortened.
"""

import json
import math
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.prompts import python_prompts
from tests.e2e.running import MODEL, Server, engine_cores, free_port

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yaml"))
DASHBOARDS = [json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))]
STALL_RANGE = "10s"
CLIENTS = 20
"""More than run at once, so that some wait."""

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus (Debian package prometheus)"
)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query; a query that is wrong fails the test."""
        answer = self.client.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        samples: list[dict[str, Any]] = answer["data"]["result"]
        return samples

    def has_data(self, expression: str) -> bool:
        """Whether it yields at least one number."""
        return any(not math.isnan(float(sample["value"][1])) for sample in self.query(expression))

    def without_data(self, expressions: set[str], seconds: float = 240) -> set[str]:
        """Those that yield nothing for so long: on a busy machine, sixteen steps to the next timed one are minutes."""
        deadline = time.monotonic() + seconds
        while (missing := {each for each in expressions if not self.has_data(each)}) and time.monotonic() < deadline:
            expressions = missing
            time.sleep(1)
        return missing

    def rules(self) -> list[dict[str, Any]]:
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self, alert: str) -> list[dict[str, Any]]:
        alerts = self.client.get("/api/v1/alerts").json()["data"]["alerts"]
        return [a for a in alerts if a["labels"]["alertname"] == alert and a["state"] == "firing"]


def shortened(rules: str) -> str:
    """The rules with the range of the stall alert and every `for` a test's length. Longer ranges take what there is."""
    rules = rules.replace("[30s]", f"[{STALL_RANGE}]")
    return re.sub(r"^( +for:) \w+$", r"\1 2s", rules, flags=re.MULTILINE)


def wait_until(reached: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def load(server: Server) -> Iterator[list[BaseException]]:
    """Clients that ask without pause; yields what went wrong for any of them."""
    stop, faults, prompts = threading.Event(), [], python_prompts()

    def ask(number: int) -> None:
        while not stop.is_set():
            try:
                server.complete(prompts[number % len(prompts)], max_tokens=24, temperature=0.8)
            except (AssertionError, httpx.HTTPError) as fault:
                faults.append(fault)
                return

    with ThreadPoolExecutor(CLIENTS) as pool:
        for number in range(CLIENTS):
            pool.submit(ask, number)
        yield faults
        stop.set()


@pytest.fixture(scope="module")
def prometheus(
    server: Server, load: list[BaseException], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus with the example configuration, but for the target and the intervals."""
    directory = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    (directory / "rules").mkdir()
    for path in RULES:
        (directory / "rules" / path.name).write_text(shortened(path.read_text()))
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        running = Prometheus(f"http://127.0.0.1:{port}")

        def ready() -> bool:
            assert process.poll() is None, (directory / "log").read_text()
            try:
                return running.client.get("/-/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready)
        yield running
        running.client.close()
    finally:
        process.terminate()
        process.wait(20)


def panel_queries() -> set[str]:
    """Every panel's queries, with the variables set as Grafana sets them."""
    values = {"$__rate_interval": "5m", "$job": "dspark-serve", "$model_name": MODEL, "$engine": "0"}
    queries = {
        target["expr"] for board in DASHBOARDS for panel in board["panels"] for target in panel.get("targets", ())
    }
    for name, value in values.items():
        queries = {query.replace(name, value) for query in queries}
    return queries


def selectors(expression: str) -> set[str]:
    """What an expression selects, without ranges and conditions."""
    return set(
        re.findall(
            r"(?<![\w:])(?:(?:dspark_|vllm:|process_|engine:|engine_position:)[\w:]+|up)(?:\{[^}]*\})?", expression
        )
    )


def test_every_recorded_series_has_data(prometheus: Prometheus) -> None:
    recorded = {rule["name"] for rule in prometheus.rules() if rule["type"] == "recording"}
    assert len(recorded) > 20
    assert prometheus.without_data(recorded) == set()
    faults = {rule["name"]: rule["lastError"] for rule in prometheus.rules() if rule["health"] != "ok"}
    assert faults == {}


def test_every_panel_has_data(prometheus: Prometheus) -> None:
    """But for the table of alerts, which is empty while nothing is wrong."""
    queries = {query for query in panel_queries() if "ALERTS{" not in query}
    assert len(queries) > 60
    assert not any("$" in query for query in queries)
    assert prometheus.without_data(queries) == set()


def test_every_variable_lists_what_is_there(prometheus: Prometheus) -> None:
    listed = {}
    for variable in DASHBOARDS[0]["templating"]["list"][1:]:
        matched = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert matched is not None
        selector = matched[1].replace("$job", "dspark-serve").replace("$model_name", MODEL)
        answer = prometheus.client.get(f"/api/v1/label/{matched[2]}/values", params={"match[]": selector})
        listed[variable["name"]] = answer.json()["data"]
    assert listed == {"job": ["dspark-serve"], "model_name": [MODEL], "engine": ["0"]}


def test_everything_that_alerts_ask_for_is_there(prometheus: Prometheus) -> None:
    """Their conditions hold only in trouble, but what they select has to exist."""
    alerts = [rule for rule in prometheus.rules() if rule["type"] == "alerting"]
    assert len(alerts) == 10
    for alert in alerts:
        assert selectors(alert["query"]), alert["name"]
    assert prometheus.without_data(set().union(*(selectors(alert["query"]) for alert in alerts))) == set()


def test_a_stopped_engine_raises_the_alert_and_going_on_ends_it(
    server: Server, prometheus: Prometheus, load: list[BaseException]
) -> None:
    """SIGSTOP under load: /metrics goes on answering with what was true before."""
    for alert in ("DsparkEngineStalled", "DsparkEngineDead", "DsparkModeNotAsConfigured", "DsparkNotReady"):
        assert prometheus.firing(alert) == []
    (engine,) = engine_cores(server)
    assert engine is not None
    engine.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: bool(prometheus.firing("DsparkEngineStalled")))
        (alert,) = prometheus.firing("DsparkEngineStalled")
        assert prometheus.has_data("up == 1")
        (query,) = (query for query in panel_queries() if "ALERTS{" in query)
        assert prometheus.has_data(query)
    finally:
        engine.send_signal(signal.SIGCONT)
    assert alert["labels"]["engine"] == "0"
    assert alert["labels"]["severity"] == "critical"
    instance = server.url.removeprefix("http://")
    assert alert["annotations"]["summary"] == f"Engine 0 of {instance} stands still"
    assert f"({MODEL})" in alert["annotations"]["description"]
    wait_until(lambda: not prometheus.firing("DsparkEngineStalled"))
    server.complete("import os\n", max_tokens=4)
    assert load == []
