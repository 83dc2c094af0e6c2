"""Rejection sampling of trimmed batches on a GPU, with the patch: in bounds, and still the target's distribution."""

from __future__ import annotations

import math
import shutil
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.patches.release_process import answer, finish

COMPILED = (("TRITON_INTERPRET", "0"),)
UNCACHED = (*COMPILED, ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"))
SAMPLES = 600_000
AT_LEAST = 20_000

sampler_of_0_28 = partial(answer, "rejection_bounds", "0.28.0", settings=COMPILED)


def chi_square(counts: NDArray[Any], distribution: NDArray[Any]) -> float:
    expected = counts.sum() * distribution
    return float(((counts - expected) ** 2 / expected).sum())


def one_in_a_million(degrees: int) -> float:
    """The value that a chi-square of so many degrees exceeds once in a million (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.7534 * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("method", ["block", "standard"])
def test_the_target_distribution_is_kept(method):
    result = sampler_of_0_28("patched", "distribution", method, str(SAMPLES), "3")
    counts, target, draft = (np.array(result[name]) for name in ("counts", "target", "draft"))
    assert min(result["reached"]) >= AT_LEAST
    for position in range(len(target)):
        assert chi_square(counts[position], target[position]) < one_in_a_million(counts.shape[1] - 1)
    pairs = np.array(result["pairs"])
    assert chi_square(pairs.ravel(), np.outer(target[0], target[1]).ravel()) < one_in_a_million(pairs.size - 1)
    # The samples would tell a sampler that let the draft through.
    assert chi_square(counts[0], draft[0]) > 10 * one_in_a_million(counts.shape[1] - 1)


@pytest.mark.parametrize(("variant", "errors"), [("stock", True), ("patched", False)])
def test_the_sanitizer_sees_the_read_past_the_end(variant, errors):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    under = (sanitizer, "--tool", "memcheck", "--error-exitcode", "9")
    process = finish("rejection_bounds", "0.28.0", variant, "edge", settings=UNCACHED, under=under, timeout=400)
    if "Device not supported" in process.stdout:
        pytest.skip("compute-sanitizer does not support this device's driver")
    invalid_read = "Invalid __global__ read" in process.stdout
    assert invalid_read == errors, process.stdout[-3000:] + process.stderr[-2000:]
    assert process.returncode == (9 if errors else 0)
