"""Every switchable patch may be off in any combination, and the CPU engine still says the same."""

import itertools
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from patches.hardware import CPU
from patches.install import SWITCHED_OFF_VARIABLE, vllm_release
from patches.ledger import LEDGER

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

HERE_NEEDED = [patch for patch in LEDGER if CPU in patch.hardware and vllm_release() in patch.releases]
SWITCHABLE = [patch.id for patch in HERE_NEEDED if patch.switchable]
COMBINATIONS = [
    frozenset(off) for count in range(len(SWITCHABLE) + 1) for off in itertools.combinations(SWITCHABLE, count)
]


@cache
def answer(off: frozenset[str], telemetry_folder: str) -> dict:
    """What an engine of its own says with these patches off."""
    environment = os.environ | {
        SWITCHED_OFF_VARIABLE: ",".join(sorted(off)),
        "DSPARK_TELEMETRY_DIR": telemetry_folder,
        "PYTHONPATH": str(REPOSITORY),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, str(HERE / "greedy_engine.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"applied"')))


@pytest.mark.parametrize("off", [pytest.param(off, id="+".join(sorted(off)) or "all on") for off in COMBINATIONS])
def test_greedy_output_is_the_same_with_any_patches_off(off, tmp_path_factory):
    folder = str(tmp_path_factory.getbasetemp())
    got, all_on = answer(off, folder), answer(frozenset(), folder)
    assert set(got["applied"]) == {patch.id for patch in HERE_NEEDED} - off
    assert got["tokens"] == all_on["tokens"]
    assert len({token for tokens in got["tokens"] for token in tokens}) > 5, "the model must say something"
