"""`/metrics`: vLLM's own series untouched, and ours beside them.

Ours are read from the workers' counter files at every scrape (`patches.telemetry.counters`), which waits for nobody.
A source that fails is left out: `/metrics` never fails because one source did.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from patches.calibration.mode import CalibrationMode
from patches.install import Installed
from patches.telemetry.counters import SECONDS_BOUNDS, Snapshot, read_all
from patches.telemetry.tally import BINS
from serve.lifecycle import Lifecycle, State
from serve.modes import ModeSwitch
from serve.profile import Verification
from serve.totals import Totals, acceptance_length

logger = logging.getLogger("dspark-serve")


@dataclass(frozen=True)
class Identity:
    """What this server is, for the info metrics and the status."""

    version: str
    verification: Verification
    calibration: CalibrationMode
    patches: Installed


class ServerCollector(Collector):
    """State, mode and build: what the server knows by itself."""

    def __init__(self, lifecycle: Lifecycle, identity: Identity, modes: ModeSwitch) -> None:
        self._lifecycle = lifecycle
        self._identity = identity
        self._modes = modes

    def collect(self) -> Iterator[Metric]:
        """Series that exist in every state."""
        identity = self._identity
        state = GaugeMetricFamily("dspark_state", "1 for the state the server is in.", labels=["state"])
        for each in State:
            state.add_metric([each.value], float(each is self._lifecycle.state))
        yield state
        if self._modes.told:
            mode = GaugeMetricFamily(
                "dspark_mode",
                "1 for the verification mode in force on every engine, and for none while they differ.",
                labels=["mode"],
            )
            for verification in Verification:
                mode.add_metric([verification.value], float(verification.value == self._modes.current))
            yield mode
        configured = GaugeMetricFamily(
            "dspark_configured_mode", "1 for the verification mode that the server was started with.", labels=["mode"]
        )
        for verification in Verification:
            configured.add_metric([verification.value], float(verification is identity.verification))
        yield configured
        yield InfoMetricFamily(
            "dspark_build",
            "What this server was built from.",
            value={
                "version": identity.version,
                "vllm_version": identity.patches.release,
                "hardware": identity.patches.hardware,
                "patchset": identity.patches.digest,
            },
        )
        patches = InfoMetricFamily("dspark_patch", "What became of each patch.", labels=["id", "status"])
        for decision in identity.patches.decisions:
            patches.add_metric([decision.patch.id, decision.status.value], {})
        yield patches


class VerificationCollector(Collector):
    """What the workers verified. Absent without speculation: no worker writes counters then."""

    def __init__(self, directory: Path, model_name: Callable[[], str | None]) -> None:
        self._directory = directory
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Series of every engine, labelled `engine` and `model_name`; positions count from 0."""
        snapshots, model = list(read_all(self._directory)), self._model_name()
        if not snapshots or model is None:  # without a name yet, the series would change under a scraper
            return
        labelled = [([str(snapshot.engine), model], snapshot) for snapshot in snapshots]
        yield from _counts(labelled)
        yield from _lengths(labelled)
        yield from _predictions([(labels, s) for labels, s in labelled if s.expected is not None])
        yield from _times(labelled)
        yield from _temperatures([(labels, s) for labels, s in labelled if s.temperatures is not None])


Labelled = Sequence[tuple[list[str], Snapshot]]
"""Snapshots with the values of `_LABELS`."""

_LABELS = ("engine", "model_name")


def _counts(snapshots: Labelled) -> Iterator[Metric]:
    proposed = CounterMetricFamily(
        "dspark_proposed_draft_tokens",
        "Drafts that were really drafted and scheduled.",
        labels=(*_LABELS, "position"),
    )
    verified = CounterMetricFamily(
        "dspark_verified_draft_tokens",
        "Drafts that the budget admitted to verification.",
        labels=(*_LABELS, "position"),
    )
    accepted = CounterMetricFamily(
        "dspark_accepted_draft_tokens", "Drafts that verification accepted.", labels=(*_LABELS, "position")
    )
    steps = CounterMetricFamily(
        "dspark_verification_steps", "Verification steps, by what the budget did.", labels=(*_LABELS, "plan")
    )
    for labels, snapshot in snapshots:
        _add_each(proposed, labels, snapshot.proposed)
        _add_each(verified, labels, snapshot.verified)
        _add_each(accepted, labels, snapshot.accepted)
        for plan, count in snapshot.steps.items():
            steps.add_metric([*labels, plan], count)
    yield from (proposed, verified, accepted, steps)


def _lengths(snapshots: Labelled) -> Iterator[Metric]:
    acceptance = HistogramMetricFamily(
        "dspark_acceptance_length",
        "Accepted drafts and the bonus token, per request and verification step.",
        labels=_LABELS,
    )
    verified = HistogramMetricFamily(
        "dspark_verified_length",
        "Verified drafts and the bonus token, per request and verification step.",
        labels=_LABELS,
    )
    for labels, snapshot in snapshots:
        acceptance.add_metric(labels, *length_buckets(snapshot.acceptance_lengths))
        verified.add_metric(labels, *length_buckets(snapshot.verified_lengths))
    yield from (acceptance, verified)


def _predictions(snapshots: Labelled) -> Iterator[Metric]:
    """What was predicted; nothing where nothing predicts, as with fixed verification."""
    expected = CounterMetricFamily(
        "dspark_expected_accepted_draft_tokens",
        "Sum of the predicted survival of the verified drafts.",
        labels=(*_LABELS, "position"),
    )
    predictions = CounterMetricFamily(
        "dspark_confidence_predictions",
        "Verified drafts whose predecessors were all accepted, by confidence.",
        labels=(*_LABELS, "bin"),
    )
    accepted = CounterMetricFamily(
        "dspark_confidence_accepted", "Those of them that were accepted, by confidence.", labels=(*_LABELS, "bin")
    )
    seconds = CounterMetricFamily(
        "dspark_step_predicted_seconds",
        "What the cost tables say of the steps in dspark_step_seconds, both phases together.",
        labels=_LABELS,
    )
    for labels, snapshot in snapshots:
        _add_each(expected, labels, snapshot.expected or ())
        for family, counts in ((predictions, snapshot.bin_predictions), (accepted, snapshot.bin_accepted)):
            for name, count in zip(BIN_NAMES, counts or (), strict=True):
                family.add_metric([*labels, name], count)
        seconds.add_metric(labels, snapshot.predicted_seconds or 0.0)
    if snapshots:
        yield from (expected, predictions, accepted, seconds)


def _times(snapshots: Labelled) -> Iterator[Metric]:
    family = HistogramMetricFamily(
        "dspark_step_seconds",
        "Time of the target's forward pass and of the drafter, in every sixteenth verification step.",
        labels=(*_LABELS, "phase"),
    )
    for labels, snapshot in snapshots:
        for phase, seconds in snapshot.step_seconds.items():
            reached = list(accumulate(seconds.counts))
            bounds = [*map(str, SECONDS_BOUNDS), "+Inf"]
            family.add_metric([*labels, phase], list(zip(bounds, reached, strict=True)), seconds.total)
    yield family


def _temperatures(snapshots: Labelled) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "dspark_calibration_temperature",
        "Fitted temperature of the confidences; above 1 where they are too sure of themselves.",
        labels=(*_LABELS, "position"),
    )
    for labels, snapshot in snapshots:
        _add_each(family, labels, snapshot.temperatures or ())
    if snapshots:
        yield family


BIN_NAMES = tuple(f"{i / BINS:.1f}-{(i + 1) / BINS:.1f}" for i in range(BINS))
"""Values of the label `bin`: the interval of confidence, its upper end not included except in the last."""


def _add_each(family: CounterMetricFamily | GaugeMetricFamily, labels: list[str], by_position: Sequence[float]) -> None:
    for position, value in enumerate(by_position):
        family.add_metric([*labels, str(position)], value)


def length_buckets(requests_by_length: Sequence[int]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets `le` = 1 to K + 1 and infinity, and the sum of all lengths.

    Args:
        requests_by_length: [K + 2] how many have each length.
    """
    reached = list(accumulate(requests_by_length))
    total = sum(length * count for length, count in enumerate(requests_by_length))
    buckets = [(f"{float(length)}", float(count)) for length, count in enumerate(reached) if length > 0]
    return [*buckets, ("+Inf", float(reached[-1]))], float(total)


class Combined:
    """Several sources as one registry for an exposition encoder; a source that raises is left out."""

    def __init__(self, *sources: Collector) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        """Every metric of every source that answers."""
        for source in self._sources:
            try:
                metrics = list(source.collect())
            except Exception:
                logger.exception("a metrics source failed and was left out")
                continue
            yield from metrics


class RecentAcceptance:
    """Acceptance over the last minute, from totals that are noted every few seconds."""

    def __init__(self, window_seconds: float = 60.0) -> None:
        self._window = window_seconds
        self._noted: deque[Totals] = deque()

    def note(self, now: Totals) -> None:
        """Remember totals; forget what lies before the window, except the last of it."""
        self._noted.append(now)
        while len(self._noted) > 1 and self._noted[1].at <= now.at - self._window:
            self._noted.popleft()

    def summary(self) -> dict[str, float | int | None]:
        """Tokens in the window, and ratios that are None while nothing was verified."""
        if not self._noted:
            return {}
        first, last = self._noted[0], self._noted[-1]
        verified, accepted = last.verified - first.verified, last.accepted - first.accepted
        return {
            "seconds": round(last.at - first.at, 1),
            "proposed": last.proposed - first.proposed,
            "verified": verified,
            "accepted": accepted,
            "accepted_per_verified": round(accepted / verified, 4) if verified else None,
            "mean_acceptance_length": acceptance_length(first, last),
        }
