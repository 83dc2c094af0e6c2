"""The two-rank runs: what they record and compare, and a small run on two real CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from patches.install import vllm_release
from tests.bench import rank_records
from tests.bench.arms import REPOSITORY
from tests.bench.in_turns import ratios
from tests.bench.rank_worker import _Recorder
from tests.bench.two_ranks import cannot_run, curves, parsed
from tests.bench.two_ranks_report import markdown
from tests.patches.ranks import SLOTS

MAX_REQUESTS = 3


def recorded(folder: Path, rank: int, steps: list[tuple[int, list[int]]], *, every: int = 2) -> None:
    """Record steps of (budget, admitted drafts), of as many requests as there are admitted counts."""
    with rank_records.record_file(folder, rank).open("wb", buffering=0) as file:
        recorder = _Recorder(file, MAX_REQUESTS, every, torch.device("cpu"))
        for budget, admitted in steps:
            ids = [f"r{number}" for number in range(len(admitted))]
            recorder.chosen(ids, SimpleNamespace(eligible=dict.fromkeys(ids, 5), budget=budget))
            ends = torch.tensor([0, *np.cumsum(np.array(admitted) + 1)], dtype=torch.int32)
            recorder.allotted(ends, ends)
        recorder.close()


def compared(folder: Path) -> rank_records.Comparison:
    return rank_records.compare(*(rank_records.read(folder, rank, MAX_REQUESTS) for rank in range(2)))


def test_equal_ranks_are_equal_and_a_step_that_only_one_recorded_is_not_compared(tmp_path):
    steps = [(3, [1, 2]), (10, [5, 5]), (0, [0, 0, 0])]
    recorded(tmp_path, 0, steps)
    recorded(tmp_path, 1, [*steps, (2, [2])])
    assert compared(tmp_path) == rank_records.Comparison(
        steps=3, batches=0, budgets=0, boundaries=0, first=None, trimmed=1, distinct_budgets=3
    )


@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_budget_and_a_boundary_that_differ_are_told_apart(tmp_path, every):
    recorded(tmp_path, 0, [(3, [1, 2]), (3, [1, 2]), (4, [4, 0]), (5, [5])], every=every)
    recorded(tmp_path, 1, [(3, [1, 2]), (3, [2, 1]), (3, [3, 0]), (5, [5])], every=every)
    found = compared(tmp_path)
    assert (found.steps, found.first, found.budgets, found.boundaries, found.batches) == (4, 1, 1, 2, 0)


def test_a_step_is_on_file_before_the_next_begins(tmp_path):
    with rank_records.record_file(tmp_path, 0).open("wb", buffering=0) as file:
        recorder = _Recorder(file, MAX_REQUESTS, 1, torch.device("cpu"))
        recorder.chosen(["a"], SimpleNamespace(eligible={"a": 5}, budget=2))
        recorder.allotted(torch.tensor([0, 3]), torch.tensor([0, 3]))
        (row,) = rank_records.read(tmp_path, 0, MAX_REQUESTS)
        assert row.tolist() == [1, rank_records.checksum("a"), 5, 2, 0, 3, 0, 0, 0, 3, 0, 0]


def test_no_file_and_half_a_row_are_no_steps(tmp_path):
    assert compared(tmp_path).steps == 0
    rank_records.record_file(tmp_path, 0).write_bytes(b"\0" * 8)
    assert rank_records.read(tmp_path, 0, MAX_REQUESTS).shape == (0, rank_records.width(MAX_REQUESTS))


def test_costs_rise_faster_than_tokens():
    draft, verify = curves(4, 24)
    assert [size for size, _ in draft] == [1, 4]
    milliseconds = [ms for _, ms in verify]
    assert verify[-1] == (24, 20.0)
    assert np.all(np.diff(milliseconds, n=2)[1:] > 0)


def test_parts_that_cannot_be_are_refused_by_name(capsys):
    for only, says in (("apart,drift", "apart must be the last"), ("costs", "no part 'costs'")):
        with pytest.raises(SystemExit):
            parsed(["--only", only])
        assert says in capsys.readouterr().err


def test_without_two_gpus_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cannot_run(parsed([])) == "needs 2 GPUs and sees 1; --cpu runs it on the tiny pair"
    assert cannot_run(parsed(["--cpu"])) is None


def test_the_report_says_what_was_found():
    times = {"on": [1.02, 1.04], "off": [1.0, 1.0]}
    assert ratios(times) == [1.02, 1.04]
    same = {"steps": 12_000, "budgets": 0, "boundaries": 0, "trimmed": 9_000, "distinct_budgets": 77, "first": None}
    text = markdown(
        {
            "facts": {"command": "--rounds 2", "ranks": 2, "vllm": "0.32.0"},
            "cost": {
                "token_ms": {1: times},
                "broadcast_us": {1: [{"host": {"median": 40.0, "p10": 39.0, "p90": 50.0}}] * 2},
            },
            "drift": same,
            "apart": {**same, "first": 6, "first_budgets": [9, 10], "engine": "went on"},
            "stress": {"error": "patched: no answer in 25 s"},
        }
    )
    assert "| 12,000 steps, 9,000 of them trimmed, 77 different budgets | 0 budgets and 0 boundaries differ |" in text
    assert "step 7: budgets 9 and 10; the engine went on" in text
    assert "| stress | | patched: no answer in 25 s |" in text
    assert "| 1 | 1.030 (1.020 to 1.040) | 1.000 (1.000 to 1.000) | 1.030 (1.020 to 1.040) |" in text
    assert "none: no device" in text


@pytest.mark.parametrize(("estimates", "steps"), [("shared", 1_000), ("own", 200)])
def test_real_managers_that_drift_agree_only_where_they_share(tmp_path, estimates, steps):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        "DSPARK_TEST_RELEASE": vllm_release(),
        # An interpreted kernel would take minutes for as many steps.
        "DSPARK_PATCHES_OFF": "fused-ranking",
        "VLLM_PLUGINS": "",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.run(
        [sys.executable, str(REPOSITORY / "tests/bench/drifting_ranks.py"), str(tmp_path), str(steps), estimates],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = rank_records.compare(*(rank_records.read(tmp_path, rank, SLOTS) for rank in range(2)))
    assert (found.steps, found.batches) == (steps, 0)
    assert found.trimmed > steps / 10
    if estimates == "shared":
        assert (found.budgets, found.boundaries, found.first) == (0, 0, None)
        assert found.distinct_budgets > 10, "the steps must not all be alike"
    else:
        assert found.boundaries > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_cpu_ranks_decide_alike_with_sharing_and_not_without(tmp_path):
    small = ["--requests", "4", "--steps", "60", "--minutes", "0.2", "--rounds", "1", "--cost-tokens", "7"]
    folders = ["--folder", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    process = subprocess.run(
        [sys.executable, "-m", "tests.bench.two_ranks", "--cpu", *small, *folders],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    found = json.loads((tmp_path / "out" / "two-ranks.json").read_text())
    assert found["drift"]["steps"] >= 60
    assert found["drift"]["first"] is None
    assert found["apart"]["first"] is not None
    assert found["stress"]["finished"] > 0
    assert (tmp_path / "out" / "two-ranks.md").read_text().count("|") > 20
