"""One model over two nodes, both on this machine: a server, and ranks without one."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.running import Server, free_port, serving
from tests.processes import left

PROMPTS = [f"def function_{number}(argument):" for number in range(8)]


def node(rank: int, master: int, rpc: int) -> tuple[str, ...]:
    """Words after the dashes for one of two nodes, as the chart gives them."""
    where = ("--master-addr", "localhost", "--master-port", str(master), "--data-parallel-rpc-port", str(rpc))
    return ("--nnodes", "2", "--node-rank", str(rank), *where)


def test_a_headless_node_has_probes_and_no_api_and_ends_with_its_ranks(tmp_path: Path) -> None:
    words = (*node(1, free_port(), free_port()), "--data-parallel-size", "2")
    with serving(tmp_path, "--headless", "--drain-seconds", "2", vllm=words) as worker:
        worker.wait_until_listening()
        worker.wait_until_ready()
        refused = worker.client.get("/v1/models")
        assert refused.status_code == 503
        assert "another node" in refused.json()["error"]["message"]
        said = worker.client.get("/dspark/mode").json()
        assert (said["mode"], said["configured"], said["engines"]) == (None, "adaptive", [])
        assert "switch the mode there" in said["reason"]
        assert "\ndspark_mode{" not in metrics(worker), "node 0 may switch it, and does not tell"
        assert "\ndspark_configured_mode{" in metrics(worker)
        ranks = next(p for p in worker.descendants()[1:] if "vllm.entrypoints.cli.main" in p.cmdline())
        ranks.send_signal(signal.SIGKILL)
        assert worker.process.wait(30) == 3
        assert "headless process ended with code -9" in worker.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "engines"), [("--data-parallel-size", 2), ("--tensor-parallel-size", 1)])
def test_two_nodes_serve_one_model(tmp_path: Path, size: str, engines: int) -> None:
    ports = free_port(), free_port()
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    drain = ("--drain-seconds", "5")
    with (
        serving(tmp_path / "0", *drain, vllm=(*node(0, *ports), size, "2")) as server,
        serving(tmp_path / "1", *drain, "--headless", vllm=(*node(1, *ports), size, "2")) as worker,
    ):
        server.wait_until(lambda: server.client.get("/readyz").status_code == 200)
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(server.complete, PROMPTS))
        assert all(answer["usage"]["completion_tokens"] == 32 for answer in answers)
        # Every engine's verification is counted where it runs, and nowhere twice.
        counted = [text.count("\ndspark_acceptance_length_count{") for text in map(metrics, (server, worker))]
        assert counted == ([1, 1] if engines == 2 else [1, 0])
        # Stopped together, as a pod group is: ranks outlive the server that needs them, and nobody fails.
        children = [child for running in (server, worker) for child in running.descendants()]
        for running in (server, worker):
            running.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert worker.process.wait(60) == 0
        assert not left(children)


def metrics(running: Server) -> str:
    return running.client.get("/metrics").text
