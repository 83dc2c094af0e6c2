"""The handshake with real CPU engines, each of whose processes is its own."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

PLUGIN_MISSING = (
    "engine core 0 has not loaded the dspark plugin: unset VLLM_PLUGINS or add 'dspark' to it, and look for "
    "'Failed to load plugin dspark' in the log"
)
OTHER_PATCHES = "give every process the same vLLM, the same dspark-serve and the same DSPARK_PATCHES_OFF"

WHEN_IMPORTED = """
    import multiprocessing, os, sys
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == {module!r}:
                {action}
    sys.meta_path.insert(0, Finder())
"""


@pytest.fixture
def handshake(tmp_path):
    """Start an engine with processes that run `action` before they import `module`; returns what was said."""

    def run(*, ranks: int = 1, module: str = "", action: str = "pass", **environment: str) -> list[str]:
        (tmp_path / "sitecustomize.py").write_text(dedent(WHEN_IMPORTED).format(module=module, action=action))
        search_path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
        result = subprocess.run(
            [sys.executable, str(HERE / "handshake_engine.py"), str(ranks)],
            env=os.environ
            | {
                "PYTHONPATH": search_path,
                "VLLM_USE_V2_MODEL_RUNNER": "0",
                "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1",
            }
            | environment,
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
        said = [line.removeprefix("said: ") for line in result.stdout.splitlines() if line.startswith("said: ")]
        assert len(said) == 2, (result.stdout + result.stderr)[-4000:]
        return said

    return run


def test_every_process_agrees_and_only_on_the_right_digest(handshake):
    agreed, disagreed = handshake()
    assert agreed == "every process agrees"
    assert disagreed.startswith("engine core 0 has other patches than the server (adaptive-manager, ")
    assert disagreed.endswith(OTHER_PATCHES)


def test_a_plugin_that_vllm_was_told_to_leave_out(handshake):
    assert handshake(VLLM_PLUGINS="another") == [PLUGIN_MISSING, PLUGIN_MISSING]


def test_a_plugin_whose_import_fails_and_is_swallowed(handshake):
    said = handshake(module="patches.plugin", action="raise ImportError('broken on purpose')")
    assert said == [PLUGIN_MISSING, PLUGIN_MISSING]


def test_one_worker_that_differs(handshake):
    switch_off = "os.environ['DSPARK_PATCHES_OFF'] = 'verification-telemetry'"
    said, _ = handshake(
        ranks=2,
        module="patches.install",
        action=f"if multiprocessing.current_process().name.endswith('Worker-1'): {switch_off}",
    )
    assert said.startswith("worker 1 of engine 0 has other patches than the server (adaptive-manager, ")
    assert said.endswith(OTHER_PATCHES)
