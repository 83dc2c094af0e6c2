"""Whether Kubernetes would take a document.

Kubernetes' own kinds are held against the schemas that the distribution kubernetes-validate carries, strictly: an
unknown field fails. The custom kinds have none there; what this chart uses of them is spelt out here.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

KUBERNETES = "1.37.0"

_POD = {"$ref": "_definitions.json#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
_SELECTOR = {"$ref": "_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"}
_CLAIM = {"$ref": "_definitions.json#/$defs/io.k8s.api.core.v1.PersistentVolumeClaimSpec"}
_BEHAVIOR = {"$ref": "_definitions.json#/$defs/io.k8s.api.autoscaling.v2.HorizontalPodAutoscalerBehavior"}
_TEXT = {"type": "string", "minLength": 1}
_DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h|d))+$"}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


_NUMBER = {"type": "integer", "minimum": 0}
_RULE = {
    **_closed(
        ("expr",),
        record={"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"},
        alert=_TEXT,
        expr=_TEXT,
        **{"for": _DURATION},
        keep_firing_for=_DURATION,
        labels=_LABELS,
        annotations=_LABELS,
    ),
    "oneOf": [{"required": ["record"]}, {"required": ["alert"]}],
}
CUSTOM = {
    # sigs.k8s.io/lws, api/leaderworkerset/v1; volumeClaimTemplates came with kubernetes-sigs/lws#622.
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _closed(
        ("leaderWorkerTemplate",),
        replicas=_NUMBER,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=_closed(
            ("type",),
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=_closed(maxSurge=_NUMBER, maxUnavailable=_NUMBER),
        ),
        leaderWorkerTemplate=_closed(
            ("workerTemplate",),
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            leaderTemplate=_POD,
            workerTemplate=_POD,
            volumeClaimTemplates={
                "type": "array",
                "items": _closed(("metadata", "spec"), metadata=_closed(("name",), name=_TEXT), spec=_CLAIM),
            },
        ),
    ),
    # prometheus-operator, pkg/apis/monitoring/v1.
    ("monitoring.coreos.com/v1", "PodMonitor"): _closed(
        ("selector", "podMetricsEndpoints"),
        selector=_SELECTOR,
        podMetricsEndpoints={
            "type": "array",
            "minItems": 1,
            "items": _closed(
                port=_TEXT,
                path={"type": "string", "pattern": "^/"},
                interval=_DURATION,
                authorization=_closed(
                    type=_TEXT, credentials=_closed(("key",), name=_TEXT, key=_TEXT, optional={"type": "boolean"})
                ),
            ),
        },
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _closed(
        ("groups",),
        groups={
            "type": "array",
            "minItems": 1,
            "items": _closed(
                ("name", "rules"),
                name=_TEXT,
                interval=_DURATION,
                rules={"type": "array", "minItems": 1, "items": _RULE},
            ),
        },
    ),
    # kedacore/keda, apis/keda/v1alpha1, and the Prometheus scaler's metadata.
    ("keda.sh/v1alpha1", "ScaledObject"): _closed(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=_closed(("name",), apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
        minReplicaCount=_NUMBER,
        maxReplicaCount=_NUMBER,
        pollingInterval=_NUMBER,
        advanced=_closed(horizontalPodAutoscalerConfig=_closed(behavior=_BEHAVIOR)),
        triggers={
            "type": "array",
            "minItems": 1,
            "items": _closed(
                ("type", "metadata"),
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value"]},
                metadata=_closed(
                    ("serverAddress", "query", "threshold"), serverAddress=_TEXT, query=_TEXT, threshold=_TEXT
                ),
            ),
        },
    ),
}

_seen: dict[str, list[str]] = {}


def problems(document: dict[str, Any]) -> list[str]:
    """What Kubernetes would say against a document; documents that were asked about before cost nothing."""
    text = json.dumps(document, sort_keys=True)
    if text not in _seen:
        validator = _validator(document["apiVersion"], document["kind"])
        _seen[text] = [
            f"{document['kind']} {document['metadata']['name']}: {error.json_path}: {error.message[:300]}"
            for error in validator.iter_errors(document)
        ]
    return _seen[text]


@cache
def _validator(version: str, kind: str) -> Draft202012Validator:
    if spec := CUSTOM.get((version, kind)):
        schema: dict[str, Any] = _closed(
            ("apiVersion", "kind", "metadata", "spec"), apiVersion={}, kind={}, metadata={"type": "object"}, spec=spec
        )
    else:
        group, _, name = version.rpartition("/")
        file = "-".join(part for part in (kind.lower(), group.partition(".")[0], name) if part)
        schema = json.loads((_folder() / f"{file}.json").read_text())
    return Draft202012Validator(schema, registry=_definitions())


@cache
def _definitions() -> Registry[Any]:
    contents = json.loads((_folder() / "_definitions.json").read_text())
    resource = Resource.from_contents(contents, DRAFT202012)
    return Registry().with_resources([("_definitions.json", resource), (contents["$id"], resource)])


def _folder() -> Path:
    package = metadata.distribution("kubernetes-validate")
    folder = f"kubernetes_validate/kubernetes-json-schema/v{KUBERNETES}-local-strict"
    return Path(str(package.locate_file(folder)))
