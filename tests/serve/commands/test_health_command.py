"""The container's health check, against a real server on a port."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from serve.commands.health import health_command
from serve.errors import ExitCode


class Answering(BaseHTTPRequestHandler):
    """Answers `/livez` with the server's status."""

    def do_GET(self) -> None:
        status = self.server.status if self.path == "/livez" else 404  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"state": "starting"}')

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    running = HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(("status", "code"), [(200, ExitCode.OK), (503, ExitCode.START_FAILED)])
def test_it_says_what_livez_says(server, host, status, code, capsys):
    server.status = status
    assert health_command(host, server.server_port) == code
    assert capsys.readouterr().out == '{"state": "starting"}\n'


def test_a_port_without_a_server_is_not_healthy(server, capsys):
    port = server.server_port
    server.server_close()
    assert health_command("127.0.0.1", port) == ExitCode.START_FAILED
    assert f"no server answers on 127.0.0.1:{port}" in capsys.readouterr().err
