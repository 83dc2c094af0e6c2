"""One adaptive server for all tests that only talk to it, and one for those that change it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TOGETHER, group_of
from tests.e2e.running import Server, serving

KEY = "a-key-for-the-tests"
HERE = Path(__file__).parent
SMALL_SAMPLER = HERE / "small_sampler"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that shares a server must be in its group, or that server would be started twice."""
    for item in items:
        here = item.path.parent == HERE
        shared = [name for name in getattr(item, "fixturenames", ()) if here and name in TOGETHER]
        if shared and group_of(item.nodeid) not in shared:
            raise pytest.UsageError(f"{item.nodeid} shares {shared[0]}: add it to that group in tests/conftest.py")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An adaptive server that reports each request's acceptance."""
    directory = tmp_path_factory.mktemp("server")
    with serving(directory, vllm=("--per-request-spec-decode-metrics", "detailed")) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An adaptive server that asks for `KEY`, and whose rejection sampler takes 64 rows (`small_sampler`)."""
    directory = tmp_path_factory.mktemp("guarded")
    search_path = os.pathsep.join(filter(None, (str(SMALL_SAMPLER), os.environ.get("PYTHONPATH"))))
    with serving(directory, DSPARK_API_KEY=KEY, PYTHONPATH=search_path) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        running.wait_until_ready()
        yield running
