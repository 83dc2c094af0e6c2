import pytest

from patches.ledger import RELEASES
from patches.releases import unpacked


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "releases":
            item.add_marker(pytest.mark.releases)


@pytest.fixture(params=RELEASES)
def release(request) -> str:
    return request.param


@pytest.fixture
def vllm_root(release):
    """The unpacked release; a missing one fails the test with the command that fetches it."""
    return unpacked(release)
