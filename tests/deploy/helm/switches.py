"""The chart's switches, each as the values that turn it, and what no combination of them may break."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from helm import HARDWARE, NAMESPACE, RELEASE, Document, merged, of_kind, one, placed, pods, workload
from schemas import problems

CACHES = ("perReplica", "shared", "none")
SECRETS = ("the-api-key-itself", "the-hub-token-itself")
PROFILE = {
    "name": "mine",
    "description": "A profile of one's own",
    "hardware": "cpu",
    "gpus": 4,
    "model": "some/model",
    "revision": "v1",
    "engine_args": {"max_num_seqs": 16, "tensor_parallel_size": 4},
    "speculative_config": {"method": "dspark", "model": "some/draft", "num_speculative_tokens": 5},
    "source": "a test",
}
SWITCHES: dict[str, dict[str, Any]] = {
    "api-key": placed("apiKey.value", SECRETS[0]),
    "api-key-existing": {"apiKey": {"existingSecret": "theirs", "secretKey": "a.key"}},
    "metrics-key": {
        "metricsKey": True,
        "apiKey": {"existingSecret": "theirs"},
        "podMonitor": {"enabled": True},
    },
    "hub-token": placed("hubToken.value", SECRETS[1]),
    "hub-token-existing": placed("hubToken.existingSecret", "theirs"),
    "custom-profile": {"customProfile": PROFILE},
    "overrides": {"overrides": ["max_num_seqs=4"], "skipChecks": ["memory"], "extraArgs": ["--seed", "$(id)"]},
    "fixed": {"verification": "fixed", "accessLog": True},
    "download": placed("cache.download.enabled", True),
    "existing-claim": placed("cache.existingClaim", "theirs"),
    "storage": {"cache": {"size": "1Ti", "storageClassName": "fast", "keep": False}},
    "no-service-account": placed("serviceAccount.create", False),
    "no-budget": placed("podDisruptionBudget.enabled", False),
    "network-api": placed("networkPolicy.api.enabled", True),
    "network-all": {"networkPolicy": {"api": {"enabled": True}, "metrics": {"enabled": True}}},
    "hpa": placed("autoscaling.hpa.enabled", True),
    "keda": {"autoscaling": {"keda": {"enabled": True}}, "podMonitor": {"enabled": True}},
    "pod-monitor": {"podMonitor": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}}},
    "rules": {"prometheusRule": {"enabled": True, "labels": {"release": "kube-prometheus-stack"}}},
    "dashboards": {"dashboards": {"enabled": True, "annotations": {"grafana_folder": "dspark"}}},
    "no-replica": {"replicas": 0},
    "replicas": {"replicas": 3, "upgrade": {"maxSurge": 1, "maxUnavailable": 0}},
    "no-drain": {"drainSeconds": 0, "startupMinutes": 1},
    "long": {"drainSeconds": 86400, "startupMinutes": 1440},
    "digest": {"image": {"repository": "registry/x", "digest": f"sha256:{'a' * 64}", "pullSecrets": ["regcred"]}},
    "openshift": {"security": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    "large-ids": {"security": {"runAsUser": 1000680000, "runAsGroup": 1000680000, "fsGroup": 1000680000}},
    "capabilities": {"security": {"capabilities": ["IPC_LOCK"]}, "hostNetwork": True},
    "scheduling": {
        "nodeLabels": [{"key": "pool", "operator": "In", "values": ["a"]}],
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "spread": {"enabled": False},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    },
    "labels": {"podLabels": {"team": "x"}, "podAnnotations": {"note": "y"}, "service": {"annotations": {"a": "b"}}},
    "environment": {
        "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "DSPARK_CALIBRATION", "value": "on"}]
    },
    "mounts": {
        "extraMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True, "persistentVolumeClaim": {"claimName": "m"}},
            {"name": "hosts", "mountPath": "/data", "subPath": "x", "hostPath": {"path": "/data"}},
        ]
    },
    "load-balancer": {"service": {"type": "LoadBalancer", "port": 443}, "port": 9999},
    "resources": {"resources": {"requests": {"cpu": 2}}, "sharedMemory": "3Gi"},
}
"""Name to values. `fitted` adapts those that ask for a certain cache or hardware."""

EXCLUSIVE = [
    {"api-key", "api-key-existing"},
    {"api-key", "metrics-key"},
    {"hub-token", "hub-token-existing"},
    {"network-api", "network-all"},
    {"hpa", "keda"},
    {"hpa", "no-replica"},
    {"hpa", "replicas"},
    {"keda", "no-replica"},
    {"keda", "replicas"},
    {"no-replica", "replicas"},
    {"no-drain", "long"},
    {"openshift", "large-ids"},
]
"""Pairs that set the same value, or that preflight refuses."""

ALL_ON = [
    *("api-key", "hub-token", "custom-profile", "overrides", "download", "storage", "network-all", "keda", "rules"),
    *("pod-monitor", "dashboards", "long", "digest", "large-ids", "capabilities", "scheduling", "labels"),
    *("environment", "mounts", "load-balancer", "resources"),
]
ALL_OFF = ["no-service-account", "no-budget", "no-replica", "no-drain"]


LONGEST_NAMES = {"StatefulSet": 52, "LeaderWorkerSet": 48}
"""A StatefulSet's name and a hash of ten make one label; a LeaderWorkerSet makes StatefulSets with numbers appended."""


def fitted(hardware: str, nodes: int, cache: str, names: list[str]) -> dict[str, Any] | None:
    """Values for a base and switches; None where a switch has no meaning there."""
    if cache != "shared" and {"download", "existing-claim"} & set(names):
        return None
    if any(pair <= set(names) for pair in EXCLUSIVE):
        return None
    values = merged({"hardware": hardware, "nodes": nodes, "cache": {"mode": cache}}, *(SWITCHES[n] for n in names))
    if "customProfile" in values:
        values["customProfile"] = {**values["customProfile"], "hardware": hardware}
    return values


def check(documents: list[Document], values: dict[str, Any], release: str = RELEASE) -> None:
    """What holds for every combination: the chart's promises, whatever is switched."""
    assert [problem for document in documents for problem in problems(document)] == []
    assert list(fractions(documents)) == []
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names))
    for kind, name in names:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), name
        assert len(name) <= LONGEST_NAMES.get(kind, 63), name
    for document in documents:
        assert document["metadata"].get("namespace", NAMESPACE) == NAMESPACE
        assert document["metadata"]["labels"]["app.kubernetes.io/instance"] == release
    found = pods(documents)
    for component, pod in found.items():
        _check_pod(component, pod, documents, values)
    _check_selectors(documents, found)
    _check_secrets(documents)


def fractions(node: object) -> Iterator[float]:
    """Numbers with a fraction or an exponent, of which Kubernetes takes none here: Helm writes 1000680000 as 1e+09."""
    if isinstance(node, float):
        yield node
    elif isinstance(node, dict | list):
        for below in node.values() if isinstance(node, dict) else node:
            yield from fractions(below)


def _check_pod(component: str, pod: Document, documents: list[Document], values: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    accounts = [account["metadata"]["name"] for account in of_kind(documents, "ServiceAccount")]
    assert spec["serviceAccountName"] in (accounts or ["default"])
    security = spec["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    expected = merged({"runAsUser": 1001, "runAsGroup": 0, "fsGroup": 1001}, values.get("security", {}))
    for key in ("runAsUser", "runAsGroup", "fsGroup"):
        assert security.get(key) == expected[key], key
    volumes = {volume["name"] for volume in spec.get("volumes", [])}
    if component in ("server", "worker") and values["cache"]["mode"] == "perReplica":
        volumes.add("cache")  # from the claim template
    for container in spec["containers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert container["resources"]["requests"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
        assert mounts.keys() <= volumes
        assert len(mounts.values()) == len(set(mounts.values()))
        if component in ("server", "worker", "download"):
            # Nothing else is writable, and the images keep every cache below /cache.
            assert mounts["cache"] == "/cache"
            assert mounts["tmp"] == "/tmp"
    if component in ("server", "worker"):
        _check_server(component, pod, documents, values)


def _check_server(component: str, pod: Document, documents: list[Document], values: dict[str, Any]) -> None:
    (container,) = pod["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": values.get("port", 8000)}]
    assert container["startupProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 60 * values.get("startupMinutes", 60)
    drain = values.get("drainSeconds", 60)
    environment = one(documents, "ConfigMap", "-environment")
    assert container["envFrom"] == [{"configMapRef": {"name": environment["metadata"]["name"]}}]
    assert environment["data"]["DSPARK_DRAIN_SECONDS"] == str(drain)
    assert environment["data"]["DSPARK_PORT"] == str(values.get("port", 8000))
    stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert stop == min(10, drain // 4)
    assert pod["spec"]["terminationGracePeriodSeconds"] == stop + drain + 45
    shared_memory = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shared-memory")
    assert shared_memory["emptyDir"]["medium"] == "Memory"
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    words = container["args"]
    assert ("--headless" in words) is (component == "worker")
    assert ("--nnodes" in words) is (values["nodes"] > 1)
    hardware = values["hardware"]
    gpus = {key: value for key, value in container["resources"].get("limits", {}).items() if "/" in key}
    resource = {"cuda-hopper": "nvidia.com/gpu", "rocm-gfx950": "amd.com/gpu"}.get(hardware)
    assert gpus == ({resource: 4 // values["nodes"]} if resource else {})
    groups = pod["spec"]["securityContext"].get("supplementalGroups", [])
    assert bool(groups) is (hardware == "rocm-gfx950")
    assert hardware in container["image"] or "digest" in values.get("image", {})


def _check_selectors(documents: list[Document], found: dict[str, Document]) -> None:
    """Every selector finds the pods it is meant for, and none of another kind."""
    servers = {"server", "worker"} & found.keys()
    owner = workload(documents)
    if owner["kind"] != "LeaderWorkerSet":
        assert selected(owner["spec"]["selector"], found) == {"server"}
    for service in of_kind(documents, "Service"):
        assert selected({"matchLabels": service["spec"]["selector"]}, found) == {"server"}
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        for document in of_kind(documents, kind):
            assert selected(document["spec"]["selector"], found) == servers
    for policy in of_kind(documents, "NetworkPolicy"):
        assert selected(policy["spec"]["podSelector"], found) >= servers
    for port in chain(*map(named_ports, documents)):
        assert port == "http"  # the only port that a server's pod names
    for scaler in chain(of_kind(documents, "HorizontalPodAutoscaler"), of_kind(documents, "ScaledObject")):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == (owner["apiVersion"], owner["kind"])
        assert target["name"] == owner["metadata"]["name"]
        assert "replicas" not in owner["spec"]


def named_ports(document: Document) -> Iterator[object]:
    """The ports of pods that a document refers to."""
    spec = document.get("spec", {})
    if document["kind"] == "Service":
        yield from (port["targetPort"] for port in spec["ports"])
    elif document["kind"] == "NetworkPolicy":
        yield from (port["port"] for rule in spec["ingress"] for port in rule.get("ports", []))
    elif document["kind"] == "PodMonitor":
        yield from (endpoint["port"] for endpoint in spec["podMetricsEndpoints"])


def selected(selector: dict[str, Any], found: dict[str, Document]) -> set[str]:
    """The components whose pods a label selector matches."""

    def matches(labels: dict[str, str]) -> bool:
        wanted = selector.get("matchLabels", {}).items()
        ranges = selector.get("matchExpressions", [])
        return wanted <= labels.items() and all(labels.get(one["key"]) in one["values"] for one in ranges)

    return {component for component, pod in found.items() if matches(pod["metadata"]["labels"])}


def _check_secrets(documents: list[Document]) -> None:
    """A key is in its Secret and nowhere else, and no pod has one on its command line."""
    for document in documents:
        if document["kind"] != "Secret":
            text = json.dumps(document)
            assert [secret for secret in SECRETS if secret in text] == [], document["kind"]


BASES = [(hardware, nodes, cache) for hardware in HARDWARE for nodes in (1, 2) for cache in CACHES]
