"""Which tests run in one process where several processes run them (pytest-xdist), and how hypothesis runs them."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# How long an example takes says something of the machine, and a first one imports vLLM: no test is timed.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

END_TO_END = "tests/e2e/test_"
TOGETHER = {
    "server": (
        *(f"{END_TO_END}{name}.py" for name in ("chart_completion", "clients", "fuzz", "not_adaptive")),
        *(f"{END_TO_END}{name}.py" for name in ("observability", "sampling", "validate", "verification")),
        f"{END_TO_END}start.py::test_the_printed_curl_line_works",
        f"{END_TO_END}validate.py::test_bench_switches_a_running_server_and_puts_it_back",
    ),
    "guarded": tuple(f"{END_TO_END}{name}.py" for name in ("keys", "modes", "page")),
    "hardy": (f"{END_TO_END}faults.py",),
    "churn": (f"{END_TO_END}telemetry.py",),
    "two": (f"{END_TO_END}two_engines.py",),
    "two_ranks": (f"{END_TO_END}drain_together.py",),
    "engines with patches off": ("tests/patches/test_combinations.py",),
    "the tiny pair, decoded": ("tests/serve/tiny/test_tiny_pair.py",),
    "vLLM's parser, imported": ("tests/serve/preflight/test_preflight_parser.py",),
}
"""What is made once for many tests, a server by its fixture's name, and where those tests are."""


def group_of(node_id: str) -> str:
    """The group whose tests run in one process, in order; a test that shares nothing is alone in its own."""
    for group, places in TOGETHER.items():
        if node_id.startswith(places):
            return group
    file, _, test = node_id.partition("::")
    if file.startswith("tests/patches/releases/"):
        # A probe of a release answers once for many tests, and parsed modules are kept.
        return file + "".join(re.findall(r"\b0\.\d+\.\d+\b", test)[:1])
    return node_id


class Together(LoadScopeScheduling):
    """Gives a process a group at a time, the largest first.

    xdist's own `loadgroup` would, but 3.8.0 cannot mark a group in the node ids of pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together:
    return Together(config, log)
