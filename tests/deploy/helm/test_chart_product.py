"""The chart and the product agree: profiles, options, variables, paths, times, images, rules and dashboards."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from helm import CHART, HARDWARE, ROOT, default_values, of_kind, one, pods, refused, render

from patches import hardware as hardware_names
from serve import server
from serve.app import OWN_PATHS
from serve.arguments import split_words
from serve.cli import app
from serve.errors import InputError
from serve.keys import KEY_VARIABLES
from serve.overrides import override
from serve.preflight import installed_names
from serve.preflight.checks import TABLE
from serve.preflight.checks.software import DECIDED_HERE
from serve.preflight.plan import Plan, plan
from serve.profile import Verification, load

sys.path.insert(0, str(CHART.parent))
import chart

UP = typer.main.get_command(app).commands["up"]  # type: ignore[attr-defined]
GROUP = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "r-0.r.serving", "LWS_WORKER_INDEX": "0"}
"""What the LeaderWorkerSet's controller puts into a pod."""
LEADER, WORKER = "server", "worker"


def test_the_hardware_is_the_product_s() -> None:
    assert set(HARDWARE) == set(hardware_names.SERVED) == set(default_values()["perHardware"])


def test_what_the_chart_carries_is_current() -> None:
    stale = [str(path) for path, text in chart.chart_files().items() if (CHART / path).read_text() != text]
    carried = {path.relative_to(CHART) for folder in chart.COPIES for path in (CHART / "files" / folder).glob("*")}
    assert stale == [], "make chart"
    assert carried <= chart.chart_files().keys()


def started(values: dict[str, Any], component: str = LEADER) -> tuple[dict[str, Any], Plan, int]:
    """A rendered pod's command line, read by the product itself: options, plan, and the GPUs the pod asks for."""
    documents = render(values)
    (container,) = pods(documents)[component]["spec"]["containers"]
    index = "0" if component == LEADER else "1"
    variables = {**GROUP, "LWS_WORKER_INDEX": index}
    words = [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in container["args"]]
    assert words[0] == "up"
    options = UP.make_context("up", words[1:]).params
    profile = options["profile"]
    if profile.startswith("/etc/"):
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "profile")
        assert profile == f"{mount['mountPath']}/profile.yaml"
        path = Path(values["_directory"]) / "profile.yaml"
        path.write_text(one(documents, "ConfigMap", "-profile")["data"]["profile.yaml"])
        profile = str(path)
    names = installed_names()
    planned = plan(
        override(load(profile), options["sets"] or [], names),
        Verification.ADAPTIVE,
        options["extra"] or [],
        names=names,
        environment={},
        headless=options["headless"],
    )
    gpus = [value for key, value in container["resources"].get("limits", {}).items() if "/" in key]
    return options, planned, int(gpus[0]) if gpus else 0


@pytest.mark.parametrize("hardware", HARDWARE)
def test_a_pod_asks_for_the_gpus_that_its_profile_needs(hardware: str) -> None:
    _, planned, gpus = started({"hardware": hardware})
    assert planned.profile.hardware == hardware
    assert planned.gpus == gpus


@pytest.mark.parametrize("component", [LEADER, WORKER])
@pytest.mark.parametrize("hardware", ["cuda-hopper", "rocm-gfx950"])
def test_the_nodes_of_a_group_know_their_place(hardware: str, component: str) -> None:
    options, planned, gpus = started({"hardware": hardware, "nodes": 2}, component)
    assert (planned.nodes, planned.node_rank) == (2, 0 if component == LEADER else 1)
    assert options["headless"] is (component == WORKER)
    assert planned.arguments["master_addr"] == GROUP["LWS_LEADER_ADDRESS"]
    assert planned.gpus == gpus == 2
    (node,) = (check for check in TABLE if check.id == "node")
    assert node.run(None, planned) is None  # type: ignore[arg-type]


def test_overrides_and_further_arguments_reach_the_engine() -> None:
    options, planned, _ = started(
        {"overrides": ["max_num_seqs=4"], "skipChecks": ["memory"], "extraArgs": ["--seed", "7"]}
    )
    assert planned.max_num_seqs == 4
    assert planned.arguments["seed"] == 7
    assert options["skip"] == ["memory"]


def test_what_may_not_stand_in_extra_args_is_what_the_server_refuses() -> None:
    """Or what the chart says itself to the nodes of a group."""
    carried = json.loads((CHART / "files" / "refused_arguments.json").read_text())
    assert carried.keys() >= DECIDED_HERE.keys() | {"api_key", "worker_extension_cls", "config"}
    names = installed_names()
    assert names is not None
    started = plan(load("tiny-cpu"), Verification.ADAPTIVE, names=names, environment={})
    checks = [check for check in TABLE if check.id in ("server-options", "visible-keys", "worker-extension")]
    assert len(checks) == 3
    for word in carried:
        name = names.aliases.get(f"-{word}", word)
        option = f"--{word.replace('_', '-')}"
        assert f"extraArgs has {option}, " in refused({"extraArgs": [f"{option}=1"]})
        given = replace(started, arguments={**started.arguments, name: "1"})
        if name == "config":
            with pytest.raises(InputError, match="--config"):
                split_words(["--config", "1"])
        elif name not in ("nnodes", "node_rank", "master_addr"):
            assert [check.id for check in checks if check.run(None, given)], name  # type: ignore[arg-type]


def test_a_custom_profile_arrives_as_it_was_given(tmp_path: Path) -> None:
    profile = load("tiny-cpu").model_dump(exclude_none=True)
    documents = render({"customProfile": profile})
    text = one(documents, "ConfigMap", "-profile")["data"]["profile.yaml"]
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    assert load(str(path)) == load("tiny-cpu")
    (container,) = pods(documents)[LEADER]["spec"]["containers"]
    assert container["args"][1] == "/etc/dspark-serve/profile.yaml"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            **{"host": "::", "port": 1, "verification": "off", "drainSeconds": 0, "accessLog": True},
            **{"metricsKey": True, "apiKey": {"value": "x"}},
        },
    ],
    ids=["plain", "all"],
)
def test_every_variable_is_one_that_the_command_line_reads(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = one(render(values), "ConfigMap", "-environment")["data"]
    assert data.keys() <= {parameter.envvar for parameter in UP.params}
    for name, value in data.items():
        monkeypatch.setenv(name, value)
    read = UP.make_context("up", ["tiny-cpu"]).params
    assert read["host"] == values.get("host", "0.0.0.0")
    assert read["port"] == values.get("port", 8000)
    assert read["verification"] == values.get("verification", "adaptive")
    assert read["drain_seconds"] == values.get("drainSeconds", 60)
    assert read["access_log"] is values.get("accessLog", False)
    assert read["metrics_key"] is values.get("metricsKey", False)


def test_every_variable_of_a_server_is_a_value_or_left_to_extra_env_in_writing() -> None:
    by_value = one(render(), "ConfigMap", "-environment")["data"].keys()
    explained = (CHART / "README.md").read_text().split("*Other settings.*")[1].split("\n\n")[0]
    read = {parameter.envvar for parameter in UP.params if parameter.envvar} | set(KEY_VARIABLES)
    assert len(read) > 12
    for name in sorted(read - by_value):
        values = {"extraEnv": [{"name": name, "value": "1"}]}
        if f"`{name}`" in explained:
            assert environment(values) == values["extraEnv"]
        else:
            assert f"extraEnv has {name}" in refused(values)


def test_the_verification_modes_are_the_product_s() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["verification"]["enum"] == [mode.value for mode in Verification]


def test_the_probes_ask_the_server_s_own_paths() -> None:
    (container,) = pods(render())[LEADER]["spec"]["containers"]
    asked = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe", "readinessProbe")}
    scraped = one(render({"podMonitor": {"enabled": True}}), "PodMonitor")["spec"]["podMetricsEndpoints"][0]["path"]
    assert asked | {scraped} <= set(OWN_PATHS)


def test_the_grace_period_covers_the_slowest_stop() -> None:
    """After the drain: clients are told, then connections, vLLM's app, the engine and what is left of it end."""
    slowest = server.TELL_SECONDS + server.CLOSE_SECONDS + 2 * server.ENGINE_END_SECONDS + 3 + 3
    spec = pods(render({"drainSeconds": 100}))[LEADER]["spec"]
    assert spec["terminationGracePeriodSeconds"] >= 10 + 100 + slowest


def test_the_key_s_variable_is_one_that_the_server_reads() -> None:
    (variable,) = environment({"apiKey": {"value": "x"}})
    assert variable["name"] in KEY_VARIABLES


def environment(values: dict[str, Any]) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = pods(render(values))[LEADER]["spec"]["containers"][0]["env"]
    return variables


def test_every_rule_and_dashboard_is_in_the_release() -> None:
    documents = render({"prometheusRule": {"enabled": True}, "dashboards": {"enabled": True}})
    files = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yaml"))
    expected = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    example = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    interval = example["global"]["evaluation_interval"]
    groups = one(documents, "PrometheusRule")["spec"]["groups"]
    assert groups == [{**group, "interval": interval} for group in expected]
    assert expected
    boards = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    carried: dict[str, str] = {}
    for document in of_kind(documents, "ConfigMap"):
        if "grafana_dashboard" in document["metadata"]["labels"]:
            carried |= document["data"]
    assert boards
    assert {name: text.rstrip() for name, text in carried.items()} == {
        path.name: path.read_text().rstrip() for path in boards
    }


def test_keda_asks_for_the_job_that_the_pod_monitor_makes() -> None:
    documents = render({"autoscaling": {"keda": {"enabled": True}}, "podMonitor": {"enabled": True}})
    monitor = one(documents, "PodMonitor")["metadata"]["name"]
    query = one(documents, "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    assert query == f'sum(vllm:num_requests_waiting{{job="serving/{monitor}"}})'


def test_the_download_s_command_comes_with_the_hub_s_library() -> None:
    documents = render({"hardware": "cuda-hopper", "cache": {"mode": "shared", "download": {"enabled": True}}})
    program, *words = pods(documents)["download"]["spec"]["containers"][0]["command"]
    (entry,) = metadata.distribution("huggingface_hub").entry_points.select(group="console_scripts", name=program)
    assert entry.module.startswith("huggingface_hub")
    command = [Path(sys.executable).parent / program, words[0], "--help"]
    assert "--revision" in subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout


@pytest.mark.parametrize("hardware", HARDWARE)
def test_the_chart_and_the_image_agree(hardware: str) -> None:
    dockerfile = (ROOT / "docker" / hardware / "Dockerfile").read_text()
    values = default_values()
    user, group = re.search(r"^USER (\d+):(\d+)$", dockerfile, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert (values["security"]["runAsUser"], values["security"]["runAsGroup"]) == (int(user), int(group))
    assert f"DSPARK_PROFILE={values['perHardware'][hardware]['profile']} " in dockerfile
    assert re.search(r"^ENTRYPOINT .*dspark-serve", dockerfile, re.MULTILINE)
    assert re.search(r"^ENV.* HOME=/cache|^\s+HOME=/cache|^ENV HOME=/cache", dockerfile, re.MULTILINE)
    tag = pods(render({"hardware": hardware}))[LEADER]["spec"]["containers"][0]["image"]
    assert tag.startswith(f"dspark-serve:{hardware}-")
    assert f"dspark-serve:{hardware}-" in (ROOT / "make" / "images.mk").read_text()
