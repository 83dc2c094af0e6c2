"""Random confidences, and which drafts a budget must admit: sorted one by one, in Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def random_confidences(rng: np.random.Generator, slots: int, steps: int) -> NDArray[np.float32]:
    """Smooth, coarse (full of ties, products exact), saturated, or close to each other."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.random((slots, steps), dtype=np.float32)
    if kind == 1:
        return (rng.integers(0, 5, (slots, steps)) / 4).astype(np.float32)
    if kind == 2:
        return np.where(rng.random((slots, steps)) < 0.5, 1.0, rng.random((slots, steps))).astype(np.float32)
    return (0.9 + rng.integers(0, 3, (slots, steps)) * 2.0**-24).astype(np.float32)


def survivals(confidences: NDArray[np.float32]) -> NDArray[np.float32]:
    """[requests, steps] products in float32, from the first position on."""
    product: NDArray[np.float32] = np.multiply.accumulate(confidences, axis=1)
    return product


def best(survival: NDArray[np.float32], drafts: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """[requests] drafts of each among the `budget` best, the earlier request and position first among equals."""
    ranked = sorted((-survival[r, s], r, s) for r in range(len(drafts)) for s in range(drafts[r]))
    return np.bincount([r for _, r, _ in ranked[:budget]], minlength=len(drafts)).astype(np.int32)


def ends(counts: NDArray[np.int32]) -> list[int]:
    """0 and the running sums."""
    return [0, *np.cumsum(counts).tolist()]


def random_batch(rng: np.random.Generator, slots: int, steps: int, requests: int) -> NDArray[np.int32]:
    """[3, requests] slots, drafts and other tokens, as `Ranking.allot` takes them."""
    return np.stack(
        (rng.permutation(slots)[:requests], rng.integers(0, steps + 1, requests), rng.integers(1, 9, requests))
    ).astype(np.int32)
