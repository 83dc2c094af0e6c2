"""One adaptive server for all tests that only talk to it."""

from collections.abc import Iterator

import pytest

from tests.e2e.running import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An adaptive server that reports each request's acceptance."""
    directory = tmp_path_factory.mktemp("server")
    with serving(directory, vllm=("--per-request-spec-decode-metrics", "detailed")) as running:
        running.wait_until_ready()
        yield running
