"""One store, one Debian and one CPU image for all tests that build."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.building import KEPT_STORE, Builder, make_base, make_wheels, why_not


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """A store of images with `BASE` in it, and the wheels in dist/."""
    if reason := why_not():
        pytest.skip(reason)
    made = Builder.in_folder(Path(KEPT_STORE) if KEPT_STORE else tmp_path_factory.mktemp("images"))
    try:
        make_wheels()
        make_base(made)
        yield made
    finally:
        if not KEPT_STORE:
            made.remove()
