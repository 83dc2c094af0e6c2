"""What each tensor-parallel rank decided, step by step, in a file of its own; and where two of them differ.

A row holds int64: requests of the batch, a checksum of their ids, drafts that could be verified, the budget; then where
each request's logits end and where its tokens end, [max requests + 1] each.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

REQUESTS, BATCH, ELIGIBLE, BUDGET, BOUNDARIES = range(5)
"""Columns; the last is the first of the boundaries."""


def width(max_requests: int) -> int:
    return BOUNDARIES + 2 * (max_requests + 1)


def checksum(request_ids: Iterable[str]) -> int:
    return zlib.crc32("\n".join(request_ids).encode())


def record_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.steps"


def read(folder: Path, rank: int, max_requests: int) -> NDArray[np.int64]:
    """[steps, width] the whole rows that the rank has written."""
    path, columns = record_file(folder, rank), width(max_requests)
    values = np.fromfile(path, dtype=np.int64) if path.exists() else np.zeros(0, dtype=np.int64)
    return values[: values.size // columns * columns].reshape(-1, columns)


@dataclass(frozen=True)
class Comparison:
    """Two ranks' records, side by side.

    Attributes:
        steps: Steps that both recorded: those that were compared.
        batches: Steps whose requests differ: the ranks were not given the same work, or one lost its way before.
        budgets: Steps whose budgets differ.
        boundaries: Steps whose boundaries differ.
        first: The first step that differs in anything; None where none does.
        trimmed: Steps of the first rank whose budget bound. The others' boundaries follow from the batch.
        distinct_budgets: Different budgets of the first rank: steps that are all alike would prove little.
    """

    steps: int
    batches: int
    budgets: int
    boundaries: int
    first: int | None
    trimmed: int
    distinct_budgets: int


def compare(one: NDArray[np.int64], other: NDArray[np.int64]) -> Comparison:
    """Compare the records of two ranks, [steps, width] each; what only one has recorded yet is left out."""
    steps = min(len(one), len(other))
    one, other = one[:steps], other[:steps]
    differs = one != other
    anywhere = np.flatnonzero(differs.any(axis=1))
    return Comparison(
        steps=steps,
        batches=int(differs[:, [REQUESTS, BATCH, ELIGIBLE]].any(axis=1).sum()),
        budgets=int(differs[:, BUDGET].sum()),
        boundaries=int(differs[:, BOUNDARIES:].any(axis=1).sum()),
        first=int(anywhere[0]) if anywhere.size else None,
        trimmed=int(((one[:, BUDGET] > 0) & (one[:, BUDGET] < one[:, ELIGIBLE])).sum()),
        distinct_budgets=int(np.unique(one[:, BUDGET]).size),
    )
