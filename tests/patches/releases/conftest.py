"""Tests against real vLLM releases, each in a process of its own that imports that release's own modules.

A release is the Python tree of its wheel, unpacked to `<cache>/<version>/`. The cache is `.cache/releases`, or what
`DSPARK_RELEASES_CACHE` names. Only the Python files are needed: everything here runs on a CPU, Triton interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PROBES = Path(__file__).with_name("probes")


def release_root(version: str) -> Path:
    cache = Path(os.environ.get("DSPARK_RELEASES_CACHE", REPOSITORY / ".cache" / "releases"))
    root = cache / version
    if not (root / "vllm").is_dir():
        pytest.skip(f"vLLM {version} is not unpacked at {root}: run `make test-releases`")
    return root.resolve()


@pytest.fixture
def probe() -> Callable[..., Any]:
    """Runs `probes/<name>.py` in a process that sees the release instead of the installed vLLM."""

    def run(name: str, version: str, *arguments: str, timeout: float = 600) -> Any:
        paths = (str(release_root(version)), str(REPOSITORY))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_TARGET_DEVICE": "cpu",
            "TRITON_INTERPRET": "1",
            "VLLM_PLUGINS": "",
            "OMP_NUM_THREADS": "1",
        }
        finished = subprocess.run(
            [sys.executable, str(PROBES / f"{name}.py"), version, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-6000:]
        return json.loads(finished.stdout.strip().splitlines()[-1])

    return run
