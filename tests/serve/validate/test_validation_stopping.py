"""A stop is noted, whatever is under way then ends where it waits, and the report is written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from validation_samples import Imagined, begun

from serve.commands.validate import carry_out
from serve.errors import ExitCode
from serve.validate import children
from serve.validate.children import child, exit_code
from serve.validate.endpoint import Endpoint
from serve.validate.load import Target
from serve.validate.plan import Work, plan, works_of
from serve.validate.prompts import prompt_set
from serve.validate.report import write_report
from serve.validate.results import Arm
from serve.validate.servers import RunningServer
from serve.validate.stopping import StoppedError, go_on, stoppable
from serve.validate.store import opened
from tests.processes import gone

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("first", BOTH)
def test_a_stop_is_noted_as_often_as_it_comes_and_forgotten_with_the_run(first: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in BOTH]
    go_on()
    with stoppable():
        go_on()
        for each in (first, *BOTH):
            signal.raise_signal(each)
            with pytest.raises(StoppedError):
                go_on()
    go_on()
    assert [signal.getsignal(each) for each in BOTH] == before


def test_a_child_that_is_waited_for_ends_and_no_other_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    popen = subprocess.Popen

    def counted(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        process = popen(*args, **kwargs)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(children.subprocess, "Popen", counted)

    def run() -> None:
        with child(["/bin/sleep", "600"], tmp_path / "log", os.environ) as process:
            signal.raise_signal(signal.SIGTERM)
            exit_code(process)

    with stoppable():
        for _ in range(2):
            with pytest.raises(StoppedError):
                run()
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])


def test_what_fails_because_of_a_stop_is_no_finding(tmp_path: Path) -> None:
    def measure() -> None:
        with child(["/bin/sleep", "600"], tmp_path / "log", os.environ):
            signal.raise_signal(signal.SIGINT)
            raise ValueError("the server is gone")

    with stoppable(), pytest.raises(StoppedError):
        measure()


def test_children_of_a_child_that_ended_first_end_too(tmp_path: Path) -> None:
    leaves_another = "import subprocess, sys; print(subprocess.Popen(['/bin/sleep', '600']).pid)"
    with child([sys.executable, "-c", leaves_another], tmp_path / "log", os.environ) as process:
        assert exit_code(process) == 0
        left = psutil.Process(int((tmp_path / "log").read_text()))
        assert left.is_running()
    assert gone(left.pid)


def test_a_child_whose_parent_is_gone_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children.os, "getpid", lambda: 1 << 22)
    with child(["/bin/touch", str(tmp_path / "began")], tmp_path / "log", os.environ) as process:
        assert exit_code(process) == 1
    assert not (tmp_path / "began").exists()


@pytest.mark.parametrize("late", [False, True])
def test_a_stopped_run_leaves_no_child_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A stop, and another, while a tool is waited for, or while the report of a whole run is written."""
    wanted = begun(rounds=1, tasks=(), exactness=False)
    with opened(tmp_path / "run", wanted) as store:
        waits = threading.Event()

        def stop_twice() -> None:
            assert waits.wait(60)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.02)

        def measured_by_a_tool(work: Work) -> None:
            if not late and len(servers.measured) == 1:
                with child(["/bin/sleep", "600"], tmp_path / "log", os.environ) as process:
                    waits.set()
                    exit_code(process)

        def written(directory: Path) -> Path:
            waits.set()
            stopping.join()
            return write_report(directory)

        monkeypatch.setattr("serve.validate.report.write_report", written)
        servers = Imagined(before=measured_by_a_tool)
        works = works_of(plan(wanted.protocol))
        before = set(psutil.Process().children())
        stopping = threading.Thread(target=stop_twice)
        stopping.start()
        code = carry_out(plan(wanted.protocol), servers, store)
        assert code == (ExitCode.OK if late else ExitCode.PARTIAL)
        assert set(psutil.Process().children()) == before
        assert servers.open == 0
        assert store.done(works) == frozenset(works if late else works[:1])
        assert Path(capsys.readouterr().out.strip()).exists()


class Hanging(BaseHTTPRequestHandler):
    """A server in fixed mode that never comes to switch to adaptive."""

    wanted: ClassVar[list[str]] = []
    hangs = threading.Event()
    ends = threading.Event()

    def do_GET(self) -> None:
        self._answer({"mode": "fixed", "switchable": True})

    def do_PUT(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["mode"]
        self.wanted.append(wanted)
        if wanted == "adaptive":
            self.hangs.set()
            self.ends.wait(60)
        self._answer({"mode": wanted, "switchable": True})

    def _answer(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_args: Any) -> None: ...


def test_a_server_that_hangs_holds_no_stop_up_and_gets_its_mode_back(tmp_path: Path) -> None:
    stub = ThreadingHTTPServer(("127.0.0.1", 0), Hanging)
    url = f"http://127.0.0.1:{stub.server_port}"
    wanted = begun(profile=None, url=url, rounds=1, arms=(Arm.ADAPTIVE, Arm.FIXED), tasks=(), exactness=False)
    threading.Thread(target=stub.serve_forever, daemon=True).start()

    def stop() -> None:
        assert Hanging.hangs.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        with opened(tmp_path / "run", wanted) as store, contextlib.closing(Endpoint(url)) as endpoint:
            servers = RunningServer(
                Target(endpoint, False, (), {}), wanted.protocol, prompt_set("built-in"), store.directory
            )
            began = time.monotonic()
            assert carry_out(plan(wanted.protocol), servers, store) == ExitCode.PARTIAL
            assert time.monotonic() - began < 30, "it waited for the server's answer"
    finally:
        Hanging.ends.set()
        stopping.join()
        stub.shutdown()
    assert Hanging.wanted == ["adaptive", "fixed"]
