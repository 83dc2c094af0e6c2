"""A real `dspark-serve` in a process of its own, and how the tests talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

BIN = Path(sys.executable).parent
MODEL = "tiny-cpu"
READY_SECONDS = 540
"""Bound on a start: with twenty others at work on two cores it took more than 300, alone a twentieth of it."""


PORTS = range(20_000, 32_768)
"""Below those that the kernel gives to clients: between the choice and the start, another test opens many."""
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""As many as vLLM takes on two cores; but it binds them to one core, the same for every server."""


def free_port() -> int:
    """A port nobody listens on now."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@dataclass
class Server:
    """A server under test.

    Attributes:
        process: The `dspark-serve` process.
        url: Where it listens.
        log: Its output.
        trace: The trace of its decisions.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    trace: Path
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=self.url, timeout=300)

    def wait_until_listening(self) -> None:
        """Return once the port answers at all."""
        self.wait_until(lambda: self.client.get("/livez").status_code == 200)

    def wait_until_ready(self) -> None:
        """Return once the model answers."""
        self.wait_until(lambda: self.client.get("/readyz").status_code == 200)

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Return once something is so; fails the test if the server ends first or takes too long."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if reached():
                    return
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.02)
        raise AssertionError(f"not reached in {READY_SECONDS} s:\n{self.log.read_text()[-4000:]}")

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """A completion's body; anything but 200 fails the test."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 32, "temperature": 0, **fields}
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def samples(self) -> dict[tuple[str, str], float]:
        """The scrape: (name, value of the `plan`, `le` or no label) -> value summed over other labels."""
        text = self.client.get("/metrics").text
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, sample.labels.get("plan") or sample.labels.get("le") or "")
                found[key] = found.get(key, 0.0) + sample.value
        return found

    def decisions(self, kind: str) -> list[dict[str, Any]]:
        """The trace's lines of one kind. The last line may still be being written: only whole ones count."""
        whole, _, _ = self.trace.read_text().rpartition("\n") if self.trace.exists() else ("", "", "")
        records = [json.loads(line) for line in whole.splitlines()]
        return [record for record in records if record["kind"] == kind]

    def descendants(self) -> list[psutil.Process]:
        """The server's process and every child."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def terminate(self, timeout: float = 60) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def engine_cores(server: Server) -> list[psutil.Process]:
    """The processes of the server's engines, by data-parallel rank; none before they are launched."""
    cores = {}
    for process in server.descendants()[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):  # short-lived helpers end meanwhile
            if "EngineCore" in " ".join(process.cmdline()) + process.name():
                cores[process.name(), process.pid] = process
    return [cores[name] for name in sorted(cores)]


@contextlib.contextmanager
def serving(
    directory: Path,
    *arguments: str,
    profile: str = MODEL,
    verification: str = "adaptive",
    vllm: tuple[str, ...] = (),
    **environment: str,
) -> Iterator[Server]:
    """Start a server; whatever happens, nothing of it is left afterwards."""
    port = free_port()
    log, trace = directory / "server.log", directory / "trace.jsonl"
    command = [str(BIN / "dspark-serve"), "up", profile, "--port", str(port), "--verification", verification]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments, "--", *vllm],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **ONE_THREAD, "DSPARK_TRACE_FILE": str(trace), **environment},
        )
    server = Server(process, f"http://127.0.0.1:{port}", log, trace)
    family = [psutil.Process(process.pid)]
    try:
        yield server
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait(10)
        server.client.close()
