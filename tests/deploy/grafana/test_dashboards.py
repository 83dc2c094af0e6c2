"""The dashboards: current, complete and readable. That their queries return data, a real Prometheus says (e2e)."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.metrics import BIN_NAMES

ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "deploy" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in FILES}
SERVER_SERIES = {"state", "mode", "configured_mode", "build_info", "patch_info"}
"""Ours that a server has once, without the labels `engine` and `model_name`."""


def panels() -> list[Any]:
    return [
        pytest.param(panel, id=f"{name}: {panel['title']}")
        for name, dashboard in DASHBOARDS.items()
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    ]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.values[0]["targets"]]  # type: ignore[index]


def selectors(expression: str) -> list[tuple[str, str]]:
    """(series, label matchers) of every selector."""
    return re.findall(r"\b((?:dspark_|vllm:|process_|up|ALERTS)\w*)(\{[^}]*\})", expression)


def test_the_files_are_what_the_code_builds(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(GRAFANA / "build.py"), str(tmp_path)], check=True, timeout=60)
    built = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_text() for path in FILES}, "run `make dashboards`"


def test_links_to_a_dashboard_hold_for_ever() -> None:
    assert {dashboard["uid"] for dashboard in DASHBOARDS.values()} == {
        "dspark-overview",
        "dspark-verification",
        "dspark-fleet",
    }
    for name, dashboard in DASHBOARDS.items():
        assert dashboard["uid"] == name
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert sorted(ids) == list(range(1, len(ids) + 1))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_one_container_and_many_are_chosen_from(name: str) -> None:
    variables = DASHBOARDS[name]["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "job", "model_name", "engine"]
    for variable in variables[1:]:
        assert variable["multi"]
        assert variable["includeAll"]
        assert variable["current"]["value"] == "$__all"
        assert variable["query"].startswith("label_values(")


@pytest.mark.parametrize("panel", panels())
def test_a_panel_explains_itself(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    steps = defaults["thresholds"]["steps"]
    assert steps[0]["value"] is None
    values = [step["value"] for step in steps[1:]]
    assert values == sorted(values)
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert target["datasource"] == panel["datasource"]
        if target.get("format") != "table":
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), f"{label} would be empty"
    if panel["type"] != "table":
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends)


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_query_follows_the_variables(expression: str) -> None:
    found = selectors(expression)
    assert found
    for series, matchers in found:
        assert 'job=~"$job"' in matchers
        of_engines = series.startswith("vllm:") or (
            series.startswith("dspark_") and series.removeprefix("dspark_") not in SERVER_SERIES
        )
        assert ('model_name=~"$model_name"' in matchers and 'engine=~"$engine"' in matchers) == of_engines


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_fill_their_rows_and_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    width = 24
    assert len(taken) == width * (1 + max(y for _, y in taken)), "there are holes"


def test_every_series_of_ours_is_shown_and_no_other_is_asked_for() -> None:
    source = (ROOT / "serve" / "metrics.py").read_text()
    families = re.findall(r'(Counter|Gauge|Histogram|Info)MetricFamily\(\s*"(dspark_\w+)"', source)
    suffixes = {"Counter": ("_total",), "Gauge": ("",), "Info": ("_info",), "Histogram": ("_sum", "_count", "_bucket")}
    exported = {family: {family + suffix for suffix in suffixes[kind]} for kind, family in families}
    asked = {series for expression in expressions() for series, _ in selectors(expression)}
    for family, series in exported.items():
        assert series & asked, f"no panel shows {family}"
    assert {series for series in asked if series.startswith("dspark_")} <= set().union(*exported.values())


def test_the_reliability_diagram_has_the_bins_of_the_server() -> None:
    (promised,) = (expression for expression in expressions() if "label_replace" in expression)
    middles = re.findall(r'vector\(([\d.]+)\), "bin", "([\d.]+)-([\d.]+)"', promised)
    assert [f"{low}-{high}" for _, low, high in middles] == list(BIN_NAMES)
    assert all(float(middle) == pytest.approx((float(low) + float(high)) / 2) for middle, low, high in middles)


def test_the_provisioned_data_source_and_folder_fit() -> None:
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["type"] == "prometheus"
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/dspark.yaml").read_text())["providers"][0]
    assert provider["type"] == "file"
    assert provider["options"]["path"].startswith("/")
