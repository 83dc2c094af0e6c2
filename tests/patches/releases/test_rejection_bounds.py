"""block-rejection-bounds, against the sampler of every release that needs it."""

from __future__ import annotations

import signal

import pytest

from tests.patches.release_process import answer, finish

RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0")


@pytest.mark.parametrize("release", RELEASES)
def test_upstream_reads_past_the_last_row(release):
    """With a guard page behind the last row, the process dies of it."""
    process = finish("rejection_bounds", release, "stock", "edge")
    assert process.returncode == -signal.SIGSEGV, process.stderr[-3000:]


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_patch_it_does_not(release):
    assert answer("rejection_bounds", release, "patched", "edge") == "survived"


@pytest.mark.parametrize("release", RELEASES)
def test_every_module_that_names_the_sampler_has_the_patched_one(release):
    bindings = answer("rejection_bounds", release, "patched", "bindings")
    assert bindings
    assert all(bindings.values()), bindings


def test_what_is_sampled_stays_the_same():
    arguments = ("outputs", "0", "60")
    patched = answer("rejection_bounds", "0.31.0", "patched", *arguments)
    assert patched == answer("rejection_bounds", "0.31.0", "stock", *arguments)
