"""ragged-metadata-kernel, against the indexer of every release, as on both kinds of GPU."""

from __future__ import annotations

from typing import Any

import pytest

from patches.hardware import CUDA_HOPPER, ROCM_GFX950
from patches.ledger import LEDGER
from tests.patches.release_process import answer, answers

PATCH = "ragged-metadata-kernel"
ADAPTIVE, FIXED = TASKS = ("adaptive 0 60", "fixed 1 40")


def beside(release: str, hardware: str) -> str:
    """The patch with every other of that release and hardware that touches the same symbol, in the ledger's order."""
    symbols = {s for patch in LEDGER if patch.id == PATCH for s in patch.symbols}
    ids = [
        patch.id
        for patch in LEDGER
        if hardware in patch.hardware and release in patch.releases and symbols & set(patch.symbols_of(release))
    ]
    assert PATCH in ids
    return ",".join(ids)


def patched(release: str, hardware: str) -> dict[str, Any]:
    return answers("ragged_metadata", release, hardware, beside(release, hardware), tasks=TASKS)


@pytest.mark.parametrize("hardware", [CUDA_HOPPER, ROCM_GFX950])
def test_rows_equal_the_reference_and_stay_where_they_are(release, hardware):
    found = patched(release, hardware)[ADAPTIVE]
    assert (found["first"], found["wrong"], found["moved"]) == ([], 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("hardware", [CUDA_HOPPER, ROCM_GFX950])
def test_rows_equal_the_reference_in_1000_batches(release, hardware):
    found = answer("ragged_metadata", release, hardware, beside(release, hardware), "adaptive", "0", "1000")
    assert (found["first"], found["wrong"], found["moved"]) == ([], 0, 0)


def test_fixed_verification_keeps_upstreams_metadata(release):
    upstream = answer("ragged_metadata", release, CUDA_HOPPER, "none", *FIXED.split())
    assert patched(release, CUDA_HOPPER)[FIXED]["digest"] == upstream["digest"]


def test_the_reference_tells_requests_apart():
    """0.28.0 without any patch takes its even path for what looks even on the host."""
    assert answer("ragged_metadata", "0.28.0", CUDA_HOPPER, "none", "adaptive", "0", "150")["wrong"] > 0
