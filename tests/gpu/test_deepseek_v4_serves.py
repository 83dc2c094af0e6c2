"""DeepSeek-V4's shape with adaptive verification on one Hopper GPU, in an environment with this package installed.

The first start on a host compiles every kernel: count on five to eight minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PLUGIN = "patches.plugin:register"
TIMEOUT_S = 900


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _served(folder: Path, mode: str, telemetry: Path) -> str:
    """The whole log of one run."""
    if not _installed("vllm"):
        pytest.skip("vLLM is not installed")
    if PLUGIN not in {point.value for point in metadata.entry_points(group="vllm.general_plugins")}:
        pytest.skip("dspark-serve is not installed here, so vLLM would not load its plugin")
    folder.mkdir()
    telemetry.mkdir()
    paths = [str(FOLDER / "triton_compressor")] if not _installed("cutlass") else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "DSPARK_TELEMETRY_DIR": str(telemetry),
        "PYTHONUNBUFFERED": "1",
    }
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.run(
            [sys.executable, str(FOLDER / "deepseek_v4.py"), str(folder), mode],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    text = log.read_text(errors="replace")
    assert process.returncode == 0, text[-8000:]
    return text


def test_adaptive_verification_starts_flattens_and_serves(tmp_path):
    from patches.telemetry.counters import read_all

    log = _served(tmp_path / "model", "adaptive", tmp_path / "telemetry")
    assert "use_flattening=True supports_varlen=False" in log
    assert "refused" not in log
    assert "telemetry is off" not in log
    result = next(line for line in log.splitlines() if line.startswith("RESULT "))
    print(result)
    assert json.loads(result.removeprefix("RESULT "))["token_ms"]["16"]
    # Only the plugin, in the worker's process, writes these.
    (counted,) = read_all(tmp_path / "telemetry")
    print(counted)
    assert counted.proposed >= counted.verified > 0
    assert counted.steps["full"] + counted.steps["trimmed"] > 0
    assert counted.steps["fixed"] == 0
