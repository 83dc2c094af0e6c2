"""The file of counters between an engine's worker and the server: fixed size, preallocated, mapped.

One worker (tensor-parallel rank 0) of every engine writes one file; the server reads all of them at a scrape. The
file is preallocated, since a write to a mapped hole of a full disk kills the writer with SIGBUS. Every value is 64
bits wide. The writer makes the sequence number odd while it updates, so that a reader never takes half a step.

prometheus_client's multiprocess mode does this job for a whole process, and would change vLLM's own series.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from patches.telemetry.tally import BINS, StepCounts

DIRECTORY_VARIABLE = "DSPARK_TELEMETRY_DIR"

MAX_DRAFTS = 64
"""Longest draft a file has room for."""

PLANS = ("full", "trimmed", "none", "fixed")
"""What a verification step did with its drafts: took all, some, none; or took all because the mode is fixed."""

PHASES = ("verify", "draft")
"""The timed parts of a step."""

SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the histograms of seconds."""

LAST_STEPS = 8
"""Steps that are kept one by one, for whoever asks what happened last."""

_MAGIC = 0x6473_7061_726B_0003
"""ASCII "dspark", then the layout's version."""

_LAYOUT = np.dtype(
    [
        ("magic", np.int64),
        ("sequence", np.int64),
        ("max_drafts", np.int64),
        ("predicts", np.int64),
        ("calibrates", np.int64),
        ("proposed", np.int64, (MAX_DRAFTS,)),
        ("verified", np.int64, (MAX_DRAFTS,)),
        ("accepted", np.int64, (MAX_DRAFTS,)),
        ("expected", np.float64, (MAX_DRAFTS,)),
        ("plans", np.int64, (len(PLANS),)),
        ("acceptance_lengths", np.int64, (MAX_DRAFTS + 2,)),
        ("verified_lengths", np.int64, (MAX_DRAFTS + 2,)),
        ("bin_predictions", np.int64, (BINS,)),
        ("bin_accepted", np.int64, (BINS,)),
        ("timed", np.int64, (len(PHASES), len(SECONDS_BOUNDS) + 1)),
        ("seconds", np.float64, (len(PHASES),)),
        ("predicted_seconds", np.float64),
        ("temperatures", np.float64, (MAX_DRAFTS,)),
        ("last_proposed", np.int64, (LAST_STEPS,)),
        ("last_verified", np.int64, (LAST_STEPS,)),
    ]
)
_BYTES = _LAYOUT.itemsize
_SEQUENCE_AT = 8
_READ_ATTEMPTS = 100

_NAME = re.compile(r"engine-(\d+)\.counters")


class CountersError(ValueError):
    """A file is not a counter file of this layout."""


@dataclass(frozen=True)
class Seconds:
    """A histogram of seconds.

    Attributes:
        counts: Observations up to each of `SECONDS_BOUNDS` and above the one before; the last beyond all of them.
        total: Sum of the observations.
    """

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True)
class Snapshot:
    """The counters of one engine at one moment. Positions count from 0.

    Attributes:
        engine: Data-parallel rank.
        max_drafts: K, the drafts a request can have in a step.
        proposed: [K] drafts that were really drafted and scheduled, by position.
        verified: [K] drafts that the budget admitted, by position.
        accepted: [K] drafts that verification accepted, by position.
        expected: [K] sum of the predicted survival of the verified drafts; None where nothing predicts.
        steps: Plan -> verification steps.
        acceptance_lengths: [K + 2] requests-and-steps by acceptance length (accepted drafts and the bonus token).
        verified_lengths: [K + 2] requests-and-steps by verified width (verified drafts and the bonus token).
        bin_predictions: [BINS] drafts by confidence whose outcome is known; None where nothing predicts.
        bin_accepted: [BINS] those of them that were accepted.
        step_seconds: Phase -> how long it took, in the steps that were timed.
        predicted_seconds: What the cost tables said of the same steps, both phases; None without cost tables.
        temperatures: [K] fitted temperatures by position; None without a fit.
        last_budgets: (proposed, verified) drafts of the last steps, at most `LAST_STEPS`, the newest last.
    """

    engine: int
    max_drafts: int
    proposed: tuple[int, ...]
    verified: tuple[int, ...]
    accepted: tuple[int, ...]
    expected: tuple[float, ...] | None
    steps: dict[str, int]
    acceptance_lengths: tuple[int, ...]
    verified_lengths: tuple[int, ...]
    bin_predictions: tuple[int, ...] | None
    bin_accepted: tuple[int, ...] | None
    step_seconds: dict[str, Seconds]
    predicted_seconds: float | None
    temperatures: tuple[float, ...] | None
    last_budgets: tuple[tuple[int, int], ...]


def counter_file(directory: Path, engine: int) -> Path:
    """Where an engine's counters lie."""
    return directory / f"engine-{engine}.counters"


class CounterWriter:
    """Adds whole verification steps to an engine's file. One writer a file."""

    def __init__(
        self, directory: Path, engine: int, max_drafts: int, *, predicts: bool = False, calibrates: bool = False
    ) -> None:
        """Create the file, zeroed and with all its blocks.

        Args:
            directory: Where the server reads.
            engine: Data-parallel rank.
            max_drafts: K.
            predicts: Acceptance is predicted and steps have a predicted cost.
            calibrates: Temperatures are fitted.

        Raises:
            CountersError: `max_drafts` does not fit.
            OSError: the directory is missing or full.
        """
        if not 0 < max_drafts <= MAX_DRAFTS:
            raise CountersError(f"a draft of {max_drafts} tokens does not fit: 1 to {MAX_DRAFTS} do")
        self.path = counter_file(directory, engine)
        self.path.unlink(missing_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, _BYTES)
            self._map = mmap.mmap(file, _BYTES)
        finally:
            os.close(file)
        self.max_drafts = max_drafts
        self._fields = _fields(self._map)
        self._fields["max_drafts"][0] = max_drafts
        self._fields["predicts"][0] = predicts
        self._fields["calibrates"][0] = calibrates
        self._fields["temperatures"][:] = 1.0
        self._fields["magic"][0] = _MAGIC

    def add_step(self, counts: StepCounts) -> None:
        """Count one verification step."""
        fields, drafts = self._fields, self.max_drafts
        slot = int(fields["plans"].sum()) % LAST_STEPS
        with self._update():
            fields["last_proposed"][slot] = counts.proposed.sum()
            fields["last_verified"][slot] = counts.verified.sum()
            fields["proposed"][:drafts] += counts.proposed
            fields["verified"][:drafts] += counts.verified
            fields["accepted"][:drafts] += counts.accepted
            fields["plans"][PLANS.index(counts.plan)] += 1
            fields["acceptance_lengths"][: drafts + 2] += counts.acceptance_lengths
            fields["verified_lengths"][: drafts + 2] += counts.verified_lengths
            if counts.reliability is not None:
                fields["expected"][:drafts] += counts.reliability.expected
                fields["bin_predictions"][:] += counts.reliability.predictions
                fields["bin_accepted"][:] += counts.reliability.accepted

    def add_times(self, seconds: Mapping[str, float], predicted: float | None) -> None:
        """Count the duration of one step.

        Args:
            seconds: Each of `PHASES` -> seconds it took.
            predicted: What the cost tables say of both together.
        """
        with self._update():
            for i, phase in enumerate(PHASES):
                self._fields["timed"][i, np.searchsorted(SECONDS_BOUNDS, seconds[phase])] += 1
                self._fields["seconds"][i] += seconds[phase]
            if predicted is not None:
                self._fields["predicted_seconds"][0] += predicted

    def set_temperatures(self, temperatures: NDArray[np.float64]) -> None:
        """Report the fitted temperatures [K]."""
        with self._update():
            self._fields["temperatures"][: self.max_drafts] = temperatures

    def withdraw(self) -> None:
        """Remove the file: counters that no longer move would be read as a server at rest."""
        self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _update(self) -> Iterator[None]:
        self._fields["sequence"][0] += 1
        yield
        self._fields["sequence"][0] += 1


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
            fields = _fields(content) if len(content) == _BYTES else None
            if fields is None or fields["magic"][0] != _MAGIC:
                raise CountersError(f"{path.name} is not a counter file of this version")
            after = int.from_bytes(os.pread(file, 8, _SEQUENCE_AT), "little")
            if fields["sequence"][0] == after and after % 2 == 0:
                return _snapshot(int(named[1]), fields)
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


def _fields(memory: bytes | mmap.mmap) -> dict[str, NDArray[Any]]:
    """A view of every field, at least one-dimensional, so that it is written in place."""
    record = np.frombuffer(memory, dtype=_LAYOUT)
    return {name: record[name] if record[name].ndim == 1 else record[name][0] for name in _LAYOUT.names or ()}


def _snapshot(engine: int, fields: Mapping[str, NDArray[Any]]) -> Snapshot:
    drafts = int(fields["max_drafts"][0])
    predicts = bool(fields["predicts"][0])

    def first(name: str, count: int) -> tuple[Any, ...]:
        return tuple(fields[name][:count].tolist())

    return Snapshot(
        engine=engine,
        max_drafts=drafts,
        proposed=first("proposed", drafts),
        verified=first("verified", drafts),
        accepted=first("accepted", drafts),
        expected=first("expected", drafts) if predicts else None,
        steps=dict(zip(PLANS, fields["plans"].tolist(), strict=True)),
        acceptance_lengths=first("acceptance_lengths", drafts + 2),
        verified_lengths=first("verified_lengths", drafts + 2),
        bin_predictions=first("bin_predictions", BINS) if predicts else None,
        bin_accepted=first("bin_accepted", BINS) if predicts else None,
        step_seconds={
            phase: Seconds(tuple(fields["timed"][i].tolist()), float(fields["seconds"][i]))
            for i, phase in enumerate(PHASES)
        },
        predicted_seconds=float(fields["predicted_seconds"][0]) if predicts else None,
        temperatures=first("temperatures", drafts) if fields["calibrates"][0] else None,
        last_budgets=_last_budgets(fields),
    )


def _last_budgets(fields: Mapping[str, NDArray[Any]]) -> tuple[tuple[int, int], ...]:
    steps = int(fields["plans"].sum())
    kept = (number % LAST_STEPS for number in range(max(steps - LAST_STEPS, 0), steps))
    return tuple((int(fields["last_proposed"][slot]), int(fields["last_verified"][slot])) for slot in kept)
