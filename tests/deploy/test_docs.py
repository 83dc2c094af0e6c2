"""deploy/README.md has a place for every rule and every dashboard, and names only what there is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
README = (DEPLOY / "README.md").read_text()
GROUPS = [
    group
    for path in sorted((DEPLOY / "prometheus" / "rules").glob("*.yaml"))
    for group in yaml.safe_load(path.read_text())["groups"]
]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]


def test_every_alert_is_listed_with_its_severity() -> None:
    listed = re.findall(r"^\| `(Dspark\w+)` \| (\w+) \|", README, re.MULTILINE)
    assert listed == [(rule["alert"], rule["labels"]["severity"]) for rule in RULES if "alert" in rule]


def test_every_recorded_series_is_listed() -> None:
    listed = re.findall(r"^\| `((?:_position)?:dspark\w+:\w+)` \|", README, re.MULTILINE)
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    assert recorded - {"dspark_confidence_bin:midpoint"} == {
        level + series for level in ("engine", "model") for series in listed
    }
    assert "`dspark_confidence_bin:midpoint`" in README


def test_every_dashboard_is_listed() -> None:
    listed = re.findall(r"^\| ([\w ]+) \| .* \| `/d/([\w-]+)` \|$", README, re.MULTILINE)
    boards = [json.loads(path.read_text()) for path in (DEPLOY / "grafana" / "dashboards").glob("*.json")]
    assert {(f"dspark-serve / {name}", uid) for name, uid in listed} == {(b["title"], b["uid"]) for b in boards}


@pytest.mark.parametrize("page", ["README.md", "prometheus/RUNBOOK.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    path = DEPLOY / page
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    assert links
    for link in links:
        assert (path.parent / link).exists(), link
