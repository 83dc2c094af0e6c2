"""block-rejection-bounds, against the sampler of every release that needs it."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.patches.release_process import answer, answers, finish

OUTPUTS = "outputs 0 60"
of_each = pytest.mark.parametrize("release", ["0.28.0", "0.29.0", "0.30.0", "0.31.0"])


def patched(release: str) -> dict[str, Any]:
    return answers("rejection_bounds", release, "patched", tasks=("edge", "bindings", OUTPUTS))


@of_each
def test_upstream_reads_past_the_last_row(release):
    """With a guard page behind the last row, the process dies of it."""
    process = finish("rejection_bounds", release, "stock", "edge")
    assert process.returncode == -signal.SIGSEGV, process.stderr[-3000:]


@of_each
def test_with_the_patch_it_does_not(release):
    assert patched(release)["edge"] == "survived"


@of_each
def test_every_module_that_names_the_sampler_has_the_patched_one(release):
    bindings = patched(release)["bindings"]
    assert bindings
    assert all(bindings.values()), bindings


def test_what_is_sampled_stays_the_same():
    assert patched("0.31.0")[OUTPUTS] == answer("rejection_bounds", "0.31.0", "stock", *OUTPUTS.split())
