"""The counter file: what is written is what is read, and a broken file is never half believed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.telemetry import counters
from patches.telemetry.counters import PLANS, CountersError, CounterWriter, counter_file, read, read_all
from patches.telemetry.tally import BINS, count_step

MAX_DRAFTS = 5
ONE_STEP = count_step("full", max_drafts=5, proposed=np.array([4]), verified=np.array([2]), accepted=np.array([1]))


@st.composite
def requests(draw: st.DrawFn) -> tuple[int, int, int, list[float]]:
    """Drafts proposed, verified and accepted of one request in one step, and their confidences."""
    proposed = draw(st.integers(1, MAX_DRAFTS))
    verified = draw(st.integers(0, proposed))
    accepted = draw(st.integers(0, verified))
    return proposed, verified, accepted, draw(st.lists(st.floats(0, 1, width=32), min_size=5, max_size=5))


steps = st.lists(st.tuples(st.sampled_from(PLANS), st.lists(requests(), min_size=1, max_size=6)), max_size=5)


@given(steps)
def test_reads_the_sum_of_the_steps(tmp_path_factory: pytest.TempPathFactory, taken: list) -> None:
    """Against a plain loop over every draft."""
    directory = tmp_path_factory.mktemp("counters")
    writer = CounterWriter(directory, 3, MAX_DRAFTS, predicts=True)
    sums = {name: [0] * MAX_DRAFTS for name in ("proposed", "verified", "accepted", "expected")}
    lengths: dict[str, list[int]] = {"acceptance": [], "verified": []}
    bins = [[0] * BINS, [0] * BINS]
    for plan, rows in taken:
        proposed, verified, accepted, confidences = map(np.array, zip(*rows, strict=True))
        writer.add_step(
            count_step(
                plan,
                max_drafts=MAX_DRAFTS,
                proposed=proposed,
                verified=verified,
                accepted=accepted,
                confidences=confidences.astype(np.float32),
            )
        )
        for drafted, admitted, taken_over, probabilities in rows:
            lengths["acceptance"].append(taken_over + 1)
            lengths["verified"].append(admitted + 1)
            survival = 1.0
            for position in range(MAX_DRAFTS):
                survival *= probabilities[position]
                sums["proposed"][position] += position < drafted
                sums["verified"][position] += position < admitted
                sums["accepted"][position] += position < taken_over
                sums["expected"][position] += survival if position < admitted else 0
                if position < admitted and position <= taken_over:
                    which = min(int(np.float32(probabilities[position]) * BINS), BINS - 1)
                    bins[0][which] += 1
                    bins[1][which] += position < taken_over
    snapshot = read(counter_file(directory, 3))
    assert snapshot.engine == 3
    assert snapshot.max_drafts == MAX_DRAFTS
    assert list(snapshot.proposed) == sums["proposed"]
    assert list(snapshot.verified) == sums["verified"]
    assert list(snapshot.accepted) == sums["accepted"]
    assert snapshot.expected == pytest.approx(sums["expected"], rel=1e-9, abs=1e-12)
    assert snapshot.steps == {plan: sum(step[0] == plan for step in taken) for plan in PLANS}
    assert snapshot.acceptance_lengths == tuple(lengths["acceptance"].count(i) for i in range(MAX_DRAFTS + 2))
    assert snapshot.verified_lengths == tuple(lengths["verified"].count(i) for i in range(MAX_DRAFTS + 2))
    assert [list(snapshot.bin_predictions or ()), list(snapshot.bin_accepted or ())] == bins


def test_what_nobody_predicts_is_unknown_and_not_zero(tmp_path: Path) -> None:
    CounterWriter(tmp_path, 0, MAX_DRAFTS).add_step(ONE_STEP)
    snapshot = read(counter_file(tmp_path, 0))
    assert snapshot.verified == (1, 1, 0, 0, 0)
    unknown = (snapshot.expected, snapshot.bin_predictions, snapshot.bin_accepted, snapshot.predicted_seconds)
    assert unknown == (None,) * 4
    assert snapshot.temperatures is None


def test_a_confidence_that_is_no_number_does_not_stay_in_the_sums(tmp_path: Path) -> None:
    writer = CounterWriter(tmp_path, 0, 2, predicts=True)
    one = np.array([2])
    for rows in ([[np.nan, 0.5]], [[0.5, 0.5]]):
        confidences = np.array(rows)
        writer.add_step(
            count_step(
                "full", max_drafts=2, proposed=one, verified=one, accepted=one, confidences=np.array(confidences)
            )
        )
    assert read(counter_file(tmp_path, 0)).expected == (0.5, 0.25)


def test_seconds_fall_into_their_buckets(tmp_path: Path) -> None:
    writer = CounterWriter(tmp_path, 0, MAX_DRAFTS, predicts=True)
    writer.add_times({"verify": 0.001, "draft": 0.0011}, 0.25)
    writer.add_times({"verify": 9.0, "draft": 0.0}, 0.5)
    snapshot = read(counter_file(tmp_path, 0))
    assert snapshot.step_seconds["verify"].counts == (1, *[0] * 11, 1)
    assert snapshot.step_seconds["draft"].counts == (1, 1, *[0] * 11)
    assert snapshot.step_seconds["verify"].total == pytest.approx(9.001)
    assert snapshot.predicted_seconds == 0.75


def test_withdrawn_counters_are_gone(tmp_path: Path) -> None:
    writer = CounterWriter(tmp_path, 0, MAX_DRAFTS)
    writer.withdraw()
    assert list(read_all(tmp_path)) == []


def test_a_reader_never_takes_half_a_step(tmp_path: Path) -> None:
    """A writer in another process adds steps whose counters keep a fixed ratio; every snapshot keeps it too."""
    script = (
        "import sys; from pathlib import Path; from tests.patches.test_counters import ONE_STEP, CounterWriter\n"
        "writer = CounterWriter(Path(sys.argv[1]), 0, 5)\n"
        "print('go', flush=True)\n"
        "while True: writer.add_step(ONE_STEP)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            seen = []
            for _ in range(2000):
                for snapshot in read_all(tmp_path):
                    accepted = sum(snapshot.accepted)
                    assert sum(snapshot.proposed) == 4 * accepted
                    assert sum(snapshot.verified) == 2 * accepted
                    assert sum(snapshot.acceptance_lengths) == snapshot.steps["full"] == accepted
                    seen.append(accepted)
        finally:
            writer.kill()
    assert len(set(seen)) > 10, "the writer was not seen at work"


def test_a_writer_that_stopped_in_a_step_is_left_out(tmp_path: Path) -> None:
    writer = CounterWriter(tmp_path, 0, MAX_DRAFTS)
    CounterWriter(tmp_path, 1, MAX_DRAFTS)
    writer._fields["sequence"][0] += 1
    with pytest.raises(CountersError, match=r"engine-0\.counters is held"):
        read(counter_file(tmp_path, 0))
    assert [snapshot.engine for snapshot in read_all(tmp_path)] == [1]


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 8192])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = counter_file(tmp_path, 0)
    path.write_bytes(content)
    with pytest.raises(CountersError, match="not a counter file"):
        read(path)
    assert list(read_all(tmp_path)) == []


def test_a_directory_that_is_gone_reads_as_nothing(tmp_path: Path) -> None:
    assert list(read_all(tmp_path / "gone")) == []


@pytest.mark.parametrize("drafts", [0, -1, counters.MAX_DRAFTS + 1])
def test_a_draft_length_without_room_is_refused(tmp_path: Path, drafts: int) -> None:
    with pytest.raises(CountersError, match="does not fit"):
        CounterWriter(tmp_path, 0, drafts)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_an_error_at_the_start_and_never_a_bus_error_later(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], check=True)
    try:
        writer = CounterWriter(tmp_path, 0, MAX_DRAFTS)
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "filler").write_bytes(b"x" * 65536)
        writer.add_step(ONE_STEP)
        assert read(counter_file(tmp_path, 0)).accepted == (1, 0, 0, 0, 0)
        with pytest.raises(OSError, match="No space left"):
            CounterWriter(tmp_path, 1, MAX_DRAFTS)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
