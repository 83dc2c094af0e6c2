"""What the images are built from and labelled with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patches.hardware import CPU, CUDA_HOPPER, SERVED
from patches.install import survey, vllm_root
from patches.releases import ReleaseError
from serve.errors import ExitCode, InputError
from serve.images import (
    NO_COMMIT,
    build_arguments,
    main,
    read_lock,
    reference,
    refresh,
    registry_digest,
    untrue_arguments,
)

ROOT = Path(__file__).parents[2]
LOCK = read_lock(ROOT / "docker" / "images.lock")
DIGEST = "sha256:" + "ab" * 32


def test_an_image_is_taken_by_digest_where_it_is_known() -> None:
    assert reference({"name": "a/b:1", "digest": None}) == "a/b:1"
    assert reference({"name": "a/b:1", "digest": DIGEST}) == f"a/b:1@{DIGEST}"


@pytest.mark.parametrize("hardware", SERVED)
def test_the_arguments_are_the_ledgers(hardware: str) -> None:
    arguments = build_arguments(hardware, LOCK)
    patches = survey(release="0.32.0", hardware_name=hardware, vllm_root=None)
    assert arguments["PATCHES"] == ",".join(patches.applied)
    assert arguments["PATCHSET"] == patches.digest
    assert arguments["VLLM_VERSION"] == "0.32.0"
    assert arguments["VLLM_COMMIT"] == (NO_COMMIT if hardware == CPU else LOCK["vllm"]["commit"])
    assert arguments["VERSION"] == "0.1.0"


def test_what_is_installed_here_is_what_the_cpu_image_says() -> None:
    assert untrue_arguments(CPU, build_arguments(CPU, LOCK), vllm_root()) == []


def test_every_argument_that_is_not_true_is_named() -> None:
    given = build_arguments(CPU, LOCK) | {"VLLM_VERSION": "0.31.0", "PATCHSET": ""}
    lines = untrue_arguments(CPU, given, vllm_root())
    assert [line.split()[0] for line in lines] == ["VLLM_VERSION", "PATCHSET"]
    assert lines[0] == "VLLM_VERSION is '0.31.0' and the image has '0.32.0': build it with make"
    # Another hardware's patches are not this one's.
    assert untrue_arguments(CUDA_HOPPER, build_arguments(CPU, LOCK), vllm_root())


def test_refreshing_looks_everything_up(tmp_path: Path) -> None:
    source = tmp_path / "vllm" / "_version.py"
    source.parent.mkdir()
    source.write_text("__version__ = '0.32.0'\n__commit_id__ = commit_id = 'gfeedc0de'\n")
    lock = json.loads(json.dumps(LOCK))
    assert refresh(lock, lambda _: DIGEST, lambda _: tmp_path) == []
    assert lock["vllm"] == {"version": "0.32.0", "commit": "feedc0de"}
    assert {image["digest"] for image in lock["images"].values()} == {DIGEST}
    assert build_arguments(CUDA_HOPPER, lock)["BASE_IMAGE"] == f"vllm/vllm-openai:v0.32.0@{DIGEST}"


def test_what_cannot_be_looked_up_is_not_kept_and_said() -> None:
    def unreachable(name: str) -> str:
        raise InputError(f"{name}: no route")

    def unfetched(release: str) -> Path:
        raise ReleaseError(f"vLLM {release} could not be downloaded")

    lock = json.loads(json.dumps(LOCK))
    for image in lock["images"].values():
        image["digest"] = DIGEST
    problems = refresh(lock, unreachable, unfetched)
    assert len(problems) == len(lock["images"]) + 1
    assert {image["digest"] for image in lock["images"].values()} == {None}
    assert lock["vllm"] == LOCK["vllm"]


def test_a_registry_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match=r"^prom/prometheus:v1: "):
        registry_digest("prom/prometheus:v1")


def test_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["args", "cpu"]) == ExitCode.OK
    words = capsys.readouterr().out.split()
    assert "--build-arg=VLLM_VERSION=0.32.0" in words
    assert main(["bake"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["target"].keys() == set(SERVED)
    for name, value in build_arguments(CPU, LOCK).items():
        monkeypatch.setenv(name, value)
    assert main(["check", "cpu"]) == ExitCode.OK
    monkeypatch.setenv("PATCHSET", "other")
    assert main(["check", "cpu"]) == ExitCode.BAD_INPUT
    assert "PATCHSET is 'other'" in capsys.readouterr().err
    assert main(["args", "tpu"]) == ExitCode.BAD_INPUT
    assert "HARDWARE is one of" in capsys.readouterr().err


def test_outside_of_the_repository_the_lock_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="run this in the repository"):
        main(["args", "cpu"])
