"""Flattened rows against the brute-force reference, kernels interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_rows_equal_the_reference():
    """In a process of its own: Triton decides whether to interpret when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("flattened_rows_interpreted.py")), "0", "240"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    assert json.loads(process.stdout) == []


@pytest.mark.parametrize(("num_rows", "pages", "message"), [(9, 2, "9 rows do not fit"), (4, 5, "5 pages do not fit")])
def test_what_does_not_fit_is_refused_before_a_launch(num_rows, pages, message):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("triton", reason="Triton is not installed")
    from patches.flattened_rows import Rows

    rows = Rows(torch.zeros(8), torch.zeros(8), torch.zeros(8, 4), max_keys=100)
    with pytest.raises(ValueError, match=message):
        rows.flatten(torch.tensor([0, 4]), torch.tensor([4]), torch.zeros(1, pages), num_requests=1, num_rows=num_rows)
