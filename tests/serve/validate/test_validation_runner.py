"""Going through a plan: interrupted anywhere it resumes to the same records, and what fails is said and tried again."""

from __future__ import annotations

import io
import random
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from validation_samples import Imagined, begun, protocol

from serve.validate.load import LoadError
from serve.validate.plan import Cell, Serving, Work, plan, works_of
from serve.validate.progress import Reporting
from serve.validate.results import Arm, Exactness, Run
from serve.validate.runner import run
from serve.validate.servers import ServerError
from serve.validate.stopping import StoppedError
from serve.validate.store import Store, opened

SERVINGS = plan(protocol(rounds=3))
WORKS = list(works_of(SERVINGS))


def go(directory: Path, servers: Imagined, now: Run | None = None) -> tuple[list[str], str]:
    """Run or resume; returns the problems and what was said."""
    said = io.StringIO()
    with opened(directory, now or begun(rounds=3)) as store, Reporting(len(WORKS), Console(file=said)) as reporting:
        return run(SERVINGS, servers, store, reporting), said.getvalue()


def records(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*.json"))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The records of a run that nothing interrupted."""
    directory = tmp_path_factory.mktemp("whole")
    servers = Imagined()
    assert go(directory, servers)[0] == []
    assert servers.measured == WORKS
    return records(directory)


@pytest.mark.parametrize("seed", range(10))
def test_interrupted_at_ten_random_points_it_resumes_to_the_same_records(
    tmp_path: Path, whole: dict[str, bytes], seed: int
) -> None:
    draws = random.Random(seed)
    measured: list[Work] = []
    for _ in range(10):
        left = draws.randrange(1, 5)

        def interrupt(work: Work) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise StoppedError

        def interrupt_a_start(serving: Serving, at: int = draws.randrange(8)) -> None:
            if not at:
                raise StoppedError

        servers = Imagined(interrupt, interrupt_a_start)
        with suppress(StoppedError):  # unless nothing is left to interrupt
            go(tmp_path, servers)
        assert servers.open == 0
        measured += servers.measured
    last = Imagined()
    assert go(tmp_path, last)[0] == []
    assert records(tmp_path) == whole
    assert measured + last.measured == WORKS  # nothing twice, nothing out of turn


def test_what_cannot_be_measured_is_said_and_tried_again(tmp_path: Path, whole: dict[str, bytes]) -> None:
    bad = Cell(1, Arm.FIXED, 4)

    def fail(work: Work) -> None:
        if work == bad:
            raise LoadError("vllm bench serve ended with 1")

    problems, said = go(tmp_path, Imagined(fail))
    assert problems == ["round 1, fixed at concurrency 4: vllm bench serve ended with 1"]
    assert problems[0] in said
    assert len(records(tmp_path)) == len(whole) - 1
    again = Imagined()
    assert go(tmp_path, again)[0] == []
    assert again.measured == [bad]
    assert records(tmp_path) == whole


def test_a_server_that_does_not_start_leaves_the_others_to_be_measured(tmp_path: Path) -> None:
    def refuse(serving: Serving) -> None:
        if Arm.OFF in serving.arms:
            raise ServerError("dspark-serve up ended with 1: no memory")

    servers = Imagined(starting=refuse)
    problems, _ = go(tmp_path, servers)
    assert len(problems) == sum(work.arm is Arm.OFF for work in WORKS)
    assert [work for work in WORKS if work.arm is not Arm.OFF] == servers.measured
    assert not list((tmp_path / "exactness").glob("*.json"))


def test_a_server_that_dies_ends_what_was_to_be_measured_on_it_alone(tmp_path: Path) -> None:
    def die(work: Work) -> None:
        if work == Cell(1, Arm.OFF, 4):
            raise ServerError("the server ended with exit code 3 while it was measured")

    problems, _ = go(tmp_path, Imagined(die))
    first = SERVINGS[0].works
    assert len(problems) == len(first) - first.index(Cell(1, Arm.OFF, 4))
    assert "exit code 3" in problems[0]


def test_exactness_compares_each_arm_with_off(tmp_path: Path) -> None:
    go(tmp_path, Imagined())
    store = Store(tmp_path)
    assert sorted(path.stem for path in (tmp_path / "exactness").iterdir()) == ["adaptive", "fixed"]
    found = store.read("exactness/fixed", Exactness)
    assert found is not None
    assert (found.greedy_equal, found.greedy_prompts, found.raw) == (2, 2, "raw/exactness-fixed.json")
    assert set(found.p_values) == {0, 1, 2, 3}


def test_lines_say_how_far_it_is(tmp_path: Path) -> None:
    _, said = go(tmp_path, Imagined())
    lines = said.splitlines()
    assert lines[0] == "waiting for the server of off"
    assert lines[2] == (
        f"[1/{len(WORKS)}] round 1, off at concurrency 1: 64.0 tokens/s, 0 of 4 requests failed; about 0 min left"
    )
    assert f"[{len(WORKS)}/{len(WORKS)}]" in said


def test_a_terminal_has_a_bar_with_the_time_left(tmp_path: Path) -> None:
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=120)
    with opened(tmp_path, begun(rounds=3)) as store, Reporting(len(WORKS), console) as reporting:
        run(SERVINGS, Imagined(), store, reporting)
    assert f"{len(WORKS)}/{len(WORKS)}" in said.getvalue()
    assert "min left" in said.getvalue()
