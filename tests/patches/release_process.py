"""Runs a probe in a process that imports a real vLLM release instead of the installed one.

A release is the Python tree of its wheel, unpacked to `<cache>/<version>/`. The cache is `.cache/releases`, or what
`DSPARK_RELEASES_CACHE` names. Shared objects are not needed: nothing that is probed calls them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROBES = REPOSITORY / "tests" / "patches" / "releases" / "probes"

ON_CPU = (("VLLM_TARGET_DEVICE", "cpu"), ("TRITON_INTERPRET", "1"), ("CUDA_VISIBLE_DEVICES", ""))
"""What makes a process interpret every kernel, also where there is a GPU."""


def release_root(version: str) -> Path:
    """The unpacked release; skips the test where there is none."""
    releases = Path(os.environ.get("DSPARK_RELEASES_CACHE", REPOSITORY / ".cache" / "releases"))
    root = releases / version
    if not (root / "vllm").is_dir():
        pytest.skip(f"vLLM {version} is not unpacked at {root}: `make test-releases` fetches it")
    return root.resolve()


@cache
def finish(
    name: str,
    version: str,
    *arguments: str,
    settings: tuple[tuple[str, str], ...] = ON_CPU,
    under: tuple[str, ...] = (),
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """The finished process of `probes/<name>.py`, whatever became of it. The same call runs once."""
    paths = (str(release_root(version)), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "", **dict(settings)}
    return subprocess.run(
        [*under, sys.executable, str(PROBES / f"{name}.py"), version, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def answers(name: str, version: str, *arguments: str, tasks: tuple[str, ...], **how: Any) -> dict[str, Any]:
    """What one process of the probe answers to each task. A probe that fails fails the test."""
    process = finish(name, version, *arguments, *" then ".join(tasks).split(), **how)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-6000:]
    lines = process.stdout.strip().splitlines()[-len(tasks) :]
    return dict(zip(tasks, map(json.loads, lines), strict=True))


def answer(name: str, version: str, *arguments: str, **how: Any) -> Any:
    """What a probe with one task answers."""
    task = " ".join(arguments)
    return answers(name, version, tasks=(task,), **how)[task]
