"""The file of counters between an engine's worker and the server: fixed size, preallocated, mapped.

One worker (tensor-parallel rank 0) of every engine writes one file; the server reads all of them at a scrape. The
file is preallocated, since a write to a mapped hole of a full disk kills the writer with SIGBUS. Every value is a
64-bit integer. The writer makes the sequence number odd while it updates, so that a reader never takes half a step.

prometheus_client's multiprocess mode does this job for a whole process, and would change vLLM's own series.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DIRECTORY_VARIABLE = "DSPARK_TELEMETRY_DIR"

MAX_DRAFTS = 64
"""Longest draft a file has room for."""

PLANS = ("full", "trimmed", "none", "fixed")
"""What a verification step did with its drafts: took all, some, none; or took all because the mode is fixed."""

_MAGIC = 0x6473_7061_726B_0001
"""ASCII "dspark", then the layout's version."""

_MAGIC_AT, _SEQUENCE_AT, _DRAFTS_AT = 0, 1, 2
_PROPOSED_AT, _VERIFIED_AT, _ACCEPTED_AT = 8, 9, 10
_PLANS_AT = 16
_LENGTHS_AT = 32
_WORDS = _LENGTHS_AT + MAX_DRAFTS + 2
_BYTES = _WORDS * 8
_READ_ATTEMPTS = 100

_NAME = re.compile(r"engine-(\d+)\.counters")


class CountersError(ValueError):
    """A file is not a counter file of this layout."""


@dataclass(frozen=True)
class Snapshot:
    """The counters of one engine at one moment.

    Attributes:
        engine: Data-parallel rank.
        max_drafts: K, the drafts a request can have in a step.
        proposed: Drafts that were really drafted and scheduled.
        verified: Drafts that the budget admitted.
        accepted: Drafts that verification accepted.
        steps: Plan -> verification steps.
        acceptance_lengths: [K + 2] requests-and-steps by acceptance length (accepted drafts and the bonus token).
    """

    engine: int
    max_drafts: int
    proposed: int
    verified: int
    accepted: int
    steps: dict[str, int]
    acceptance_lengths: tuple[int, ...]


def counter_file(directory: Path, engine: int) -> Path:
    """Where an engine's counters lie."""
    return directory / f"engine-{engine}.counters"


class CounterWriter:
    """Adds whole verification steps to an engine's file. One writer a file."""

    def __init__(self, directory: Path, engine: int, max_drafts: int) -> None:
        """Create the file, zeroed and with all its blocks.

        Raises:
            CountersError: `max_drafts` does not fit.
            OSError: the directory is missing or full.
        """
        if not 0 < max_drafts <= MAX_DRAFTS:
            raise CountersError(f"a draft of {max_drafts} tokens does not fit: 1 to {MAX_DRAFTS} do")
        path = counter_file(directory, engine)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, _BYTES)
            self._map = mmap.mmap(file, _BYTES)
        finally:
            os.close(file)
        self._words: NDArray[np.int64] = np.frombuffer(self._map, dtype=np.int64)
        self._words[_DRAFTS_AT] = max_drafts
        self._words[_MAGIC_AT] = _MAGIC

    def add_step(self, *, plan: str, proposed: int, verified: int, acceptance_lengths: NDArray[np.integer]) -> None:
        """Count one verification step.

        Args:
            plan: One of `PLANS`.
            proposed: Drafts really drafted for the step's requests.
            verified: Drafts that the budget admitted.
            acceptance_lengths: [requests with drafts] accepted drafts and the bonus token of each.
        """
        words = self._words
        by_length = np.bincount(acceptance_lengths, minlength=1)
        words[_SEQUENCE_AT] += 1
        words[_PROPOSED_AT] += proposed
        words[_VERIFIED_AT] += verified
        words[_ACCEPTED_AT] += int(acceptance_lengths.sum()) - acceptance_lengths.size
        words[_PLANS_AT + PLANS.index(plan)] += 1
        words[_LENGTHS_AT : _LENGTHS_AT + by_length.size] += by_length
        words[_SEQUENCE_AT] += 1


def read(path: Path) -> Snapshot:
    """A consistent snapshot of one file.

    Raises:
        CountersError: it is no counter file, or its writer stopped in the middle of a step.
        OSError: it cannot be read.
    """
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise CountersError(f"{path.name} is not named like a counter file")
    file = os.open(path, os.O_RDONLY)
    try:
        for _ in range(_READ_ATTEMPTS):
            content = os.pread(file, _BYTES, 0)
            words = np.frombuffer(content, dtype=np.int64) if len(content) == _BYTES else None
            if words is None or words[_MAGIC_AT] != _MAGIC:
                raise CountersError(f"{path.name} is not a counter file of this version")
            after = int.from_bytes(os.pread(file, 8, _SEQUENCE_AT * 8), "little")
            if words[_SEQUENCE_AT] == after and after % 2 == 0:
                return _snapshot(int(named[1]), words)
    finally:
        os.close(file)
    raise CountersError(f"{path.name} is held in the middle of a step")


def read_all(directory: Path) -> Iterator[Snapshot]:
    """A snapshot of every engine's file that can be read; the others are left out."""
    for path in sorted(directory.glob("engine-*.counters")):
        try:
            yield read(path)
        except (OSError, CountersError):
            continue


def _snapshot(engine: int, words: NDArray[np.int64]) -> Snapshot:
    max_drafts = int(words[_DRAFTS_AT])
    return Snapshot(
        engine=engine,
        max_drafts=max_drafts,
        proposed=int(words[_PROPOSED_AT]),
        verified=int(words[_VERIFIED_AT]),
        accepted=int(words[_ACCEPTED_AT]),
        steps={plan: int(words[_PLANS_AT + i]) for i, plan in enumerate(PLANS)},
        acceptance_lengths=tuple(words[_LENGTHS_AT : _LENGTHS_AT + max_drafts + 2].tolist()),
    )
