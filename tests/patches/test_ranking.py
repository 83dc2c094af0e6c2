"""The ranking kernel: interpreted, it does what the reference does; compiled, it is code for both kinds of GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str, *arguments: str, interpret: bool, **settings: str) -> str:
    """In a process of its own: Triton decides whether to interpret when it is imported."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": str(int(interpret)),
        "PYTHONPATH": str(HERE.parents[1]),
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    process = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout


def test_it_admits_and_adds_up_as_the_reference_does():
    assert json.loads(run("ranking_interpreted.py", "0", "40", interpret=True)) == []


def test_every_kernel_compiles_for_hopper_and_gfx950(tmp_path):
    lines = run("kernels_compiled.py", interpret=False, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert len([line for line in lines if line.endswith(" 90")]) == 5
    assert len([line for line in lines if line.endswith(" gfx950")]) == 5
