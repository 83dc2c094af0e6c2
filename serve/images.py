"""`python -m serve.images`: what the container images are built from, and what their labels say.

    args HARDWARE     the build arguments of an image, as words for `docker build` or `buildah bud`
    bake              those of every image, as a file for `docker buildx bake`
    check HARDWARE    inside a build: whether the arguments, so the labels, are true of what was installed
    lock              look up the digests of the base images and vLLM's commit, for docker/images.lock

`docker/images.lock` names the base images. A digest of null was never looked up: that image is built from its tag.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from patches.hardware import SERVED
from patches.install import survey, vllm_release, vllm_root
from patches.releases import ReleaseError, fetch
from serve.errors import ExitCode, InputError

LOCK_FILE = Path("docker/images.lock")
"""Relative to the repository, where the images are built."""

NO_COMMIT = "unrecorded"
"""What the label says of a vLLM build that does not name its commit, as the CPU wheel."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def read_lock(path: Path = LOCK_FILE) -> dict[str, Any]:
    """The lock's content.

    Raises:
        InputError: it is not where the command runs.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; run this in the repository") from error
    return content


def reference(image: dict[str, str | None]) -> str:
    """The image as a builder takes it: by tag, and by digest where it is known."""
    return f"{image['name']}@{image['digest']}" if image["digest"] else str(image["name"])


def build_arguments(hardware: str, lock: dict[str, Any]) -> dict[str, str]:
    """Everything that an image's Dockerfile takes as an argument.

    Args:
        hardware: One of `patches.hardware.SERVED`.
        lock: What `read_lock` returned.
    """
    release = lock["vllm"]["version"]
    commit = NO_COMMIT if hardware == "cpu" else lock["vllm"]["commit"]
    return {
        "BASE_IMAGE": reference(lock["images"][hardware]),
        "REVISION": _revision(),
        **_facts(hardware, release, None, commit),
    }


def untrue_arguments(hardware: str, given: dict[str, str], root: Path | None) -> list[str]:
    """What a build was told that is not so, one line each.

    Args:
        hardware: The image's hardware.
        given: The build's arguments, which are in its environment.
        root: The folder that holds the installed package `vllm`.
    """
    true = _facts(hardware, vllm_release(), root, _commit(root))
    return [
        f"{name} is '{given.get(name, '')}' and the image has '{value}': build it with make"
        for name, value in true.items()
        if given.get(name, "") != value
    ]


def _facts(hardware: str, release: str, root: Path | None, commit: str) -> dict[str, str]:
    """The labels; `root` None: as the lock of fingerprints says for the released vLLM."""
    patches = survey(release=release, hardware_name=hardware, vllm_root=root)
    return {
        "VERSION": metadata.version("dspark-serve"),
        "VLLM_VERSION": release,
        "VLLM_COMMIT": commit,
        "PATCHES": ",".join(patches.applied),
        "PATCHSET": patches.digest,
    }


def _commit(root: Path | None) -> str:
    """The commit that a vLLM says it was built from, read from its source."""
    source = (root / "vllm" / "_version.py").read_text() if root else ""
    found = re.search(r"commit_id = 'g?([0-9a-f]+)'", source)
    return found[1] if found else NO_COMMIT


def _revision() -> str:
    """This repository's commit; empty outside of one."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def refresh(lock: dict[str, Any], digest_of: Callable[[str], str], release_of: Callable[[str], Path]) -> list[str]:
    """Look everything up that the lock records, in place.

    Args:
        lock: What `read_lock` returned.
        digest_of: The digest that a registry has for an image's name.
        release_of: The folder of an unpacked vLLM release.

    Returns:
        A line for each thing that could not be looked up; what the lock had of it is gone.
    """
    problems = []
    for image in lock["images"].values():
        image["digest"] = None
        try:
            image["digest"] = digest_of(image["name"])
        except InputError as error:
            problems.append(str(error))
    try:
        lock["vllm"]["commit"] = _commit(release_of(lock["vllm"]["version"]))
    except ReleaseError as error:
        problems.append(str(error))
    return problems


def registry_digest(name: str) -> str:
    """The digest of an image's manifest, or of its list of manifests, in its registry.

    Raises:
        InputError: no docker with buildx here, or the registry does not answer.
    """
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest.Digest}}", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{name}: {error}") from error
    found = _DIGEST.search(done.stdout)
    if done.returncode or not found:
        raise InputError(f"{name}: {done.stderr.strip().splitlines()[-1:] or 'no digest'}")
    return found[0]


def main(words: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    match list(words):
        case ["args", hardware] if hardware in SERVED:
            arguments = build_arguments(hardware, read_lock())
            print(*(f"--build-arg={name}={value}" for name, value in arguments.items()))
        case ["bake"]:
            lock = read_lock()
            print(json.dumps({"target": {hw: {"args": build_arguments(hw, lock)} for hw in SERVED}}, indent=2))
        case ["check", hardware] if hardware in SERVED:
            return _complain(untrue_arguments(hardware, dict(os.environ), vllm_root()))
        case ["lock"]:
            lock = read_lock()
            problems = refresh(lock, registry_digest, fetch)
            LOCK_FILE.write_text(json.dumps(lock, indent=2) + "\n")
            return _complain(problems)
        case _:
            return _complain([f"{__doc__}\nHARDWARE is one of {', '.join(SERVED)}"])
    return ExitCode.OK


def _complain(problems: list[str]) -> ExitCode:
    for problem in problems:
        print(problem, file=sys.stderr)
    return ExitCode.BAD_INPUT if problems else ExitCode.OK


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(_complain([str(error)]))
