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

MAX_DRAFTS = 5

steps = st.lists(
    st.tuples(
        st.sampled_from(PLANS),
        st.integers(0, 80),
        st.integers(0, 80),
        st.lists(st.integers(1, MAX_DRAFTS + 1), min_size=1, max_size=16),
    ),
    max_size=30,
)


@given(steps)
def test_reads_the_sum_of_the_steps(tmp_path_factory: pytest.TempPathFactory, taken: list) -> None:
    directory = tmp_path_factory.mktemp("counters")
    writer = CounterWriter(directory, 3, MAX_DRAFTS)
    for plan, proposed, verified, lengths in taken:
        writer.add_step(plan=plan, proposed=proposed, verified=verified, acceptance_lengths=np.array(lengths))
    snapshot = read(counter_file(directory, 3))
    lengths = [length for step in taken for length in step[3]]
    assert snapshot.engine == 3
    assert snapshot.max_drafts == MAX_DRAFTS
    assert snapshot.proposed == sum(step[1] for step in taken)
    assert snapshot.verified == sum(step[2] for step in taken)
    assert snapshot.accepted == sum(length - 1 for length in lengths)
    assert snapshot.steps == {plan: sum(step[0] == plan for step in taken) for plan in PLANS}
    assert snapshot.acceptance_lengths == tuple(lengths.count(i) for i in range(MAX_DRAFTS + 2))


def test_a_reader_never_takes_half_a_step(tmp_path: Path) -> None:
    """A writer in another process adds steps whose counters keep a fixed ratio; every snapshot keeps it too."""
    script = (
        "import sys, numpy as np; from pathlib import Path; from patches.telemetry.counters import CounterWriter\n"
        "writer = CounterWriter(Path(sys.argv[1]), 0, 5)\n"
        "print('go', flush=True)\n"
        "while True: writer.add_step(plan='full', proposed=4, verified=2, acceptance_lengths=np.array([2]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            seen = []
            for _ in range(2000):
                for snapshot in read_all(tmp_path):
                    assert snapshot.proposed == 4 * snapshot.accepted
                    assert snapshot.verified == 2 * snapshot.accepted
                    assert sum(snapshot.acceptance_lengths) == snapshot.steps["full"] == snapshot.accepted
                    seen.append(snapshot.accepted)
        finally:
            writer.kill()
    assert len(set(seen)) > 10, "the writer was not seen at work"


def test_a_writer_that_stopped_in_a_step_is_left_out(tmp_path: Path) -> None:
    writer = CounterWriter(tmp_path, 0, MAX_DRAFTS)
    CounterWriter(tmp_path, 1, MAX_DRAFTS)
    writer._words[counters._SEQUENCE_AT] += 1
    with pytest.raises(CountersError, match=r"engine-0\.counters is held"):
        read(counter_file(tmp_path, 0))
    assert [snapshot.engine for snapshot in read_all(tmp_path)] == [1]


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 4096])
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
        writer.add_step(plan="full", proposed=1, verified=1, acceptance_lengths=np.array([2]))
        assert read(counter_file(tmp_path, 0)).accepted == 1
        with pytest.raises(OSError, match="No space left"):
            CounterWriter(tmp_path, 1, MAX_DRAFTS)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
