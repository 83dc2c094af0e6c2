"""Our series, from the counter files to the exposition."""

from pathlib import Path

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from patches.install import survey
from patches.telemetry.counters import CounterWriter
from serve.lifecycle import Lifecycle
from serve.metrics import Combined, Identity, RecentAcceptance, ServerCollector, Totals, VerificationCollector, totals
from serve.profile import Verification


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
    return Identity("1.2.3", verification, patches)


def test_two_engines_are_two_series_that_sum_right(tmp_path: Path) -> None:
    first, second = CounterWriter(tmp_path, 0, 3), CounterWriter(tmp_path, 1, 3)
    first.add_step(plan="trimmed", proposed=9, verified=5, acceptance_lengths=np.array([1, 2, 4]))
    first.add_step(plan="full", proposed=3, verified=3, acceptance_lengths=np.array([4]))
    second.add_step(plan="none", proposed=6, verified=0, acceptance_lengths=np.array([1, 1]))
    samples = scrape(VerificationCollector(tmp_path, lambda: "tiny"))
    engine0, engine1 = "engine=0,model_name=tiny", "engine=1,model_name=tiny"
    assert samples[f"dspark_proposed_draft_tokens_total{{{engine0}}}"] == 12
    assert samples[f"dspark_verified_draft_tokens_total{{{engine0}}}"] == 8
    assert samples[f"dspark_accepted_draft_tokens_total{{{engine0}}}"] == 7
    assert samples[f"dspark_proposed_draft_tokens_total{{{engine1}}}"] == 6
    assert samples[f"dspark_accepted_draft_tokens_total{{{engine1}}}"] == 0
    assert samples[f"dspark_verification_steps_total{{{engine0},plan=trimmed}}"] == 1
    assert samples[f"dspark_verification_steps_total{{{engine0},plan=full}}"] == 1
    assert samples[f"dspark_verification_steps_total{{{engine1},plan=none}}"] == 1
    buckets = [samples[f"dspark_acceptance_length_bucket{{engine=0,le={le},model_name=tiny}}"] for le in LES]
    assert buckets == [1, 2, 2, 4, 4]
    assert samples[f"dspark_acceptance_length_count{{{engine0}}}"] == 4
    assert samples[f"dspark_acceptance_length_sum{{{engine0}}}"] == 11


LES = ("1.0", "2.0", "3.0", "4.0", "+Inf")


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
    samples = scrape(ServerCollector(life, identity(verification)))
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


def test_the_last_minute_forgets_what_came_before() -> None:
    recent = RecentAcceptance(window_seconds=60)
    assert recent.summary() == {}
    for at in range(0, 200, 5):
        recent.note(Totals(at=at, requests=at, proposed=5 * at, verified=4 * at, accepted=at))
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
    recent.note(Totals(0, 0, 0, 0, 0))
    summary = recent.summary()
    assert summary["accepted_per_verified"] is None
    assert summary["mean_acceptance_length"] is None


def test_totals_sum_every_engine(tmp_path: Path) -> None:
    for engine in (0, 1):
        CounterWriter(tmp_path, engine, 3).add_step(
            plan="full", proposed=3, verified=3, acceptance_lengths=np.array([engine + 2])
        )
    assert totals(tmp_path, at=1.0) == Totals(at=1.0, requests=2, proposed=6, verified=6, accepted=3)
