"""The records of one run's directory, read and held against each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from serve.errors import InputError
from serve.validate.results import Accuracy, Arm, Exactness, Load, Protocol, Record, Run, Start

RUN = "run.json"
_Kind = TypeVar("_Kind", bound=Record)


@dataclass(frozen=True)
class Records:
    """What a run has measured so far, each kind in the order of the protocol."""

    run: Run
    starts: tuple[Start, ...] = ()
    loads: tuple[Load, ...] = ()
    accuracies: tuple[Accuracy, ...] = ()
    exactnesses: tuple[Exactness, ...] = ()


def read(directory: Path) -> Records:
    """Read a run's directory, finished or not.

    Raises:
        InputError: it is no run's, a record cannot be read or contradicts itself, two are of the same thing, or one is
            of another protocol.
    """
    if not (directory / RUN).is_file():
        raise InputError(
            f"{directory} is no run of `dspark-serve validate` or `bench`: it has no {RUN}; "
            "give the directory that the run wrote"
        )
    run = _record(directory / RUN, Run)
    protocol = run.protocol
    order = {arm: number for number, arm in enumerate(protocol.arms)}
    # A resumed run may have started the same server twice.
    starts = _folder(directory / "starts", Start, lambda found: _check_start(found, protocol), id)
    loads = _folder(directory / "load", Load, lambda found: _check_load(found, protocol), _load_key)
    accuracies = _folder(directory / "accuracy", Accuracy, lambda found: _check_accuracy(found, protocol), _task_key)
    exactnesses = _folder(
        directory / "exactness", Exactness, lambda found: _check_arm(found.arm, protocol), lambda found: found.arm
    )
    return Records(
        run=run,
        starts=tuple(sorted(starts, key=lambda start: (start.round, [order[arm] for arm in start.arms]))),
        loads=tuple(sorted(loads, key=lambda load: (load.round, order[load.arm], load.concurrency))),
        accuracies=tuple(sorted(accuracies, key=lambda found: (protocol.tasks.index(found.task), order[found.arm]))),
        exactnesses=tuple(sorted(exactnesses, key=lambda found: order[found.arm])),
    )


def _folder(
    folder: Path, kind: type[_Kind], check: Callable[[_Kind], None], key: Callable[[_Kind], Hashable]
) -> list[_Kind]:
    """Every record of a folder that need not be there."""
    found: list[_Kind] = []
    paths: dict[Hashable, Path] = {}
    for path in sorted(folder.glob("*.json")):
        record = _record(path, kind)
        try:
            check(record)
        except ValueError as error:
            raise InputError(f"{path} {error}; move it away to go on without it") from error
        other = paths.setdefault(key(record), path)
        if other is not path:
            raise InputError(f"{path} and {other.name} are of the same thing; move one of them away")
        found.append(record)
    return found


def _record(path: Path, kind: type[_Kind]) -> _Kind:
    try:
        record = kind.model_validate_json(path.read_bytes())
        json.dumps(record.model_dump(mode="python"), allow_nan=False)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise InputError(
            f"{path} is damaged: {where}: {first['msg']}; move it away, and resume the run to measure it again"
        ) from error
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: a number is endless; move it away, and resume the run to measure it again"
        ) from error
    return record


def _check_start(start: Start, protocol: Protocol) -> None:
    _check_round(start.round, protocol)
    for arm in start.arms:
        _check_arm(arm, protocol)


def _check_load(load: Load, protocol: Protocol) -> None:
    _check_round(load.round, protocol)
    _check_arm(load.arm, protocol)
    if load.concurrency not in protocol.concurrencies:
        raise ValueError(f"is of another protocol: {RUN} has no concurrency {load.concurrency}")
    if load.requested != load.completed + load.failed:
        raise ValueError(f"contradicts itself: {load.requested} requests, {load.completed} + {load.failed} ended")
    # The tool's own quotient, rounded as the tool likes.
    if abs(load.output_tokens_per_s * load.duration_s - load.output_tokens) > 0.01 * load.output_tokens + 1:
        raise ValueError("contradicts itself: output_tokens_per_s is not output_tokens / duration_s")


def _check_accuracy(accuracy: Accuracy, protocol: Protocol) -> None:
    _check_arm(accuracy.arm, protocol)
    if accuracy.task not in protocol.tasks:
        raise ValueError(f"is of another protocol: {RUN} has no task {accuracy.task}")


def _check_arm(arm: Arm, protocol: Protocol) -> None:
    if arm not in protocol.arms:
        raise ValueError(f"is of another protocol: {RUN} has no arm {arm}")


def _check_round(number: int, protocol: Protocol) -> None:
    if not 1 <= number <= protocol.rounds:
        raise ValueError(f"is of another protocol: {RUN} has {protocol.rounds} rounds, this is of round {number}")


def _load_key(load: Load) -> Hashable:
    return load.round, load.arm, load.concurrency


def _task_key(accuracy: Accuracy) -> Hashable:
    return accuracy.task, accuracy.arm
