"""An OpenAI server over real sockets that fails in every way a real one can, one way a request, in turns."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WAYS = ("whole", "refused", "cut off", "error in the stream", "short", "whole without metrics")


class Handler(BaseHTTPRequestHandler):
    """Answers `/v1/completions` in turns as `WAYS` says; has one model, no metrics and no chat."""

    protocol_version = "HTTP/1.1"
    turns = itertools.count()
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._whole(200, {"data": [{"id": "failing"}]})
        else:
            self._whole(404, {"error": "no such path"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self._whole(404, {"error": "no such path"})
            return
        with self.lock:
            way = WAYS[next(self.turns) % len(WAYS)]
        if way == "refused":
            self._whole(503, {"error": "busy"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        tokens = body["max_tokens"] if way.startswith("whole") else 2
        for _ in range(tokens):
            self._event({"choices": [{"text": "a"}]})
        if way == "cut off":
            self.close_connection = True
            return
        if way == "error in the stream":
            self._event({"error": {"message": "the engine died"}})
        else:
            self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def failing_server() -> Iterator[str]:
    """The server's URL, until the block ends."""
    Handler.turns = itertools.count()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
