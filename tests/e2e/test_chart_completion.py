"""What `helm test` runs in its pod, run here against a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.running import Server, free_port

SCRIPT = Path(__file__).parents[2] / "deploy" / "helm" / "dspark-serve" / "files" / "ask_completion.py"


def ask(url: str) -> subprocess.CompletedProcess[str]:
    """The pod's command line, with another URL."""
    command = [sys.executable, "-c", SCRIPT.read_text(), url]
    environment = {**os.environ, "API_KEY": "any"}
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)


def test_helm_s_test_passes_on_a_server_that_completes(server: Server) -> None:
    done = ask(server.url)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny-cpu completed: ")


@pytest.mark.parametrize("path", ["", "/nowhere"])
def test_helm_s_test_fails_where_nothing_completes(server: Server, path: str) -> None:
    url = server.url + path if path else f"http://127.0.0.1:{free_port()}"
    assert ask(url).returncode == 1
