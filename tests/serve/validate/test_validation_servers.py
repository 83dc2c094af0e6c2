"""Children never outlive what they were started for, and what a start took is read off vLLM's own line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patches.install import vllm_root
from serve.profile import load
from serve.validate.children import child, complaint, tool_environment
from serve.validate.servers import captured, tokenizer_words
from serve.validate.stopping import StoppedError
from tests.processes import gone

PARENT_OF_ANOTHER = (
    "import subprocess, sys, time\n"
    "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(other.pid, flush=True)\n"
    "time.sleep(600)\n"
)


def formats(beginning: str) -> list[str]:
    """The installed vLLM's log formats of graph capture that begin so."""
    root = vllm_root()
    assert root is not None
    texts = [path.read_text() for path in (root / "vllm/v1/worker").rglob("*.py")]
    return [found for text in texts for found in re.findall(rf'"({beginning} capturing finished[^"]*)"', text)]


def test_graph_capture_is_read_off_vllms_line() -> None:
    decoders = formats("Graph")
    assert len(decoders) == 2  # of both model runners
    for line in decoders:
        logged = f"(EngineCore pid=71) INFO 11-28 10:11:12 [model_runner.py:1128] {line}\n"
        assert captured("x\n" + logged % (12, 1.63)) == (12, 1.63)
        assert captured(logged % (12, 1.63) + logged % (14, 1.6)) == (14, 1.63)  # of two ranks
    for line in formats("Encoder graph"):
        assert captured(line % (99, 9.99, 3)) == (None, None)
    assert captured("") == (None, None)


def first_number(log: Path) -> int:
    for _ in range(600):
        if log.exists() and (text := log.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.05)
    raise AssertionError("the child said nothing")


@pytest.mark.parametrize("error", [None, StoppedError, RuntimeError])
def test_a_child_and_its_children_end_with_the_block(tmp_path: Path, error: type[BaseException] | None) -> None:
    log = tmp_path / "log"
    pids = []
    with pytest.raises(error) if error else open(os.devnull):  # noqa: SIM117
        with child([sys.executable, "-c", PARENT_OF_ANOTHER], log, os.environ) as process:
            pids = [process.pid, first_number(log)]
            assert os.getsid(process.pid) == process.pid
            if error is not None:
                raise error
    assert all(gone(pid) for pid in pids)


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import os, sys; from pathlib import Path; from serve.validate.children import child\n"
        f"with child([sys.executable, '-c', {PARENT_OF_ANOTHER!r}], Path({str(log)!r}), os.environ) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    process.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        grandchild = first_number(log)
        parent.send_signal(signal.SIGKILL)
    try:
        assert gone(pid)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_the_line_that_names_the_error_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert complaint(log) == "it said nothing"
    log.write_text("INFO begun\n  File x\nOSError: /nowhere is no tokenizer\nnanobind: leaked 4 instances!\n\n")
    assert complaint(log) == "OSError: /nowhere is no tokenizer"
    log.write_text("first\nlast\n")
    assert complaint(log) == "last"


def test_the_key_reaches_the_tools_under_their_own_name_only() -> None:
    found = tool_environment({"DSPARK_API_KEY": "a", "VLLM_API_KEY": "b", "HOME": "/h"}, "a")
    assert found == {"HOME": "/h", "OPENAI_API_KEY": "a", "VLLM_PLUGINS": ""}


def test_a_key_that_is_meant_for_another_server_is_not_sent() -> None:
    assert tool_environment({"OPENAI_API_KEY": "c"}, None)["OPENAI_API_KEY"] == "none"
    assert tool_environment({"OPENAI_API_KEY": "c"}, "a")["OPENAI_API_KEY"] == "a"


def test_the_tokenizer_is_the_profiles_own() -> None:
    assert tokenizer_words(load("tiny-cpu"))[1].endswith("serve/tiny/target")
    assert tokenizer_words(load("deepseek-v4.1-flash-mi355x4")) == (
        *("--tokenizer", "deepseek-ai/DeepSeek-V4.1-Flash"),
        *("--tokenizer-mode", "deepseek_v41"),
        "--trust-remote-code",
    )
