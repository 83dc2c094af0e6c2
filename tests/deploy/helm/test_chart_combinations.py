"""Real Helm renders every combination of hardware, nodes and switches to what Kubernetes takes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest
from helm import CHART, HARDWARE, HelmError, render, run, workload
from switches import ALL_OFF, ALL_ON, BASES, SWITCHES, check, fitted

PARTS = 11
"""Parts that the pairs of switches are tested in; no divisor of the bases' number, or a part would have one base."""


def verify(base: tuple[str, int, str], names: list[str]) -> bool:
    """Render and check one combination; False where it has no meaning."""
    values = fitted(*base, names)
    if values is None:
        return False
    try:
        documents = render(values)
    except HelmError as error:
        raise AssertionError(f"{base} with {names}: {error}") from error
    check(documents, values)
    return True


@pytest.mark.parametrize("hardware", HARDWARE)
def test_it_lints(hardware: str) -> None:
    assert "0 chart(s) failed" in run("lint", "--strict", str(CHART), values={"hardware": hardware})


@pytest.mark.parametrize(("hardware", "nodes", "cache"), BASES)
def test_every_base_renders_alone_with_everything_on_and_with_everything_off(
    hardware: str, nodes: int, cache: str
) -> None:
    base = (hardware, nodes, cache)
    assert verify(base, [])
    assert verify(base, [name for name in ALL_ON if name != "download" or cache == "shared"])
    assert verify(base, ALL_OFF)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_renders_alone_on_every_hardware(name: str) -> None:
    bases = [("cuda-hopper", 1, "shared"), ("rocm-gfx950", 2, "shared"), ("cpu", 1, "perReplica")]
    assert [verify(base, [name]) for base in bases][:2] == [True, True]


@pytest.mark.parametrize(
    ("nodes", "cache", "kind"),
    [
        (1, "perReplica", "StatefulSet"),
        (1, "shared", "Deployment"),
        (1, "none", "Deployment"),
        (2, "perReplica", "LeaderWorkerSet"),
        (2, "shared", "LeaderWorkerSet"),
    ],
)
def test_nodes_and_cache_choose_the_workload(nodes: int, cache: str, kind: str) -> None:
    documents = render({"hardware": "cuda-hopper", "nodes": nodes, "cache": {"mode": cache}})
    assert workload(documents)["kind"] == kind


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_of_switches_renders(part: int) -> None:
    """Each on one hardware and number of nodes, in turn."""
    bases = [base for base in BASES if base[2] == "shared"]
    pairs = list(combinations(SWITCHES, 2))
    cases = [(bases[number % len(bases)], list(pair)) for number, pair in enumerate(pairs)]
    with ThreadPoolExecutor(2) as pool:
        rendered = list(pool.map(lambda case: verify(*case), cases[part::PARTS]))
    assert sum(rendered) > 0.9 * len(rendered)
