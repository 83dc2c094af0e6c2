"""The verdict of a soak over made-up measurements."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from tests.bench.soak import Sample, main, verdict


def measured(mib_an_hour: float, *, noise: float = 0.2, descriptors_an_hour: float = 0.0) -> list[Sample]:
    """Two hours, a sample every five seconds, after a warm-up in which memory doubles."""
    rng = np.random.default_rng(5)
    seconds = np.arange(0.0, 7200.0, 5.0)
    warm = 1000 * np.minimum(1.0, 0.5 + seconds / 600)
    mib = warm + mib_an_hour * seconds / 3600 + rng.normal(0, noise, seconds.size)
    return [
        Sample(float(s), float(m), 100 + int(descriptors_an_hour * s / 3600) + int(rng.integers(0, 5)))
        for s, m in zip(seconds, mib, strict=True)
    ]


@pytest.mark.parametrize(
    ("samples", "flat", "conclusive"),
    [
        (measured(0.0), True, True),
        (measured(0.5), True, True),
        (measured(5.0), False, True),
        (measured(0.0, descriptors_an_hour=20), False, True),
        (measured(0.0, noise=50.0), True, False),
    ],
    ids=["flat", "within the limit", "memory", "descriptors", "noise"],
)
def test_what_grows_is_seen_and_what_cannot_be_told_is_said(
    samples: list[Sample], flat: bool, conclusive: bool
) -> None:
    result = verdict(samples, Counter(answered=9, left=3), warm_up=600)
    assert (result["flat"], result["conclusive"]) == (flat, conclusive)
    assert result["faults"] == {}


def test_a_client_that_was_failed_is_a_fault() -> None:
    seen = Counter({"answered": 5, "left": 2, "error 500": 1, "cut: ReadError": 2, "switched: 200": 9})
    assert verdict(measured(0.0), seen, warm_up=600)["faults"] == {"error 500": 1, "cut: ReadError": 2}


def test_the_process_that_grows_is_named() -> None:
    samples = [
        replace(sample, by_process={"server 1": 500.0 + 5 * sample.seconds / 3600, "core 2": 700.0})
        for sample in measured(0.0)
    ]
    assert verdict(samples, Counter(), warm_up=600)["mib_and_mib_an_hour_by_process"] == {
        "core 2": (700.0, 0.0),
        "server 1": (500.8, 5.0),
    }


def test_a_run_that_is_all_warm_up_is_refused_before_it_begins(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["soak", "--minutes", "30"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--minutes 30 is all warm-up: more, or fewer --warm-up-minutes" in capsys.readouterr().err
