"""The rules, by Prometheus's own tool: their syntax, and every alert firing and silent."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from serve.cli import app
from serve.errors import ExitCode
from serve.metrics import BIN_NAMES

HERE = Path(__file__).parent
PROMETHEUS = HERE.parents[2] / "deploy" / "prometheus"
EXAMPLE = PROMETHEUS / "prometheus.yml"
RULES = sorted((PROMETHEUS / "rules").glob("*.yaml"))
CASES = sorted(HERE.glob("*.yaml"))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian package prometheus)"
)


def rules(kind: str) -> list[dict[str, Any]]:
    """Every rule that has the key `alert` or `record`."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def cases() -> list[dict[str, Any]]:
    return [case for path in CASES for case in yaml.safe_load(path.read_text())["tests"]]


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_example_configuration_and_its_rules_are_valid() -> None:
    promtool("check", "config", str(EXAMPLE))
    promtool("check", "rules", "--lint-fatal", *map(str, RULES))


@needs_promtool
def test_the_example_s_key_is_valid_once_it_is_no_comment_any_more(tmp_path: Path) -> None:
    text, lines = re.subn(
        r"^    # ( *)(authorization:|credentials_file:)", r"    \1\2", EXAMPLE.read_text(), flags=re.MULTILINE
    )
    assert lines == 2
    config = yaml.safe_load(text)
    key = tmp_path / "key"
    key.write_text("a-key")
    config["scrape_configs"][0]["authorization"]["credentials_file"] = str(key)
    config["rule_files"] = [str(PROMETHEUS / "rules" / "*.yaml")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def seconds(duration: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([sm])", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60}[unit]


def test_the_stall_alert_comes_before_the_server_ends_itself() -> None:
    """The last token may be as old as a scrape is; the range's oldest sample is a scrape younger than the range."""
    up = typer.main.get_command(app).commands["up"]  # type: ignore[attr-defined]
    (ends_after,) = (parameter.default for parameter in up.params if parameter.name == "stall_seconds")
    (rule,) = (rule for rule in rules("alert") if rule["alert"] == "DsparkEngineStalled")
    (window,) = {seconds(found) for found in re.findall(r"\[(\w+)\]", rule["expr"])}
    every = {name: seconds(value) for name, value in yaml.safe_load(EXAMPLE.read_text())["global"].items()}
    assert window >= 2 * every["scrape_interval"]  # a rate needs two samples
    assert window + every["evaluation_interval"] + seconds(rule["for"]) <= ends_after


def test_the_runbook_and_the_alert_know_every_exit_code_of_a_server() -> None:
    (rule,) = (rule for rule in rules("alert") if rule["alert"] == "DsparkEngineRestarting")
    section = (PROMETHEUS / "RUNBOOK.md").read_text().split("## DsparkEngineRestarting")[1].split("\n## ")[0]
    for code in set(ExitCode) - {ExitCode.OK, ExitCode.PARTIAL}:  # a validation ends with the latter, no server
        assert re.search(rf"\b{code:d}\b", rule["annotations"]["runbook"]), code
        for part in ("**Look.**", "**Do.**"):
            text = section.split(part)[1].split("**Do.**")[0]
            assert re.search(rf"\b{code:d}\b", text), (part, code)


@needs_promtool
@pytest.mark.parametrize("case_file", CASES, ids=lambda path: path.stem)
def test_rules_say_what_they_should(case_file: Path, tmp_path: Path) -> None:
    """Annotations are left out: promtool would have every test repeat their whole text."""
    for path in RULES:
        content = yaml.safe_load(path.read_text())
        for group in content["groups"]:
            for rule in group["rules"]:
                rule.pop("annotations", None)
        (tmp_path / path.name).write_text(yaml.safe_dump(content, sort_keys=False))
    shutil.copy(case_file, tmp_path)
    promtool("test", "rules", str(tmp_path / case_file.name))


@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules("alert")])
def test_every_alert_is_seen_firing_and_seen_silent(alert: str) -> None:
    firing = [case for case in cases() if case["name"].startswith(f"{alert} fires ")]
    silent = [case for case in cases() if case["name"].startswith(f"{alert} is silent ")]
    assert firing
    assert silent
    for case in firing:
        outcomes = [check["exp_alerts"] for check in case["alert_rule_test"] if check["alertname"] == alert]
        assert [] in outcomes, "it is never seen before its time"
        assert any(outcomes)
    for case in silent:
        assert [check["exp_alerts"] for check in case["alert_rule_test"] if check["alertname"] == alert]
        assert not any(check["exp_alerts"] for check in case["alert_rule_test"])


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in rules("alert")])
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    annotations, runbook = rule["annotations"], (PROMETHEUS / "RUNBOOK.md").read_text()
    assert set(annotations) == {"summary", "description", "runbook"}
    assert annotations["runbook"].endswith(f"RUNBOOK.md, {rule['alert']}.")
    assert rule["labels"]["severity"] in ("critical", "warning")
    section = re.search(rf"^## {rule['alert']}\n(.+?)(?=^## |\Z)", runbook, re.MULTILINE | re.DOTALL)
    assert section is not None
    for part in ("**Means.**", "**Look.**", "**Do.**"):
        assert part in section[1], part
    firing = [c for case in cases() for c in case.get("alert_rule_test", ()) if c["alertname"] == rule["alert"]]
    labels = [alert["exp_labels"] for check in firing for alert in check["exp_alerts"]]
    for name in re.findall(r"\$labels\.(\w+)", " ".join(annotations.values())):
        assert all(name in each for each in labels), f"{name} would be empty"


def test_the_runbook_knows_no_other_alert() -> None:
    sections = re.findall(r"^## (Dspark\w+)$", (PROMETHEUS / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules("alert")]


def test_every_ratio_is_recorded_by_engine_and_over_replicas() -> None:
    recorded = [rule["record"] for rule in rules("record")]
    by_engine = {name.removeprefix("engine") for name in recorded if name.startswith("engine")}
    over_replicas = {name.removeprefix("model") for name in recorded if name.startswith("model")}
    assert by_engine == over_replicas
    assert len(by_engine) == 11


def test_every_recorded_series_has_a_value_checked() -> None:
    expressions = " ".join(check["expr"] for case in cases() for check in case.get("promql_expr_test", ()))
    for series in {rule["record"] for rule in rules("record")} - {"dspark_confidence_bin:midpoint"}:
        assert series in expressions, series


def test_the_bins_are_those_of_the_server() -> None:
    constants = [rule for rule in rules("record") if rule["record"] == "dspark_confidence_bin:midpoint"]
    assert [rule["labels"]["bin"] for rule in constants] == list(BIN_NAMES)
    for rule in constants:
        low, high = map(float, rule["labels"]["bin"].split("-"))
        assert rule["expr"] == f"vector({(low + high) / 2:.2f})"
