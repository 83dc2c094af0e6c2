"""The fault matrix of the README: what is broken, what the server does, and that every client is told.

The faults that end the server take a start each; all but two of them wait for `make faults`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from serve.errors import ExitCode
from tests.e2e.open_requests import Outcome, open_requests, under_way
from tests.e2e.running import MODEL, Server, engine_cores, serving
from tests.processes import left

STALL_SECONDS = 12
README = (Path(__file__).parents[2] / "README.md").read_text()


def worker(server: Server) -> psutil.Process:
    """The first worker of the first engine."""
    return next(p for p in engine_cores(server)[0].children(recursive=True) if "VLLM::Worker" in "".join(p.cmdline()))


def resource_tracker(server: Server) -> psutil.Process:
    """multiprocessing's helper beside the server."""
    return next(p for p in server.descendants()[1:] if "resource_tracker" in " ".join(p.cmdline()))


def kill_core(server: Server) -> None:
    engine_cores(server)[0].kill()


def kill_worker(server: Server) -> None:
    worker(server).kill()


def stop_core(server: Server) -> None:
    engine_cores(server)[0].send_signal(signal.SIGSTOP)


def stop_worker(server: Server) -> None:
    worker(server).send_signal(signal.SIGSTOP)


def starve_worker(server: Server) -> None:
    """The worker gets no memory any more, where that kills nobody by itself: what it asks for next is refused."""
    worker(server).rlimit(psutil.RLIMIT_AS, (0, 0))


DEADLY = [
    pytest.param(stop_core, ExitCode.ENGINE_STALLED, id="SIGSTOP of the engine core"),
    pytest.param(kill_core, ExitCode.ENGINE_DIED, id="SIGKILL of the engine core"),
    pytest.param(kill_worker, ExitCode.ENGINE_DIED, id="SIGKILL of a worker", marks=pytest.mark.robustness),
    pytest.param(stop_worker, ExitCode.ENGINE_STALLED, id="SIGSTOP of a worker", marks=pytest.mark.robustness),
    pytest.param(starve_worker, ExitCode.ENGINE_DIED, id="no memory for a worker", marks=pytest.mark.robustness),
]


def seconds_until_told(requests: dict[str, Future[Outcome]], since: float) -> float:
    """Until the last client has its error; a client that was cut, or given a result, fails the test."""
    for shape, future in requests.items():
        outcome = future.result()
        assert outcome.error is not None, f"{shape}: {outcome}"
        assert outcome.error["message"], shape
        assert outcome.status == (200 if "stream" in shape else 500), shape
        assert "stream" not in shape or outcome.text.endswith("\n\n"), shape
    return time.monotonic() - since


@pytest.mark.parametrize(("fault", "exit_code"), DEADLY)
def test_an_engine_that_cannot_go_on_ends_the_server_and_every_client_is_told(
    tmp_path: Path, fault: Callable[[Server], None], exit_code: ExitCode
) -> None:
    stalls = exit_code is ExitCode.ENGINE_STALLED
    with serving(tmp_path, "--stall-seconds", str(STALL_SECONDS)) as server:
        server.wait_until_ready()
        family = server.descendants()
        with open_requests(server) as requests:
            began = time.monotonic()
            fault(server)
            server.wait_until(lambda: server.client.get("/livez").status_code == 503)
            noticed = time.monotonic() - began
            # Two seconds are promised; the rest is this machine's, which runs other things.
            assert noticed < (STALL_SECONDS + 3 if stalls else 5)
            assert seconds_until_told(requests, began) - noticed < 10
        assert server.process.wait(90) == exit_code
        log = server.log.read_text()
        assert f"exit code {exit_code}: " in log.splitlines()[-1]
        assert not left(family)
    records = [json.loads(line.partition("stall: ")[2]) for line in log.splitlines() if "] stall: " in line]
    assert len(records) == stalls
    for record in records:
        assert record["requests"] == 3
        assert record["mode"] == "adaptive"
        assert record["last_step"] > 0
        assert record["last_budgets"]
        stacks = {row["process"]: row["stacks"] for row in record["stacks"]}
        assert set(stacks) == {"server", "engine core", "worker"}
        assert "_stall_record" in stacks["server"]
        stopped = "engine core" if fault is stop_core else "worker"
        assert "stopped" in stacks.pop(stopped)
        assert all('File "' in text for text in stacks.values())


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of four MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path_factory.mktemp("small")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture(scope="module")
def hardy(tmp_path_factory: pytest.TempPathFactory, small_disk: Path) -> Iterator[Server]:
    """A server for the faults that it survives."""
    directory = tmp_path_factory.mktemp("hardy")
    counters, caches = small_disk / "counters", small_disk / "caches"
    counters.mkdir()
    environment = {"DSPARK_TELEMETRY_DIR": str(counters)}
    environment |= {name: str(caches) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")}
    # vLLM's own stays: filling it anew takes another import of vLLM.
    environment["VLLM_CACHE_ROOT"] = os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache/vllm"))
    with serving(directory, "--stall-seconds", str(STALL_SECONDS), "--drain-seconds", "2", **environment) as server:
        server.wait_until_ready()
        yield server


def works(server: Server) -> bool:
    """Whether requests are answered and the scrape too."""
    answer = server.complete("def f(x):", max_tokens=8, ignore_eos=True)
    return answer["usage"]["completion_tokens"] == 8 and server.client.get("/metrics").status_code == 200


def test_a_full_disk_of_counters_and_caches_loses_nothing(hardy: Server, small_disk: Path) -> None:
    """Counters lie in blocks of their own, and a cache that cannot be written is done without."""
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(8 << 20))
    before = hardy.samples()["dspark_proposed_draft_tokens_total", ""]
    assert works(hardy)
    hardy.wait_until(lambda: hardy.samples()["dspark_proposed_draft_tokens_total", ""] > before)
    filler.unlink()


@pytest.mark.robustness
def test_a_clock_that_jumps_is_not_noticed(tmp_path: Path) -> None:
    """On a server that is not asked to end in good order: the moved clock breaks a sleep now and then."""
    library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
    if library is None:
        pytest.skip("libfaketime moves the clock, and is not installed")
    clock = tmp_path / "clock"
    clock.write_text("+0")
    moved = {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    with serving(tmp_path, "--stall-seconds", str(STALL_SECONDS), **moved) as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_ready()
        answer = pool.submit(server.complete, "def f(x):", max_tokens=96, ignore_eos=True)
        for offset in ("+86400", "-86400", "+0"):
            clock.write_text(offset)
            time.sleep(1.5)
            assert server.client.get("/livez").status_code == 200
            assert server.client.get("/dspark/status").status_code == 200
        assert answer.result()["usage"]["completion_tokens"] == 96
        assert works(server)


@pytest.mark.parametrize("which", [signal.SIGSTOP, signal.SIGKILL])
def test_the_loss_of_a_helper_is_survived(hardy: Server, which: signal.Signals) -> None:
    resource_tracker(hardy).send_signal(which)
    time.sleep(1)
    assert works(hardy)


def test_counters_that_are_removed_are_absent_and_the_server_goes_on(hardy: Server, small_disk: Path) -> None:
    for directory in (small_disk / "counters").iterdir():
        shutil.rmtree(directory)
    assert works(hardy)
    assert "dspark_proposed_draft_tokens_total" not in {name for name, _ in hardy.samples()}
    assert hardy.client.get("/dspark/status").status_code == 200


def test_a_port_that_is_taken_is_named(hardy: Server, tmp_path: Path) -> None:
    with serving(tmp_path, "--port", hardy.url.rsplit(":", 1)[1]) as second:
        assert second.process.wait(120) == ExitCode.BAD_INPUT
        assert "Address already in use" in second.log.read_text()
    assert works(hardy)


def test_a_broken_handshake_of_a_websocket_is_refused(hardy: Server) -> None:
    """And does not break the drain that follows."""
    with socket.create_connection(("127.0.0.1", int(hardy.url.rsplit(":", 1)[1]))) as odd:
        upgrade = b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        odd.sendall(upgrade + b"a: b\r\n" * 200 + b"\r\n")
        answer = http.client.HTTPResponse(odd)
        answer.begin()
        assert answer.status == 400
    assert works(hardy)


def test_a_drain_tells_whoever_is_not_done_and_waits_for_no_body(hardy: Server) -> None:
    """The last test of this server."""
    port = int(hardy.url.rsplit(":", 1)[1])
    family = hardy.descendants()
    with open_requests(hardy) as requests, socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        time.sleep(0.5)
        assert under_way(hardy) == 3
        hardy.process.send_signal(signal.SIGTERM)
        hardy.wait_until(lambda: hardy.client.get("/readyz").status_code == 503)
        answer = http.client.HTTPResponse(half)
        answer.begin()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        refused = hardy.client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        for shape, future in requests.items():
            outcome = future.result()
            assert outcome.error is not None, f"{shape}: {outcome}"
            assert "stopping" in outcome.error["message"]
            assert outcome.status == (200 if "stream" in shape else 503)
    assert hardy.process.wait(60) == ExitCode.OK
    assert not left(family)


def test_every_fault_stands_in_the_readme() -> None:
    for parameter in DEADLY:
        assert re.search(rf"^\| {parameter.id}( |,)", README, re.MULTILINE)
