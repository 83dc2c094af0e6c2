"""The states and what each allows."""

import pytest

from serve.errors import ExitCode
from serve.lifecycle import Lifecycle, Phase, State


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_normal_life() -> None:
    clock = Clock()
    life = Lifecycle(clock)
    seen = [life.state]
    for phase in (Phase.IMPORTING, Phase.CONFIGURING, Phase.LOADING, Phase.BUILDING):
        life.begin(phase)
        assert life.phase is phase
    clock.now += 7
    assert life.seconds == 7
    for step in (life.ready, life.drain, life.stop):
        step()
        seen.append(life.state)
        assert life.seconds == 0
    assert seen == [State.STARTING, State.READY, State.DRAINING, State.STOPPED]
    assert life.exit_code is ExitCode.OK


def test_progress_rises_to_one() -> None:
    progress = [phase.progress for phase in Phase]
    assert progress == sorted(progress)
    assert progress[0] == 0
    assert progress[-1] == 1


@pytest.mark.parametrize("before", [State.STARTING, State.READY, State.DRAINING])
def test_the_first_failure_counts(before: State) -> None:
    life = Lifecycle(state=before)
    life.fail("the engine died", ExitCode.ENGINE_DIED)
    life.fail("and so did its pipe", ExitCode.START_FAILED)
    life.ready()
    life.drain()
    assert (life.state, life.reason, life.exit_code) == (State.FAILED, "the engine died", ExitCode.ENGINE_DIED)


def test_a_drained_server_does_not_become_ready_again() -> None:
    life = Lifecycle()
    life.drain()
    life.ready()
    assert life.state is State.DRAINING


def test_the_phase_does_not_go_back_after_the_start() -> None:
    life = Lifecycle()
    life.ready()
    life.begin(Phase.LOADING)
    assert life.phase is Phase.READY
