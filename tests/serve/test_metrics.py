"""Our series, from the counter files to the exposition."""

from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from patches.calibration.mode import CalibrationMode
from patches.install import survey
from patches.telemetry.counters import CounterWriter, read_all
from patches.telemetry.tally import StepCounts, count_step
from serve.lifecycle import Lifecycle
from serve.metrics import Combined, Identity, RecentAcceptance, ServerCollector, VerificationCollector
from serve.modes import ModeSwitch
from serve.profile import Verification
from serve.totals import Totals, totals


def scrape(*sources: object) -> dict[str, float]:
    """Every sample, keyed by its name and labels as Prometheus writes them."""
    text = generate_latest(Combined(*sources)).decode()  # type: ignore[arg-type]
    return {
        sample.name + "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def identity(verification: Verification) -> Identity:
    patches = survey(release="0.32.0", hardware_name="cpu", vllm_root=None)
    return Identity("1.2.3", verification, CalibrationMode.SHADOW, patches)


LES = ("1.0", "2.0", "3.0", "4.0", "+Inf")


def step(plan: str, *rows: tuple[int, int, int], confidence: float | None = None) -> StepCounts:
    """A step whose requests each have (proposed, verified, accepted) drafts of at most three."""
    proposed, verified, accepted = map(np.array, zip(*rows, strict=True))
    return count_step(
        plan,
        max_drafts=3,
        proposed=proposed,
        verified=verified,
        accepted=accepted,
        confidences=None if confidence is None else np.full((len(rows), 3), confidence),
    )


def test_two_engines_are_two_series_that_sum_right(tmp_path: Path) -> None:
    first, second = (CounterWriter(tmp_path, engine, 3, predicts=True) for engine in (0, 1))
    first.add_step(step("trimmed", (3, 1, 0), (3, 1, 1), (3, 3, 3), confidence=0.5))
    first.add_step(step("full", (3, 3, 3), confidence=0.5))
    first.add_times({"verify": 0.015, "draft": 0.003}, 0.02)
    second.add_step(step("none", (3, 0, 0), (3, 0, 0), confidence=0.5))
    samples = scrape(VerificationCollector(tmp_path, lambda: "tiny"))
    engine0, engine1 = "engine=0,model_name=tiny", "engine=1,model_name=tiny"

    def by_position(name: str, labels: str) -> list[float]:
        return [samples[f"dspark_{name}_draft_tokens_total{{{labels},position={p}}}"] for p in range(3)]

    assert by_position("proposed", engine0) == [4, 4, 4]
    assert by_position("proposed", engine1) == [2, 2, 2]
    assert by_position("verified", engine0) == [4, 2, 2]
    assert by_position("accepted", engine0) == [3, 2, 2]
    assert by_position("expected_accepted", engine0) == [2, 0.5, 0.25]
    assert by_position("accepted", engine1) == by_position("verified", engine1) == [0, 0, 0]
    assert samples[f"dspark_verification_steps_total{{{engine0},plan=trimmed}}"] == 1
    assert samples[f"dspark_verification_steps_total{{{engine0},plan=full}}"] == 1
    assert samples[f"dspark_verification_steps_total{{{engine1},plan=none}}"] == 1
    buckets = [samples[f"dspark_acceptance_length_bucket{{engine=0,le={le},model_name=tiny}}"] for le in LES]
    assert buckets == [1, 2, 2, 4, 4]
    assert samples[f"dspark_acceptance_length_count{{{engine0}}}"] == 4
    assert samples[f"dspark_acceptance_length_sum{{{engine0}}}"] == 11
    buckets = [samples[f"dspark_verified_length_bucket{{engine=0,le={le},model_name=tiny}}"] for le in LES]
    assert buckets == [0, 2, 2, 4, 4]
    assert samples[f"dspark_verified_length_sum{{{engine0}}}"] == 12
    assert samples["dspark_confidence_predictions_total{bin=0.5-0.6,engine=0,model_name=tiny}"] == 8
    assert samples["dspark_confidence_accepted_total{bin=0.5-0.6,engine=0,model_name=tiny}"] == 7
    assert samples["dspark_confidence_predictions_total{bin=0.9-1.0,engine=0,model_name=tiny}"] == 0
    assert samples[f"dspark_step_seconds_sum{{{engine0},phase=verify}}"] == 0.015
    assert samples["dspark_step_seconds_bucket{engine=0,le=0.02,model_name=tiny,phase=verify}"] == 1
    assert samples["dspark_step_seconds_bucket{engine=0,le=0.01,model_name=tiny,phase=verify}"] == 0
    assert samples[f"dspark_step_predicted_seconds_total{{{engine0}}}"] == 0.02


def test_where_nothing_predicts_the_series_are_absent(tmp_path: Path) -> None:
    CounterWriter(tmp_path, 0, 3).add_step(step("fixed", (3, 3, 1)))
    names = {sample.partition("{")[0] for sample in scrape(VerificationCollector(tmp_path, lambda: "tiny"))}
    assert "dspark_verified_draft_tokens_total" in names
    told = ("expected", "confidence", "predicted", "calibration")
    assert not [name for name in names if any(word in name for word in told)]


def test_temperatures_are_told_where_they_are_fitted(tmp_path: Path) -> None:
    CounterWriter(tmp_path, 0, 2, predicts=True, calibrates=True).set_temperatures(np.array([1.5, 0.5]))
    CounterWriter(tmp_path, 1, 2, predicts=True)
    samples = scrape(VerificationCollector(tmp_path, lambda: "tiny"))
    temperatures = {name: value for name, value in samples.items() if name.startswith("dspark_calibration")}
    assert temperatures == {
        "dspark_calibration_temperature{engine=0,model_name=tiny,position=0}": 1.5,
        "dspark_calibration_temperature{engine=0,model_name=tiny,position=1}": 0.5,
    }


def test_without_the_models_name_the_series_are_absent(tmp_path: Path) -> None:
    CounterWriter(tmp_path, 0, 3)
    assert scrape(VerificationCollector(tmp_path, lambda: None)) == {}
    assert scrape(VerificationCollector(tmp_path, lambda: "tiny")) != {}


def test_without_speculation_the_series_are_absent(tmp_path: Path) -> None:
    assert scrape(VerificationCollector(tmp_path, lambda: "tiny")) == {}


@pytest.mark.parametrize("verification", list(Verification))
def test_the_server_says_what_it_is(verification: Verification) -> None:
    life = Lifecycle()
    life.ready()
    samples = scrape(ServerCollector(life, identity(verification), ModeSwitch(life, verification)))
    states = {name: value for name, value in samples.items() if name.startswith("dspark_state")}
    assert sum(states.values()) == 1
    assert samples["dspark_state{state=ready}"] == 1
    modes = {name: value for name, value in samples.items() if name.startswith("dspark_mode")}
    assert sum(modes.values()) == 1
    assert samples[f"dspark_mode{{mode={verification.value}}}"] == 1
    configured = {name: value for name, value in samples.items() if name.startswith("dspark_configured_mode")}
    assert len(configured) == len(Verification)
    assert sum(configured.values()) == 1
    assert samples[f"dspark_configured_mode{{mode={verification.value}}}"] == 1
    assert samples["dspark_patch_info{id=cpu-engine,status=applied}"] == 1
    assert any(name.startswith("dspark_build_info{hardware=cpu,") for name in samples)


def test_a_headless_node_tells_no_mode_that_another_may_have_switched() -> None:
    life = Lifecycle()
    life.ready()
    modes = ModeSwitch(life, Verification.ADAPTIVE, told=False)
    samples = scrape(ServerCollector(life, identity(Verification.ADAPTIVE), modes))
    assert not [name for name in samples if name.startswith("dspark_mode")]
    assert samples["dspark_configured_mode{mode=adaptive}"] == 1
    said = modes.as_json()
    assert (said["mode"], said["configured"], said["switchable"], said["engines"]) == (None, "adaptive", False, [])
    assert said["reason"] == "this node runs ranks of an engine that another node serves: switch the mode there"


def test_the_last_minute_forgets_what_came_before() -> None:
    recent = RecentAcceptance(window_seconds=60)
    assert recent.summary() == {}
    for at in range(0, 200, 5):
        recent.note(Totals(at=at, requests=at, proposed=5 * at, verified=4 * at, accepted=at, steps={}, expected=None))
    assert recent.summary() == {
        "seconds": 60,
        "proposed": 300,
        "verified": 240,
        "accepted": 60,
        "accepted_per_verified": 0.25,
        "mean_acceptance_length": 2.0,
    }


def test_no_ratio_while_nothing_was_verified() -> None:
    recent = RecentAcceptance()
    recent.note(Totals(0, 0, 0, 0, 0, {}, None))
    summary = recent.summary()
    assert summary["accepted_per_verified"] is None
    assert summary["mean_acceptance_length"] is None


def test_totals_sum_every_engine(tmp_path: Path) -> None:
    for engine in (0, 1):
        CounterWriter(tmp_path, engine, 3).add_step(step("full", (3, 3, engine + 1)))
    steps = {"full": 2, "trimmed": 0, "none": 0, "fixed": 0}
    assert totals(read_all(tmp_path), at=1.0) == Totals(
        at=1.0, requests=2, proposed=6, verified=6, accepted=3, steps=steps, expected=None
    )
