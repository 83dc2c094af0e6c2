"""values.yaml, its schema and its documentation say the same, and a wrong value is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helm import CHART, HARDWARE, HelmError, default_values, placed, pods, refused, render
from switches import PROFILE

from serve.profile import Profile

VALUES = default_values()
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
README = (CHART / "README.md").read_text()
KUBERNETES = ("resources", "labels", "annotations", "from")
"""Keys whose values are the user's own or Kubernetes', no values of the chart."""


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The path of every value."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and key not in KUBERNETES:
            yield from leaves(value, f"{path}.")
        else:
            yield path


PATHS = [path for path in leaves(VALUES) if not path.startswith("perHardware.") or "cuda-hopper" in path]


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with its reference followed."""
    reference = schema.get("$ref")
    return schema if reference is None else SCHEMA["definitions"][reference.rpartition("/")[2]]


def schema_of(path: str) -> dict[str, Any]:
    """The schema of the value at a dotted path."""
    schema = SCHEMA
    for key in path.split("."):
        schema = resolved(schema)["properties"][key]
    return resolved(schema)


def objects(schema: object) -> Iterator[dict[str, Any]]:
    """Every schema of an object."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        for below in schema.values():
            yield from objects(below)
    elif isinstance(schema, list):
        for below in schema:
            yield from objects(below)


def test_every_object_is_closed() -> None:
    """But for a profile's engine arguments, which are vLLM's, and what Helm itself adds below `global`."""
    opened = [one for one in objects(SCHEMA) if "additionalProperties" not in one and one.get("maxProperties") != 0]
    profile = SCHEMA["definitions"]["profile"]["anyOf"][1]["properties"]
    expected = [SCHEMA["properties"]["global"], profile["engine_args"], profile["speculative_config"]]
    assert sorted(map(str, opened)) == sorted(map(str, expected))
    assert [one for one in objects(SCHEMA) if one.get("additionalProperties") is True] == []


def test_the_schema_has_every_value_and_no_other() -> None:
    def same(values: dict[str, Any], schema: dict[str, Any], path: str) -> None:
        known = resolved(schema).get("properties", {})
        assert values.keys() == known.keys() - {"global"}, path
        for key, value in values.items():
            if isinstance(value, dict) and value and key not in KUBERNETES:
                same(value, known[key], f"{path}{key}.")

    same(VALUES, SCHEMA, "")


def test_a_custom_profile_has_the_keys_of_a_profile() -> None:
    schema = SCHEMA["definitions"]["profile"]["anyOf"][1]
    assert schema["properties"].keys() == Profile.model_fields.keys()
    assert set(schema["required"]) == {name for name, field in Profile.model_fields.items() if field.is_required()}
    Profile.model_validate(PROFILE)


def wrong_values(path: str) -> list[object]:
    """Values that the schema of a path must not take, one of each wrong type."""
    kinds = schema_of(path)
    allowed = kinds.get("type") or {type(value).__name__ for value in kinds.get("enum", [])}
    names = {allowed} if isinstance(allowed, str) else set(allowed)
    names = {{"str": "string"}.get(name, name) for name in names} or {"object"}
    samples: dict[str, object] = {
        "number": 1.5,
        "string": "7x",
        "integer": 7,
        "boolean": True,
        "array": [7],
        "object": {"x": 7},
    }
    wrong = [value for name, value in samples.items() if name not in names]
    if "enum" in kinds:
        wrong.append("no such choice")
    return wrong


def test_every_wrong_type_is_refused_with_the_key_named() -> None:
    cases = [(path, value) for path in PATHS for value in wrong_values(path)[:2]]
    assert {path for path, _ in cases} == set(PATHS)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda case: refused(placed(*case)), cases))
    for (path, value), answer in zip(cases, answers, strict=True):
        assert f"at '/{path.replace('.', '/')}'" in answer, (path, value, answer)


@pytest.mark.parametrize("path", ["x", "image.x", "cache.download.x", "perHardware.cpu.x", "autoscaling.keda.x"])
def test_a_misspelt_value_is_refused(path: str) -> None:
    answer = refused(placed(path, 1))
    assert "'x'" in answer
    assert "not allowed" in answer


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"hardware": "cuda-blackwell"}, "hardware"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": 1.5}, "nodes"),
        ({"port": 70000}, "port"),
        ({"startupMinutes": 0}, "startupMinutes"),
        ({"drainSeconds": -1}, "drainSeconds"),
        ({"overrides": ["max_num_seqs"]}, "overrides/0"),
        ({"image": {"digest": "sha256:abc"}}, "image/digest"),
        ({"image": {"tag": "a b"}}, "image/tag"),
        ({"cache": {"size": "20 GB"}}, "cache/size"),
        ({"cache": {"existingClaim": "Not A Name"}}, "cache/existingClaim"),
        ({"cache": {"accessModes": ["ReadOnlyMany"]}}, "cache/accessModes/0"),
        ({"extraEnv": [{"name": "A"}]}, "extraEnv/0"),
        ({"extraEnv": [{"name": "A", "value": "b", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]}, "extraEnv/0"),
        ({"extraEnv": [{"name": "1A", "value": "b"}]}, "extraEnv/0/name"),
        ({"extraMounts": [{"name": "a", "mountPath": "/a"}]}, "extraMounts/0"),
        ({"extraMounts": [{"name": "tmp", "mountPath": "/a", "hostPath": {"path": "/a"}}]}, "extraMounts/0/name"),
        ({"podLabels": {"app.kubernetes.io/instance": "other"}}, "podLabels/app.kubernetes.io~1instance"),
        ({"podAnnotations": {"checksum/config": "x"}}, "podAnnotations/checksum~1config"),
        ({"networkPolicy": {"api": {"from": []}}}, "networkPolicy/api/from"),
        ({"networkPolicy": {"api": {"from": [{}]}}}, "networkPolicy/api/from/0"),
        ({"customProfile": {"name": "x"}}, "customProfile"),
        ({"perHardware": {"rocm-gfx950": {"supplementalGroups": ["video"]}}}, "supplementalGroups/0"),
        ({"perHardware": {"rocm-gfx950": {"devices": ["kfd"]}}}, "devices/0"),
        ({"tolerations": [{"key": "a", "operator": "Is"}]}, "tolerations/0/operator"),
        ({"podMonitor": {"interval": "often"}}, "podMonitor/interval"),
        ({"prometheusRule": {"interval": "often"}}, "prometheusRule/interval"),
    ],
)
def test_an_impossible_value_is_refused_with_the_key_named(values: dict[str, Any], named: str) -> None:
    assert f"/{named}'" in refused(values)


@pytest.mark.parametrize("path", [*PATHS, "networkPolicy.api.from", "cache.download.resources"])
def test_every_value_has_its_place_in_the_readme(path: str) -> None:
    row = f"| `{path.replace('cuda-hopper', 'HARDWARE')}` |"
    (line,) = [line for line in README.splitlines() if line.startswith(row)]
    assert len(line.split(" | ")[-1].strip(" |")) > 4, f"{path} has no comment in values.yaml"


def test_every_hardware_has_the_same_keys() -> None:
    first, *others = (VALUES["perHardware"][hardware] for hardware in HARDWARE)
    assert all(other.keys() == first.keys() for other in others)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"profile": "tiny-cpu", "customProfile": PROFILE}, ("profile", "customProfile")),
        ({"profile": "no-such"}, ("profile", "no-such", "tiny-cpu", "customProfile")),
        ({"profile": "qwen3-8b-dspark-h200"}, ("hardware is cpu", "qwen3-8b-dspark-h200", "cuda-hopper")),
        ({"hardware": "cuda-hopper", "customProfile": PROFILE}, ("hardware", "customProfile", "cpu")),
        ({"hardware": "cuda-hopper", "nodes": 3}, ("nodes is 3", "4 GPUs", "gpusPerNode")),
        ({"gpusPerNode": 1}, ("gpusPerNode", "perHardware.cpu.resourceName")),
        ({"hardware": "cuda-hopper", "gpusPerNode": 2}, ("gpusPerNode is 2 and nodes 1", "parallel sizes", "need 4")),
        ({"hardware": "cuda-hopper", "nodes": 2, "gpusPerNode": 4}, ("gpusPerNode is 4 and nodes 2", "need 4")),
        (
            {"hardware": "cuda-hopper", "gpusPerNode": 4, "overrides": ["tensor_parallel_size=4"]},
            ("gpusPerNode is 4", "overrides", "need 8"),
        ),
        ({"hardware": "cuda-hopper", "extraArgs": ["-dp", "1"]}, ("the profile has 4 GPUs", "extraArgs", "need 2")),
        ({"image": {"tag": "x", "digest": f"sha256:{'a' * 64}"}}, ("image.tag", "image.digest")),
        ({"apiKey": {"value": "x", "existingSecret": "y"}}, ("apiKey.value", "apiKey.existingSecret")),
        ({"hubToken": {"value": "x", "existingSecret": "y"}}, ("hubToken.value", "hubToken.existingSecret")),
        ({"extraArgs": ["--api-key", "x"]}, ("extraArgs", "--api-key", "apiKey")),
        ({"extraArgs": ["--api_key=x"]}, ("extraArgs", "--api_key", "apiKey")),
        ({"extraArgs": ["--nnodes=2"]}, ("extraArgs", "--nnodes", "nodes")),
        ({"extraArgs": ["--headless"]}, ("extraArgs", "--headless", "nodes")),
        ({"extraArgs": ["-r", "1"]}, ("extraArgs", "-r", "nodes")),
        ({"extraArgs": ["--port", "1"]}, ("extraArgs", "--port", "port decides")),
        ({"extraArgs": ["--host=::"]}, ("extraArgs", "--host", "host decides")),
        ({"extraArgs": ["--ssl-keyfile", "k"]}, ("extraArgs", "--ssl-keyfile", "end TLS in front of the server")),
        ({"overrides": ["engine_args.port=1"]}, ("overrides", "port", "port decides")),
        ({"host": "127.0.0.1"}, ("host is 127.0.0.1", "service.port")),
        ({"host": "::1"}, ("host is ::1", "service.port")),
        ({"apiKey": {"value": " "}}, ("apiKey.value is blank", "apiKey.existingSecret")),
        ({"hubToken": {"value": "\t"}}, ("hubToken.value is blank", "hubToken.existingSecret")),
        *(
            ({"extraMounts": [{"name": "x", "mountPath": path, "hostPath": {"path": "/a"}}]}, ("extraMounts", owner))
            for path, owner in (
                ("/cache", "cache:"),
                ("/tmp/", "tmp"),
                ("/dev/shm", "sharedMemory"),
                ("/", "the image"),
            )
        ),
        (
            {
                "customProfile": PROFILE,
                "extraMounts": [{"name": "x", "mountPath": "/etc/dspark-serve", "hostPath": {"path": "/a"}}],
            },
            ("extraMounts", "customProfile"),
        ),
        (
            {
                "perHardware": {"cpu": {"devices": ["/dev/x"]}},
                "extraMounts": [{"name": "x", "mountPath": "/dev/x", "hostPath": {"path": "/a"}}],
            },
            ("extraMounts", "perHardware.cpu.devices"),
        ),
        (
            {"extraMounts": [{"name": "x", "mountPath": path, "hostPath": {"path": "/a"}} for path in ("/a", "/b")]},
            ("extraMounts", "the name x twice"),
        ),
        (
            {"extraMounts": [{"name": name, "mountPath": "/a", "hostPath": {"path": "/a"}} for name in ("x", "y")]},
            ("extraMounts has y at /a", "extraMounts' x"),
        ),
        ({"extraEnv": [{"name": "A", "value": value} for value in "ab"]}, ("extraEnv", "A twice")),
        ({"extraEnv": [{"name": "DSPARK_PORT", "value": "1"}]}, ("extraEnv", "DSPARK_PORT", "port")),
        ({"extraEnv": [{"name": "DSPARK_API_KEY", "value": "1"}]}, ("extraEnv", "DSPARK_API_KEY", "apiKey")),
        ({"extraEnv": [{"name": "VLLM_API_KEY", "value": "1"}]}, ("extraEnv", "VLLM_API_KEY", "apiKey")),
        ({"extraEnv": [{"name": "DSPARK_API_KEY_FILE", "value": "/k"}]}, ("extraEnv", "DSPARK_API_KEY_FILE", "apiKey")),
        ({"extraEnv": [{"name": "DSPARK_PROFILE", "value": "x"}]}, ("extraEnv", "DSPARK_PROFILE", "set profile")),
        ({"metricsKey": True}, ("metricsKey", "apiKey.existingSecret", "apiKey.value")),
        ({"extraEnv": [{"name": "HF_TOKEN", "value": "1"}]}, ("extraEnv", "HF_TOKEN", "hubToken")),
        ({"cache": {"existingClaim": "x"}}, ("cache.existingClaim", "cache.mode is perReplica")),
        ({"cache": {"mode": "none", "download": {"enabled": True}}}, ("cache.download.enabled", "cache.mode is none")),
        (
            {"cache": {"mode": "shared", "accessModes": ["ReadWriteOnce"]}, "replicas": 2},
            ("cache.accessModes", "replicas", "ReadWriteMany"),
        ),
        (
            {"cache": {"mode": "shared", "accessModes": ["ReadWriteOnce"]}, "hardware": "cuda-hopper", "nodes": 2},
            ("cache.accessModes", "nodes", "ReadWriteMany"),
        ),
        (
            {"autoscaling": {"hpa": {"enabled": True}, "keda": {"enabled": True}}, "podMonitor": {"enabled": True}},
            ("autoscaling.hpa.enabled", "autoscaling.keda.enabled"),
        ),
        ({"autoscaling": {"keda": {"enabled": True}}}, ("autoscaling.keda.query", "podMonitor.enabled")),
        ({"autoscaling": {"hpa": {"enabled": True}}, "replicas": 2}, ("replicas is 2", "autoscaling.hpa.enabled")),
        (
            {"autoscaling": {"hpa": {"enabled": True}, "minReplicas": 9}},
            ("autoscaling.minReplicas is 9", "autoscaling.maxReplicas 4"),
        ),
        ({"networkPolicy": {"metrics": {"enabled": True}}}, ("networkPolicy.metrics", "networkPolicy.api.enabled")),
        (
            {"cache": {"mode": "none"}, "upgrade": {"maxUnavailable": 0}},
            ("upgrade.maxSurge", "upgrade.maxUnavailable"),
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_both_named(
    values: dict[str, Any], named: tuple[str, ...]
) -> None:
    answer = refused(values)
    assert [word for word in named if word not in answer] == []


@pytest.mark.parametrize(
    "values",
    [
        {"gpusPerNode": 8, "overrides": ["engine_args.data_parallel_size=4"]},
        {"gpusPerNode": 8, "extraArgs": ["--tensor-parallel-size=4", "--seed", "7"]},
        {"gpusPerNode": 4, "nodes": 2, "overrides": ["data_parallel_size=1"], "extraArgs": ["-tp", "4", "-pp", "2"]},
        {"gpusPerNode": 2, "extraArgs": ["--data-parallel-size-local", "1"]},  # more than this can tell
    ],
)
def test_gpus_that_the_parallel_sizes_need_are_given(values: dict[str, Any]) -> None:
    documents = render({"hardware": "cuda-hopper", **values})
    (container,) = pods(documents)["server"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == values["gpusPerNode"]


def test_what_only_resembles_a_contradiction_is_rendered() -> None:
    mounts = [{"name": name, "mountPath": f"/cache/{name}", "hostPath": {"path": "/a"}} for name in ("x", "y")]
    render({"extraMounts": mounts, "extraArgs": ["--served-model-name", "port"], "host": "::"})


def test_every_contradiction_is_named_at_once() -> None:
    answer = refused({"cache": {"existingClaim": "x"}, "gpusPerNode": 1, "extraArgs": ["--api-key=x"]})
    assert all(word in answer for word in ("cache.existingClaim", "gpusPerNode", "--api-key"))
    assert "--api-key=x" not in answer


def test_a_parent_chart_may_hand_global_values_down() -> None:
    try:
        render({"global": {"imageRegistry": "x"}})
    except HelmError as error:
        raise AssertionError(error) from error
