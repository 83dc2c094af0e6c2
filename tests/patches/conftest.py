import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

# Triton reads this when a kernel is defined, so it is set before any test imports one.
os.environ["TRITON_INTERPRET"] = "1"

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@pytest.fixture
def plans_of_two_ranks(tmp_path) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Run `ranks.py` with an installed or unpacked vLLM; returns what ranks 0 and 1 planned, [steps, numbers] each."""

    def run(release: str, *, steps: int, estimates: str, off: tuple[str, ...] = (), vllm_root: Path | None = None):
        search_path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"DSPARK_TEST_RELEASE": release, "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}
        environment["DSPARK_PATCHES_OFF"] = ",".join(off)
        if vllm_root is not None:
            search_path.insert(0, str(vllm_root))
            environment["VLLM_TARGET_DEVICE"] = "cpu"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
        result = subprocess.run(
            [sys.executable, str(HERE / "ranks.py"), str(tmp_path), str(steps), estimates],
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        return np.load(tmp_path / "0.npy"), np.load(tmp_path / "1.npy")

    return run
