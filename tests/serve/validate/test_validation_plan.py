"""The plan of a validation: everything once, servers and arms counterbalanced, and only what is missing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from validation_samples import protocol, protocols

from serve.validate.plan import Cell, Sampling, Task, plan, remaining, works_of
from serve.validate.results import Arm, Protocol


@given(protocols(), st.sampled_from([None, 1024, 8192, 131072]))
def test_everything_is_planned_once_where_its_arm_is_served(asked: Protocol, context: int | None) -> None:
    servings = plan(asked, context)
    works = works_of(servings)
    wanted = [Cell(r, a, c) for r in range(1, asked.rounds + 1) for a in asked.arms for c in asked.concurrencies]
    wanted += [Task(a, t) for a in asked.arms for t in asked.tasks]
    wanted += [Sampling(a) for a in asked.arms if asked.exactness]
    assert Counter(works) == Counter(wanted)
    assert all(work.arm in serving.arms for serving in servings for work in serving.works)
    assert all(serving.arms == (Arm.OFF,) or Arm.OFF not in serving.arms for serving in servings)
    assert len({serving.name for serving in servings}) == len(servings)
    assert len({work.record for work in works}) == len(works)


@given(protocols())
def test_the_same_protocol_has_the_same_plan(asked: Protocol) -> None:
    assert plan(asked) == plan(asked)


@given(protocols())
def test_neighbouring_rounds_share_a_start_and_no_start_serves_more_than_two(asked: Protocol) -> None:
    servings = plan(asked)
    rounds = [sorted({work.round for work in serving.works if isinstance(work, Cell)}) for serving in servings]
    assert all(found[-1] - found[0] <= 1 for found in rounds)
    groups = len({serving.arms for serving in servings})
    if groups > 1:
        assert len(servings) == asked.rounds * (groups - 1) + 1
        assert all(a.arms != b.arms for a, b in pairwise(servings))


def test_three_rounds_take_their_servers_in_turns() -> None:
    speculating = (Arm.FIXED, Arm.ADAPTIVE)
    servings = plan(protocol(rounds=3))
    assert [(serving.round, serving.arms) for serving in servings] == [
        (1, (Arm.OFF,)),
        (1, speculating),
        (2, (Arm.OFF,)),
        (3, speculating),
    ]
    assert [serving.name for serving in servings] == ["round-1-off", "round-1-fixed", "round-2-off", "round-3-fixed"]


def test_with_a_server_an_arm_each_is_started_as_what_it_measures() -> None:
    servings = plan(protocol(rounds=3, server_per_arm=True))
    assert [(serving.round, serving.arms, serving.verification) for serving in servings] == [
        (1, (Arm.OFF,), Arm.OFF),
        (1, (Arm.FIXED,), Arm.FIXED),
        (1, (Arm.ADAPTIVE,), Arm.ADAPTIVE),
        (2, (Arm.FIXED,), Arm.FIXED),
        (2, (Arm.OFF,), Arm.OFF),
        (3, (Arm.FIXED,), Arm.FIXED),
        (3, (Arm.ADAPTIVE,), Arm.ADAPTIVE),
    ]
    assert all(work.arm is serving.arms[0] for serving in servings for work in serving.works)


@given(protocols())
def test_a_server_is_adaptive_where_it_has_to_be_and_fixed_where_it_can(asked: Protocol) -> None:
    for serving in plan(asked):
        assert serving.verification in serving.arms
        assert (serving.verification is Arm.ADAPTIVE) == (Arm.ADAPTIVE in serving.arms)


@given(st.integers(1, 6), st.integers(1, 7))
def test_each_arm_of_a_server_is_first_as_often_as_the_other(rounds: int, concurrencies: int) -> None:
    asked = protocol(
        arms=(Arm.FIXED, Arm.ADAPTIVE), rounds=rounds, concurrencies=tuple(range(1, concurrencies + 1)), tasks=()
    )
    cells = [work for work in works_of(plan(asked)) if isinstance(work, Cell)]
    first = Counter(one.arm for one, other in zip(cells[::2], cells[1::2], strict=True) if one.round == other.round)
    assert abs(first[Arm.FIXED] - first[Arm.ADAPTIVE]) <= 1


@given(protocols(), st.data())
def test_what_remains_is_what_is_not_done_in_the_same_order(asked: Protocol, data: st.DataObject) -> None:
    servings = plan(asked)
    works = works_of(servings)
    done = data.draw(st.sets(st.sampled_from(works)))
    left = remaining(servings, done)
    assert list(works_of(left)) == [work for work in works if work not in done]
    assert all(serving.works for serving in left)


def test_a_task_longer_than_the_profiles_context_has_servers_of_its_own() -> None:
    servings = plan(protocol(tasks=("gsm8k", "niah-16384", "niah-65536")), context=8192)
    long = [serving for serving in servings if serving.max_model_len is not None]
    assert [(s.arms, s.max_model_len) for s in long] == [((Arm.OFF,), 65792), ((Arm.FIXED, Arm.ADAPTIVE), 65792)]
    assert {work.task for s in long for work in s.works if isinstance(work, Task)} == {"niah-16384", "niah-65536"}
    assert not [s for s in plan(protocol(tasks=("niah-16384",)), context=65536) if s.max_model_len is not None]


def test_what_is_skipped_is_not_planned() -> None:
    works = works_of(plan(protocol(), skipped=("gsm8k", "exactness")))
    assert all(isinstance(work, Cell) for work in works)


def test_a_running_server_is_one_server_for_every_round() -> None:
    (serving,) = plan(protocol(url="http://127.0.0.1:1", profile=None, rounds=5, tasks=(), exactness=False))
    assert serving.arms == tuple(Arm)
    assert {work.round for work in serving.works if isinstance(work, Cell)} == {1, 2, 3, 4, 5}
