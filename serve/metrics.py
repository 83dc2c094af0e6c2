"""`/metrics`: vLLM's own series untouched, and ours beside them.

Ours are read from the workers' counter files at every scrape (`patches.telemetry.counters`), which waits for nobody.
A source that fails is left out: `/metrics` never fails because one source did.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from patches.install import Installed
from patches.telemetry.counters import Snapshot, read_all
from serve.lifecycle import Lifecycle, State
from serve.profile import Verification

logger = logging.getLogger("dspark-serve")


@dataclass(frozen=True)
class Identity:
    """What this server is, for the info metrics and the status."""

    version: str
    verification: Verification
    patches: Installed


class ServerCollector(Collector):
    """State, mode and build: what the server knows by itself."""

    def __init__(self, lifecycle: Lifecycle, identity: Identity) -> None:
        self._lifecycle = lifecycle
        self._identity = identity

    def collect(self) -> Iterator[Metric]:
        """Series that exist in every state."""
        identity = self._identity
        state = GaugeMetricFamily("dspark_state", "1 for the state the server is in.", labels=["state"])
        for each in State:
            state.add_metric([each.value], float(each is self._lifecycle.state))
        yield state
        mode = GaugeMetricFamily("dspark_mode", "1 for the verification mode in force.", labels=["mode"])
        for verification in Verification:
            mode.add_metric([verification.value], float(verification is identity.verification))
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
        """Counters of every engine, labelled `engine` and `model_name`."""
        snapshots, model = list(read_all(self._directory)), self._model_name()
        if not snapshots or model is None:  # without a name yet, the series would change under a scraper
            return
        names = ["engine", "model_name"]
        proposed = CounterMetricFamily(
            "dspark_proposed_draft_tokens", "Drafts that were really drafted and scheduled.", labels=names
        )
        verified = CounterMetricFamily(
            "dspark_verified_draft_tokens", "Drafts that the budget admitted to verification.", labels=names
        )
        accepted = CounterMetricFamily(
            "dspark_accepted_draft_tokens", "Drafts that verification accepted.", labels=names
        )
        steps = CounterMetricFamily(
            "dspark_verification_steps", "Verification steps, by what the budget did.", labels=[*names, "plan"]
        )
        length = HistogramMetricFamily(
            "dspark_acceptance_length",
            "Accepted drafts and the bonus token, per request and verification step.",
            labels=names,
        )
        for snapshot in snapshots:
            labels = [str(snapshot.engine), model]
            proposed.add_metric(labels, snapshot.proposed)
            verified.add_metric(labels, snapshot.verified)
            accepted.add_metric(labels, snapshot.accepted)
            for plan, count in snapshot.steps.items():
                steps.add_metric([*labels, plan], count)
            buckets, total = length_buckets(snapshot)
            length.add_metric(labels, buckets, total)
        yield from (proposed, verified, accepted, steps, length)


def length_buckets(snapshot: Snapshot) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets `le` = 1 to K + 1 and infinity, and the sum of all acceptance lengths."""
    buckets: list[tuple[str, float]] = []
    seen, total = 0, 0
    for tokens, count in enumerate(snapshot.acceptance_lengths):
        seen += count
        total += tokens * count
        if tokens > 0:
            buckets.append((f"{float(tokens)}", seen))
    return [*buckets, ("+Inf", seen)], total


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


@dataclass(frozen=True)
class Totals:
    """Counters of all engines together, at one moment."""

    at: float
    requests: int
    proposed: int
    verified: int
    accepted: int


def totals(directory: Path, at: float) -> Totals:
    """Sum the counters of every engine."""
    snapshots = list(read_all(directory))
    return Totals(
        at=at,
        requests=sum(sum(s.acceptance_lengths) for s in snapshots),
        proposed=sum(s.proposed for s in snapshots),
        verified=sum(s.verified for s in snapshots),
        accepted=sum(s.accepted for s in snapshots),
    )


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
        requests = last.requests - first.requests
        verified, accepted = last.verified - first.verified, last.accepted - first.accepted
        return {
            "seconds": round(last.at - first.at, 1),
            "proposed": last.proposed - first.proposed,
            "verified": verified,
            "accepted": accepted,
            "accepted_per_verified": round(accepted / verified, 4) if verified else None,
            "mean_acceptance_length": round(1 + accepted / requests, 4) if requests else None,
        }
