"""Names, labels, secrets and what a release prints."""

from __future__ import annotations

import base64
import re
import shlex
from typing import Any

import pytest
from helm import NAMESPACE, Document, notes, of_kind, one, pods, render, workload
from switches import ALL_ON, SECRETS, check, fitted, selected

FULL = fitted("cuda-hopper", 1, "shared", ALL_ON)
assert FULL is not None

LONGEST = "a" * 53
"""The longest release name that Helm takes."""


def identities(documents: list[Document]) -> set[tuple[str, str]]:
    return {(document["kind"], document["metadata"]["name"]) for document in documents}


@pytest.mark.parametrize(
    "name",
    [
        LONGEST,
        "a" * 27,
        "a" * 28,
        "a" * 39,
        "a" * 50,
        "1-starts-with-a-digit",
        "with.dots",
        "dspark",
        "dspark-serve",
        "x",
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_every_release_name_that_helm_takes_is_fine(name: str, nodes: int) -> None:
    values = {"hardware": "cuda-hopper", "nodes": nodes, "cache": {"mode": "perReplica"}}
    check(render(values, release=name), values, name)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a", "b"),
        ("a", "a-dspark-serve"),
        (LONGEST, LONGEST[:-1] + "b"),
        ("1", "d-1"),
        ("a.b", "a-b"),
        ("a", "a-pods"),
        ("a", "a-nodes"),
    ],
)
def test_two_releases_in_one_namespace_do_not_collide(first: str, second: str) -> None:
    one_release, other = (render(FULL, release=name) for name in (first, second))
    assert identities(one_release) & identities(other) == set()
    theirs = pods(other)
    for document in one_release:
        spec = document.get("spec", {})
        for selector in (spec.get("selector"), spec.get("podSelector")):
            if document["kind"] in ("PersistentVolumeClaim", "Job") or selector is None:
                continue
            labels = selector if document["kind"] == "Service" else None
            assert selected({"matchLabels": labels} if labels else selector, theirs) == set(), document["kind"]


def test_two_charts_of_one_parent_do_not_collide() -> None:
    """A parent gives each dependency an alias, which is its chart's name."""
    names = [pod["metadata"]["labels"]["app.kubernetes.io/name"] for pod in pods(render()).values()]
    assert set(names) == {"dspark-serve"}


def test_selectors_survive_an_upgrade_of_the_chart() -> None:
    """A selector cannot be changed, so it has no version in it."""
    selector = workload(render())["spec"]["selector"]["matchLabels"]
    assert selector == {
        "app.kubernetes.io/name": "dspark-serve",
        "app.kubernetes.io/instance": "r",
        "app.kubernetes.io/component": "server",
    }
    claim = workload(render())["spec"]["volumeClaimTemplates"][0]
    assert "helm.sh/chart" not in claim["metadata"]["labels"]


def test_network_policies_let_in_who_is_named_and_the_release_s_own_pods() -> None:
    clients, scrapers = [{"podSelector": {"matchLabels": {"app": "chat"}}}], [{"ipBlock": {"cidr": "10.1.0.0/16"}}]
    documents = render(
        {
            "networkPolicy": {
                "api": {"enabled": True, "from": clients},
                "metrics": {"enabled": True, "from": scrapers},
            }
        }
    )
    port = [{"port": "http", "protocol": "TCP"}]
    api, metrics = (one(documents, "NetworkPolicy", suffix)["spec"] for suffix in ("-api", "-metrics"))
    outside, inside = api["ingress"]
    assert outside == {"from": clients, "ports": port}
    (own,) = inside["from"]
    assert selected(own["podSelector"], pods(documents)) == {"server", "test"}
    assert "ports" not in inside  # ranks choose their ports
    assert metrics["ingress"] == [{"from": scrapers, "ports": port}]
    assert all(policy["policyTypes"] == ["Ingress"] for policy in (api, metrics))


def environment(documents: list[Document]) -> dict[str, Any]:
    (container,) = pods(documents)["server"]["spec"]["containers"]
    return {variable["name"]: variable for variable in container.get("env", [])}


def test_a_given_key_is_in_a_secret_and_the_pod_refers_to_it() -> None:
    documents = render({"apiKey": {"value": SECRETS[0]}})
    secret = one(documents, "Secret", "-api-key")
    assert base64.b64decode(secret["data"]["api-key"]).decode() == SECRETS[0]
    reference = environment(documents)["DSPARK_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": secret["metadata"]["name"], "key": "api-key"}


def test_an_existing_secret_is_referred_to_and_none_is_made() -> None:
    documents = render({"apiKey": {"existingSecret": "theirs", "secretKey": "a.key"}})
    assert of_kind(documents, "Secret") == []
    assert environment(documents)["DSPARK_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "theirs", "key": "a.key"}
    test = pods(documents)["test"]["spec"]["containers"][0]["env"]
    assert test[0]["valueFrom"]["secretKeyRef"] == {"name": "theirs", "key": "a.key"}


@pytest.mark.parametrize("key", [{"value": SECRETS[0]}, {"existingSecret": "theirs", "secretKey": "a.key"}])
def test_a_scrape_sends_the_key_that_the_server_asks_for(key: dict[str, str]) -> None:
    values = {"apiKey": key, "podMonitor": {"enabled": True}}
    (opened,) = one(render(values), "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert "authorization" not in opened
    keyed = {**values, "metricsKey": True}
    documents = render(keyed)
    (endpoint,) = one(documents, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert one(documents, "ConfigMap", "-environment")["data"]["DSPARK_METRICS_KEY"] == "true"
    reference = environment(documents)["DSPARK_API_KEY"]["valueFrom"]["secretKeyRef"]
    assert endpoint["authorization"] == {"credentials": reference}
    assert checksum(keyed) != checksum(values)
    assert '/metrics --header "Authorization: Bearer $KEY"' in notes(keyed)


def test_without_a_key_nothing_refers_to_one() -> None:
    documents = render()
    assert of_kind(documents, "Secret") == []
    assert environment(documents) == {}


def checksum(values: object) -> str:
    return str(pods(render(values))["server"]["metadata"]["annotations"]["checksum/config"])


@pytest.mark.parametrize(
    "values",
    [{"port": 8001}, {"verification": "off"}, {"apiKey": {"value": "x"}}, {"hubToken": {"value": "x"}}],
)
def test_a_changed_configuration_restarts_the_pods(values: object) -> None:
    assert checksum(values) != checksum({})
    assert checksum(values) == checksum(values)
    assert len(checksum(values)) == 8  # too few digits to guess a key from


def test_an_unrelated_change_restarts_nothing() -> None:
    plain = workload(render())["spec"]["template"]
    changed = {"podDisruptionBudget": {"enabled": False}, "podMonitor": {"enabled": True}, "replicas": 2}
    assert workload(render(changed))["spec"]["template"] == plain


def test_words_of_the_user_are_not_expanded_by_the_kubelet() -> None:
    documents = render({"overrides": ["model=$(HF_TOKEN)"], "extraArgs": ["$(HF_TOKEN)"]})
    (container,) = pods(documents)["server"]["spec"]["containers"]
    assert [word for word in container["args"] if re.search(r"(?<!\$)\$\(", word)] == []
    assert "model=$$(HF_TOKEN)" in container["args"]


def shared(**cache: Any) -> list[Document]:
    return render({"cache": {"mode": "shared", **cache}})


def mounted(documents: list[Document]) -> str:
    (volume,) = [v for v in pods(documents)["server"]["spec"]["volumes"] if v["name"] == "cache"]
    return str(volume["persistentVolumeClaim"]["claimName"])


def test_a_shared_cache_is_one_claim_that_outlives_the_release() -> None:
    documents = shared()
    claim = one(documents, "PersistentVolumeClaim")
    assert mounted(documents) == claim["metadata"]["name"]
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}}
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    changed = one(
        shared(keep=False, size="9Gi", storageClassName="fast", accessModes=["ReadWriteOnce"]), "PersistentVolumeClaim"
    )
    assert "annotations" not in changed["metadata"]
    assert changed["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "9Gi"}},
    }


def test_an_existing_claim_is_mounted_and_none_is_made() -> None:
    documents = shared(existingClaim="theirs")
    assert of_kind(documents, "PersistentVolumeClaim") == []
    assert mounted(documents) == "theirs"


def test_a_claim_for_each_replica_is_the_workload_s() -> None:
    for values in ({}, {"hardware": "cuda-hopper", "nodes": 2}):
        documents = render(values)
        assert of_kind(documents, "PersistentVolumeClaim") == []
        spec = workload(documents)["spec"]
        (template,) = spec.get("leaderWorkerTemplate", spec)["volumeClaimTemplates"]
        assert template["metadata"]["name"] == "cache"
        assert template["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_a_download_job_has_a_new_name_where_it_would_differ() -> None:
    """A Job cannot be changed: an upgrade that kept its name would fail."""

    def job(**values: Any) -> tuple[str, Document]:
        base = {"hardware": "cuda-hopper", "cache": {"mode": "shared", "download": {"enabled": True}}}
        document = one(render({**base, **values}), "Job")
        return document["metadata"]["name"], document["spec"]["template"]["spec"]

    name, spec = job()
    assert job() == (name, spec)
    for change in ({"image": {"tag": "x"}}, {"profile": "qwen3-8b-dspark-h200"}, {"cache": {"size": "1Ti"}}):
        if "cache" in change:
            change["cache"] |= {"mode": "shared", "download": {"enabled": True}}
        assert job(**change)[0] != name
    models = [container["command"] for container in job(profile="qwen3-8b-dspark-h200")[1]["containers"]]
    assert models == [
        ["hf", "download", "Qwen/Qwen3-8B"],
        ["hf", "download", "deepseek-ai/dspark_qwen3_8b_block7"],
    ]


def test_a_bundled_model_needs_no_download() -> None:
    documents = render({"cache": {"mode": "shared", "download": {"enabled": True}}})
    assert of_kind(documents, "Job") == []


@pytest.mark.parametrize(("values", "keyed"), [({}, False), ({"apiKey": {"existingSecret": "theirs"}}, True)])
def test_the_notes_name_the_next_commands(values: dict[str, Any], keyed: bool) -> None:
    text = notes(values)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("  ")]
    named = [words[:4] for words in commands if words[0] in ("kubectl", "helm")]
    assert ["helm", "test", "r", "--namespace"] in named
    documents = render(values)
    service = [name for kind, name in identities(documents) if kind == "Service" and not name.endswith("-pods")]
    assert f"port-forward service/{service[0]} 8000:80" in text
    assert f"statefulset/{workload(documents)['metadata']['name']}" in text
    assert f"--namespace {NAMESPACE}" in text
    assert ("Authorization: Bearer $KEY" in text) is keyed
    assert ("There is no API key" in text) is not keyed


def test_the_notes_hold_no_secret() -> None:
    text = notes(FULL)
    assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"nodes": 2, "hardware": "cuda-hopper"}, "leaderworkerset/"),
        ({"cache": {"mode": "none"}}, "deployment/"),
    ],
)
def test_the_notes_wait_for_the_workload_that_there_is(values: dict[str, Any], kind: str) -> None:
    assert kind + workload(render(values))["metadata"]["name"] in notes(values)
