"""The fit of the temperatures, and what it is worth: serving simulated with the real planning and the real stage.

A simulated head knows each draft's true probability of acceptance. Multiplying its log-odds makes it too sure of itself
(x2) or too timid (x0.5). Requests, probabilities and outcomes are the same whichever head serves them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from patches.budget import CostTables, choose_budget, survival_probabilities
from patches.calibration import fit
from patches.calibration.fit import TemperatureFit, log_odds_of
from patches.calibration.mode import VARIABLE, CalibrationMode, chosen_mode
from patches.calibration.stage import Calibration, begin_calibration
from patches.cpu.costs import DRAFT_CURVE_MS, VERIFY_CURVE_MS
from serve.tiny.calibration import expected_calibration_error, fit_temperatures

DRAFTS = 7
STEPS = 2_000
SLOWNESS = 3
"""How much slower than the CPU engine's curves the simulated device is: fewer steps make a minute."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine threads that share a dozen numbers take longer than the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sigmoid(log_odds: NDArray) -> NDArray:
    return 1 / (1 + np.exp(-log_odds))


@dataclass
class Workload:
    """Drafts that are accepted with probabilities that differ by position, request and step."""

    requests: int
    first: float
    decay: float
    spread: float = 1.5

    def draw(self, random: np.random.Generator) -> tuple[NDArray, NDArray]:
        """Log-odds [requests, K] of one step's drafts, and how many of each request would be accepted."""
        noise = random.normal(0, self.spread, (self.requests, 1)) + random.normal(0, 0.5, (self.requests, DRAFTS))
        log_odds = self.first - self.decay * np.arange(DRAFTS) + noise
        accepted = np.cumprod(random.random(log_odds.shape) < sigmoid(log_odds), axis=1).sum(axis=1)
        return log_odds, accepted


COSTS = CostTables(
    SLOWNESS * np.interp(np.arange(65), *np.transpose(DRAFT_CURVE_MS)),
    SLOWNESS * np.interp(np.arange(513), *np.transpose(VERIFY_CURVE_MS)),
)
WORKLOADS = {
    "high acceptance": Workload(requests=8, first=2.5, decay=0.1),
    "many requests": Workload(requests=32, first=1.5, decay=0.3),
}


@dataclass
class Served:
    """What the second half of a simulation came to."""

    tokens_per_ms: float
    calibration_error: float


def serve(workload: Workload, *, factor: float, applies: bool, seed: int = 7) -> Served:
    """Serve `STEPS` steps with a head whose log-odds are `factor` times the true ones."""
    random = np.random.default_rng(seed)
    stage = Calibration(DRAFTS, CPU, applies=applies)
    every_draft = np.full(workload.requests, DRAFTS)
    stale = np.ones((workload.requests, DRAFTS))
    now, tokens, counted_from = 0.0, 0, 0.0
    predicted, happened = [], []
    for step in range(STEPS):
        if step == STEPS // 2:
            tokens, counted_from = 0, now
        log_odds, would_accept = workload.draw(random)
        head = torch.from_numpy(sigmoid(factor * log_odds).astype(np.float32))
        confidences = stage.calibrated(head).numpy().copy()
        budget = choose_budget(
            survival_probabilities(stale),
            every_draft,
            sampling_requests=workload.requests,
            other_tokens=workload.requests,
            max_budget=workload.requests * DRAFTS,
            costs=COSTS,
        )
        stale = confidences
        survival = survival_probabilities(confidences)
        admitted = np.zeros(survival.size, dtype=bool)
        admitted[np.argsort(-survival, axis=None, kind="stable")[:budget]] = True
        verified = admitted.reshape(survival.shape).sum(axis=1)
        accepted = np.minimum(verified, would_accept)
        milliseconds = COSTS.draft_ms[workload.requests] + COSTS.verify_ms[workload.requests + budget]
        now += milliseconds / 1000
        tokens += int(accepted.sum()) + workload.requests
        stage.observe(confidences, stage.applied, verified, accepted, now)
        if step >= STEPS // 2:
            told = np.arange(DRAFTS) < verified[:, None]
            predicted.append(survival[told])
            happened.append((np.arange(DRAFTS) < accepted[:, None])[told])
    error = expected_calibration_error(np.concatenate(predicted), np.concatenate(happened))
    return Served(tokens / (now - counted_from) / 1000, error)


@pytest.mark.parametrize("workload", [pytest.param(w, id=name) for name, w in WORKLOADS.items()])
def test_the_fit_recovers_calibration_and_throughput(workload: Workload) -> None:
    calibrated = serve(workload, factor=1.0, applies=False)
    assert calibrated.calibration_error < 0.01
    for factor in (2.0, 0.5):
        untouched = serve(workload, factor=factor, applies=False)
        recovered = serve(workload, factor=factor, applies=True)
        assert untouched.calibration_error > 0.1, "the head must be wrong to begin with"
        assert recovered.calibration_error < 0.03
        assert recovered.tokens_per_ms >= 0.98 * calibrated.tokens_per_ms
        assert recovered.tokens_per_ms > untouched.tokens_per_ms
        if factor == 0.5:
            assert untouched.tokens_per_ms < 0.98 * calibrated.tokens_per_ms, "nothing was at stake"


def test_shadow_fits_the_same_and_changes_nothing() -> None:
    random = np.random.default_rng(3)
    stage = Calibration(DRAFTS, CPU, applies=False)
    workload = WORKLOADS["many requests"]
    verified = np.full(workload.requests, DRAFTS)
    for step in range(2_000):
        log_odds, accepted = workload.draw(random)
        head = torch.from_numpy(sigmoid(2 * log_odds).astype(np.float32))
        assert stage.calibrated(head) is head
        stage.observe(head.numpy(), stage.applied, verified, accepted, now=step / 40)
    assert (stage.applied == 1).all()
    assert stage.temperatures == pytest.approx(2, rel=0.1)


def test_agrees_with_the_fit_of_all_the_data_at_once() -> None:
    """With temperatures that differ by position, among them one of a head that is right."""
    random = np.random.default_rng(5)
    factors = np.array([2.0, 0.5, 1.0, 1.5, 0.7, 1.0, 0.6])
    online = TemperatureFit(DRAFTS)
    workload = WORKLOADS["many requests"]
    everything = []
    for _ in range(2_000):
        log_odds, accepted = workload.draw(random)
        everything.append((factors * log_odds, accepted))
        online.observe(factors * log_odds, np.full(workload.requests, DRAFTS), accepted, seconds=0.05)
    log_odds, accepted = (np.concatenate(part) for part in zip(*everything, strict=True))
    at_once = fit_temperatures(log_odds, np.arange(DRAFTS) < accepted[:, None])
    assert online.temperatures == pytest.approx(at_once, rel=0.1)
    assert online.temperatures == pytest.approx(factors, rel=0.15)


def test_drafts_that_were_not_verified_leave_no_bias() -> None:
    """Verified is only what the head thinks best, and the temperatures are the same."""
    random = np.random.default_rng(6)
    online = TemperatureFit(DRAFTS)
    workload = WORKLOADS["many requests"]
    for _ in range(2_000):
        log_odds, would_accept = workload.draw(random)
        verified = (np.cumprod(sigmoid(2 * log_odds), axis=1) > 0.4).sum(axis=1)
        online.observe(2 * log_odds, verified, np.minimum(verified, would_accept), seconds=0.05)
    assert online.temperatures[:4] == pytest.approx(2, rel=0.1)


@given(
    st.lists(st.lists(st.floats(-3, 3), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.floats(-0.4, 0.4), min_size=3, max_size=3),
    st.data(),
)
def test_the_gradient_is_the_loss_by_difference(rows: list, logarithms: list, data: st.DataObject) -> None:
    log_odds, at = np.array(rows), np.array(logarithms)
    verified = np.array([data.draw(st.integers(0, 3)) for _ in rows])
    accepted = np.array([data.draw(st.integers(0, int(v))) for v in verified])
    told, survived = (np.arange(3) < count[:, None] for count in (verified, accepted))

    def surprise(position: int, logarithm: float) -> float:
        moved = at.copy()
        moved[position] = logarithm
        p = np.clip(np.cumprod(sigmoid(log_odds / np.exp(moved)), axis=1), fit.EPSILON, 1 - fit.EPSILON)[:, position]
        of_each = -np.where(survived[:, position], np.log(p), np.log1p(-p))
        return float(of_each[told[:, position]].sum())

    gradient, information = fit._derivatives(log_odds, at, verified, accepted)
    assert (information >= 0).all()
    step = 1e-5
    for position in range(3):
        slope = (surprise(position, at[position] + step) - surprise(position, at[position] - step)) / (2 * step)
        assert gradient[position] == pytest.approx(slope, rel=1e-3, abs=1e-3)


def test_it_is_slow_and_bounded() -> None:
    """Whatever it is told, a second moves a temperature by 5 % at most, and it ends at a bound."""
    sure, wrong = np.full((64, DRAFTS), 6.0), np.zeros(64, dtype=int)
    online = TemperatureFit(DRAFTS)
    for second in range(60):
        before = online.temperatures
        online.observe(sure, np.full(64, DRAFTS), wrong, seconds=1.0 if second % 2 else 3600.0)
        assert np.abs(np.log(online.temperatures / before)).max() <= fit.MAX_CHANGE + 1e-12
    # Behind a draft that never survives the others tell nothing.
    assert online.temperatures[0] == fit.HOTTEST
    assert ((online.temperatures >= fit.COLDEST) & (online.temperatures <= fit.HOTTEST)).all()


def test_broken_confidences_break_nothing() -> None:
    online = TemperatureFit(2)
    broken = np.array([[np.nan, 0.0], [1.0, np.inf]])
    online.observe(log_odds_of(broken), np.array([2, 2]), np.array([0, 2]), seconds=1.0)
    assert np.isfinite(online.temperatures).all()


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert chosen_mode() is CalibrationMode.SHADOW
    monkeypatch.setenv(VARIABLE, "off")
    assert begin_calibration(DRAFTS, CPU, reaches_every_rank=True) is None
    monkeypatch.setenv(VARIABLE, "maybe")
    with pytest.raises(ValueError, match="DSPARK_CALIBRATION is 'maybe': use off, shadow, on"):
        chosen_mode()


def test_where_ranks_share_nothing_it_stays_shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "on")
    head = torch.full((2, DRAFTS), 0.9)
    for reaches, same in ((True, False), (False, True)):
        stage = begin_calibration(DRAFTS, CPU, reaches_every_rank=reaches)
        assert stage is not None
        stage.temperatures = np.full(DRAFTS, 2.0)
        assert torch.equal(stage.calibrated(head), head) is same
    assert torch.equal(head, torch.full((2, DRAFTS), 0.9)), "the head's own confidences must stay"
