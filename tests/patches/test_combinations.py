"""Switchable patches may be off in any combination, and the CPU engine still says the same.

A start of the engine takes half a minute, so not every combination is started: enough of them that any two patches
are seen both on, both off, and one on with the other off either way. Every run starts a sample of these.
"""

import itertools
import json
import math
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


def pairwise(ids: list[str]) -> list[frozenset[str]]:
    """What to switch off in each start; the first has everything on.

    With n more starts, each patch is off in a set of its own of n // 2 + 1 of them. Two such sets always meet, and
    none holds another. (Kleitman and Spencer, 1973: no fewer starts would do.)
    """
    starts = 1
    while math.comb(starts, starts // 2 + 1) < len(ids):
        starts += 1
    off_in = dict(zip(ids, itertools.combinations(range(starts), starts // 2 + 1), strict=False))
    return [frozenset(), *(frozenset(id for id in ids if start in off_in[id]) for start in range(starts))]


COMBINATIONS = pairwise(SWITCHABLE)


@pytest.mark.parametrize("count", range(2, 11))
def test_every_two_patches_meet_in_every_state(count):
    ids = [f"patch-{number}" for number in range(count)]
    for first, second in itertools.combinations(ids, 2):
        assert {(first in off, second in off) for off in pairwise(ids)} == set(
            itertools.product((True, False), repeat=2)
        )


@cache
def answer(off: frozenset[str], scheduling: str, telemetry_folder: str) -> dict:
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
        [sys.executable, str(HERE / "greedy_engine.py"), scheduling],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith('{"applied"')))


SAMPLE = 3
STARTS = [
    pytest.param(
        off,
        ("async", "sync")[number % 2],
        id="without " + ("+".join(sorted(off)) or "any"),
        marks=[pytest.mark.slow] * (number >= SAMPLE),
    )
    for number, off in enumerate(COMBINATIONS)
]
"""Each combination with one kind of scheduling; both occur."""


@pytest.mark.parametrize(("off", "scheduling"), STARTS)
def test_greedy_output_is_the_same_with_any_patches_off(off, scheduling, tmp_path_factory):
    folder = str(tmp_path_factory.getbasetemp())
    got, all_on = answer(off, scheduling, folder), answer(frozenset(), "async", folder)
    assert set(got["applied"]) == {patch.id for patch in HERE_NEEDED} - off
    assert got["tokens"] == all_on["tokens"]
    assert len({token for tokens in got["tokens"].values() for token in tokens}) > 5, "the model must say something"


@pytest.mark.parametrize(("off", "scheduling"), STARTS)
def test_budgets_read_the_right_record_through_reuse_abort_and_preemption(off, scheduling, tmp_path_factory):
    got = answer(off, scheduling, str(tmp_path_factory.getbasetemp()))
    assert got["seen"]["age"] == (1 if "unblocked-confidences" in off else 2)
    assert got["seen"]["wrong"] == 0
    assert min(got["seen"]["budgets"], got["seen"]["trimmed"], got["seen"]["reused"], got["preemptions"]) > 0


@pytest.mark.parametrize(("off", "scheduling"), STARTS)
def test_full_budgets_are_sampled_in_chunks(off, scheduling, tmp_path_factory):
    """That they are sampled right, the greedy output shows: where they are off, every batch is one chunk."""
    got = answer(off, scheduling, str(tmp_path_factory.getbasetemp()))
    assert (got["seen"]["chunked"] > 0) == ("chunked-full-budgets" not in off)
