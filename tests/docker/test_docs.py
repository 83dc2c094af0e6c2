"""docker/README.md is complete and true, and the build files agree with each other."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from patches.hardware import SERVED
from serve import server
from serve.docs import rendered
from serve.images import read_lock
from serve.preflight.machine import cache_folders
from serve.profile import load
from tests.test_docs import names

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
README = (DOCKER / "README.md").read_text()
COMPOSE = (DOCKER / "compose.yaml").read_text()
OVERRIDE = README.split("```yaml\n")[1].split("```")[0]
"""The example of a file of one's own after compose.yaml."""
LOCK = read_lock(DOCKER / "images.lock")
PLUGINS = Path(os.environ.get("DOCKER_PLUGINS", ROOT / ".cache" / "docker-plugins"))
"""Where tests/docker/plugins.sh puts compose and buildx."""

VERSION = metadata.version("dspark-serve")
ONLY_FOR_DEVELOPERS = {"DSPARK_RELEASES_CACHE"}


def dockerfile(hardware: str) -> str:
    return (DOCKER / hardware / "Dockerfile").read_text()


def environment(hardware: str) -> dict[str, str]:
    """What the final stage sets."""
    block = re.search(r"^ENV (.*?[^\\])$", dockerfile(hardware), re.MULTILINE | re.DOTALL)
    assert block is not None
    return dict(word.split("=", 1) for word in block[1].replace("\\\n", " ").split())


def table() -> dict[str, str]:
    """Variable -> its row, of README's table of the images' environment."""
    section = README.split("## Environment")[1].split("## Build")[0]
    rows = re.findall(r"^\| (`[A-Z].*?) \| (.*)$", section, re.MULTILINE)
    return {name: rest for variables, rest in rows for name in re.findall(r"`(\w+)`", variables)}


def test_every_variable_of_the_images_is_in_the_table_with_its_value() -> None:
    for hardware in SERVED:
        for name, value in environment(hardware).items():
            assert name in table(), name
            if name not in ("PATH", "DSPARK_PROFILE"):
                assert f"`{value}`" in table()[name], name


@pytest.mark.parametrize("hardware", SERVED)
def test_preflight_looks_at_every_cache_of_an_image(hardware: str) -> None:
    given = environment(hardware)
    caches = {name: Path(value) for name, value in given.items() if value.startswith("/cache/")}
    assert caches.items() <= cache_folders(given).items()


def test_every_variable_that_the_commands_read_is_in_the_table() -> None:
    assert names(r"\bDSPARK_[A-Z_]+\b") - ONLY_FOR_DEVELOPERS <= table().keys()


def test_every_variable_of_the_table_is_read_by_something() -> None:
    set_by_us = {name for hardware in SERVED for name in environment(hardware)}
    theirs = {"VLLM_API_KEY", "HF_TOKEN"}  # vllm.envs and huggingface_hub.constants
    assert table().keys() - set_by_us - names(r"\bDSPARK_[A-Z_]+\b") == theirs


def test_every_variable_of_compose_is_explained() -> None:
    section = README.split("## Compose")[1].split("## Tests")[0]
    used = set(re.findall(r"\$\{(\w+)", COMPOSE)) | set(re.findall(r"^    - ([A-Z_]+)$", COMPOSE, re.MULTILINE))
    assert len(used) > 8
    for name in used:
        assert f"`{name}`" in section, name


def passed_on() -> list[str]:
    """What compose takes from the environment for the server."""
    names: list[str] = yaml.safe_load(COMPOSE)["x-server"]["environment"]
    return names


def test_compose_passes_on_what_the_readme_says_and_all_that_a_server_reads() -> None:
    (listed,) = (text for text in README.split("\n\n") if text.endswith("passed on from the environment."))
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(passed_on())
    set_by_images = {name for hardware in SERVED for name in environment(hardware)} - {"DSPARK_PROFILE"}
    not_for_compose = {
        "DSPARK_API_KEY_FILE",  # no such file is mounted
        "DSPARK_METRICS_KEY",  # the Prometheus of compose has no key
        *("DSPARK_ACCESS_LOG", "DSPARK_TELEMETRY_DIR", "DSPARK_TRACE_FILE", "DSPARK_PATCHES_OFF"),  # for debugging
    }
    assert set(passed_on()) == table().keys() - set_by_images - not_for_compose


def test_a_stop_is_given_the_time_that_the_slowest_takes() -> None:
    slowest = server.TELL_SECONDS + server.CLOSE_SECONDS + 2 * server.ENGINE_END_SECONDS + 3 + 3
    drain = int(re.findall(r"`(\d+)`", table()["DSPARK_DRAIN_SECONDS"])[0])
    given = int(yaml.safe_load(COMPOSE)["x-server"]["stop_grace_period"].removesuffix("s"))
    assert given >= drain + slowest
    assert f"takes {slowest:.0f} seconds at the very most" in README
    assert re.search(rf"`docker stop\s+--time {given}`", README)
    assert f"`stop_grace_period` is {given} seconds" in README
    override = yaml.safe_load(OVERRIDE)["services"]["cpu"]
    longer = int(override["environment"][0].removeprefix("DSPARK_DRAIN_SECONDS="))
    assert override["stop_grace_period"] == f"{longer + slowest:.0f}s"


def test_every_variable_of_make_is_explained() -> None:
    recipes = (ROOT / "make" / "images.mk").read_text()
    for name in re.findall(r"^([A-Z_]+) \?=", recipes, re.MULTILINE):
        assert name in README, name


@pytest.mark.parametrize("hardware", SERVED)
def test_there_is_one_line_to_run_each(hardware: str) -> None:
    lines = re.findall(rf"^\$ (docker run --rm .*dspark-serve:{hardware}-latest)$", README, re.MULTILINE)
    assert len(lines) == 1
    words = lines[0].split()
    assert "dspark-cache:/cache" in words
    needed = {
        "cpu": ("--shm-size",),
        "cuda-hopper": ("--gpus", "--shm-size", "--ulimit"),
        "rocm-gfx950": ("--device", "--group-add", "--shm-size", "--ulimit"),
    }
    assert all(flag in words for flag in needed[hardware])


@pytest.mark.parametrize("hardware", SERVED)
def test_the_default_profile_is_for_the_hardware_and_named(hardware: str) -> None:
    profile = environment(hardware)["DSPARK_PROFILE"]
    assert load(profile).hardware == hardware
    base = LOCK["images"][hardware]["name"]
    assert f"| `dspark-serve:{hardware}-latest` | `{base}` | `{profile}` |" in README


def test_bases_and_tools_are_those_of_the_lock() -> None:
    for hardware in SERVED:
        assert f"ARG BASE_IMAGE={LOCK['images'][hardware]['name']}\n" in dockerfile(hardware)
    for tool in ("prometheus", "grafana"):
        assert f"_IMAGE:-{LOCK['images'][tool]['name']}}}" in COMPOSE
    unknown = [name for name, image in LOCK["images"].items() if image["digest"] is None]
    assert ("**All are null now" in " ".join(README.split())) == (len(unknown) == len(LOCK["images"]))


def test_the_three_images_end_alike() -> None:
    tails = {dockerfile(hardware).split("\nUSER 1001:0\n")[1] for hardware in SERVED}
    assert len(tails) == 1
    assert 'HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["dspark-serve", "health"]' in tails.pop()


def test_no_secret_is_an_argument_or_a_variable_of_an_image() -> None:
    for hardware in SERVED:
        given = re.findall(r"^ARG (\w+)", dockerfile(hardware), re.MULTILINE)
        assert [name for name in [*given, *environment(hardware)] if re.search("TOKEN|KEY|SECRET|PASS", name)] == []


def test_the_exit_codes_are_current() -> None:
    assert rendered(README) == README, "run: python -m serve.docs --write docker/README.md"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (DOCKER / link).exists()


def test_the_dockerfiles_are_clean() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), *(DOCKER / hardware / "Dockerfile" for hardware in SERVED)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def plugin(name: str) -> str:
    found = shutil.which(name, path=str(PLUGINS))
    if found is None:
        pytest.skip(f"{name} is not in {PLUGINS}: tests/docker/plugins.sh brings it")
    return found


@pytest.mark.parametrize("hardware", SERVED)
def test_compose_takes_every_profile(hardware: str) -> None:
    command = [plugin("docker-compose"), "--file", str(DOCKER / "compose.yaml"), "--profile", hardware, "config"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("DSPARK", "VLLM", "HF_"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**outside, "HF_TOKEN": "given"})
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    assert services.keys() == {hardware, "prometheus", "grafana"}
    server = services[hardware]
    assert server["environment"]["HF_TOKEN"] == "given"
    assert server["environment"]["DSPARK_PROFILE"] is None  # the image's own counts
    assert server["image"] == f"dspark-serve:{hardware}-latest"
    assert server["networks"]["default"]["aliases"] == ["server"]
    assert [volume["target"] for volume in server["volumes"]] == ["/cache"]
    for service in services.values():
        assert all(port["host_ip"] == "127.0.0.1" for port in service["ports"])


def test_compose_takes_the_file_of_one_s_own(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(OVERRIDE)
    command = [plugin("docker-compose"), "--file", str(DOCKER / "compose.yaml"), "--file", str(own)]
    done = subprocess.run([*command, "--profile", "cpu", "config"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    service = yaml.safe_load(done.stdout)["services"]["cpu"]
    assert service["environment"]["DSPARK_API_KEY_FILE"] == "/keys"
    assert "HF_TOKEN" in service["environment"]
    assert [volume["target"] for volume in service["volumes"]] == ["/cache", "/keys"]
    assert service["stop_grace_period"] == "2m45s"


def test_what_compose_mounts_is_there() -> None:
    mounted = re.findall(r"^      - (\.\./\S+?):", COMPOSE, re.MULTILINE)
    assert len(mounted) == 3
    for source in mounted:
        assert any((DOCKER / source).iterdir()), source


def test_what_prometheus_scrapes_is_the_server() -> None:
    composed = yaml.safe_load(COMPOSE)
    scraped = yaml.safe_load(composed["configs"]["prometheus"]["content"])
    targets = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert targets == [f"{composed['x-server']['networks']['default']['aliases'][0]}:8000"]
    assert environment("cpu")["DSPARK_PORT"] == "8000"


def test_bake_has_every_image_with_its_arguments(tmp_path: Path) -> None:
    bake = plugin("docker-buildx")
    arguments = tmp_path / "images.json"
    command = [sys.executable, "-m", "serve.images", "bake"]
    arguments.write_text(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    files = ("--file", str(DOCKER / "docker-bake.hcl"), "--file", str(arguments))
    command, outside = [bake, "bake", "--print", *files], {**os.environ, "IMAGE_TAG": VERSION}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=outside)
    assert done.returncode == 0, done.stderr
    targets = json.loads(done.stdout)["target"]
    assert targets.keys() == set(SERVED)
    for hardware, target in targets.items():
        assert target["args"]["BASE_IMAGE"] == LOCK["images"][hardware]["name"]
        assert target["tags"] == [f"dspark-serve:{hardware}-{VERSION}", f"dspark-serve:{hardware}-latest"]
        assert (ROOT / target["context"] / target["dockerfile"]).exists()
        taken = set(re.findall(r"^ARG (\w+)", dockerfile(hardware), re.MULTILINE))
        assert target["args"].keys() == taken
