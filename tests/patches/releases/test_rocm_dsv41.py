"""rocm-dsv41-adaptive, asked of the classes that 0.30.0, 0.31.0 and 0.32.0 ship."""

from __future__ import annotations

from typing import Any

import pytest

from tests.patches.release_process import answer, answers

pytestmark = pytest.mark.parametrize("release", ["0.30.0", "0.31.0", "0.32.0"])

ADAPTIVE = ("adaptive", "adaptive_1")
NOT_ADAPTIVE = ("fixed", "fixed_1", "plain")
TASKS = ("facts", "metadata 1 0 100", "metadata 5 0 100")


def ask(release: str, variant: str, task: str = "facts") -> Any:
    """One process answers everything."""
    return answers("rocm_dsv41", release, variant, tasks=TASKS)[task]


def test_upstream_keeps_v41_out(release):
    stock = ask(release, "stock")
    assert stock["mismatch"]["DeepseekV41IndexerBackend"] is False
    for part in ("mla", "swa"):
        assert [stock[part][mode] for mode in ADAPTIVE] == ["UNIFORM_BATCH"] * 2
    assert stock["flattening"]["adaptive_1"] is False
    assert stock["indexer"]["adaptive_1"] == "UNIFORM_BATCH"


def test_with_the_patch_every_backend_takes_device_boundaries(release):
    patched = ask(release, "patched")
    backends = patched["mismatch"]
    for backend in (
        "DeepseekV41IndexerBackend",
        "DeepseekV4ROCMAiterMLASparseBackend",
        "DeepseekV41ROCMAiterSparseSWABackend",
    ):
        assert backends[backend] is True
    for part in ("indexer", "mla", "swa"):
        assert [patched[part][mode] for mode in ADAPTIVE] == ["ALWAYS"] * 2
    assert [patched["flattening"][mode] for mode in ADAPTIVE] == [True, True]


def test_a_fixed_k_keeps_upstreams_answers(release):
    stock, patched = ask(release, "stock"), ask(release, "patched")
    for part in ("indexer", "mla", "swa", "flattening"):
        for mode in NOT_ADAPTIVE:
            assert patched[part][mode] == stock[part][mode]


def test_nothing_else_is_opted_in(release):
    stock, patched = ask(release, "stock"), ask(release, "patched")
    assert patched["builder_is_the_shared_one"]
    assert patched["shared_builder"] == stock["shared_builder"] == "UNIFORM_BATCH"
    assert patched["flattening_of_another_model"] is False
    assert patched["mismatch"]["DeepseekV32IndexerBackend"] == stock["mismatch"]["DeepseekV32IndexerBackend"]
    assert patched["mismatch_off_rocm"] == stock["mismatch_off_rocm"] is False


@pytest.mark.parametrize("task", TASKS[1:])
def test_metadata_follows_the_devices_boundaries(release, task):
    found = ask(release, "patched", task)
    assert (found["first"], found["wrong"]) == ([], 0)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["1", "5"])
def test_metadata_follows_the_devices_boundaries_in_1000_batches(release, drafts):
    found = answer("rocm_dsv41", release, "patched", "metadata", drafts, "0", "1000")
    assert (found["first"], found["wrong"]) == ([], 0)


def test_upstream_would_not_build_a_row_a_token(release):
    """With one draft nothing forces it: two tokens go to the native path, sorted by the host's lengths."""
    assert ask(release, "stock", "metadata 1 0 100")["wrong"] > 0
