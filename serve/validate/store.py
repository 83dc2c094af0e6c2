"""The directory of a run: records that are whole or not there, one run at a time, and only ever one protocol.

What cannot be read as the record that its name says (torn by a failing disk, edited, of another version) is moved aside
to `NAME.unreadable`, said so, and measured again.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from serve.errors import InputError
from serve.validate.exactness import Outputs
from serve.validate.plan import Cell, Sampling, Task, Work
from serve.validate.results import Accuracy, Load, Record, Run
from serve.validate.writing import write_whole

logger = logging.getLogger("dspark-serve")

RUN = "run"
LOCK = ".lock"
FOLDERS = ("starts", "load", "accuracy", "exactness", "raw", "logs")

R = TypeVar("R", bound=Record)


class Store:
    """Reads and writes the records of one run. Made by `opened`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, name: str) -> Path:
        """The file of a record, for example `load/round-1-off-c4`."""
        return self.directory / f"{name}.json"

    def write(self, name: str, record: Record) -> None:
        """Write a record whole: a crash at any time leaves the old file or the new one."""
        write_whole(self.path(name), record.model_dump_json(indent=2) + "\n")

    def read(self, name: str, kind: type[R]) -> R | None:
        """A record, or None where there is none; one that cannot be read is moved aside."""
        path = self.path(name)
        try:
            return kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            self._set_aside(path, f"it is no {kind.__name__.lower()} record of this version")
            return None

    def has(self, name: str) -> bool:
        """Whether a record is there."""
        return self.path(name).exists()

    def done(self, works: Iterable[Work]) -> frozenset[Work]:
        """Of these, what has its record."""
        return frozenset(work for work in works if self._measured(work))

    def check_foreign(self, works: Iterable[Work]) -> None:
        """Refuse records that are of no part of the protocol.

        Raises:
            InputError: there is one; the report would count it.
        """
        known = {self.path(work.record) for work in works}
        for folder in ("load", "accuracy"):
            for path in sorted((self.directory / folder).glob("*.json")):
                if path not in known:
                    raise InputError(f"{path} is no part of this run's protocol: move it away, or give another --out")

    def _measured(self, work: Work) -> bool:
        kinds: dict[type[Work], type[Load | Accuracy | Outputs]] = {Cell: Load, Task: Accuracy, Sampling: Outputs}
        record = self.read(work.record, kinds[type(work)])
        if record is None:
            return False
        if all(getattr(record, key) == value for key, value in vars(work).items()):
            return True
        self._set_aside(self.path(work.record), "it is the record of something else")
        return False

    def _set_aside(self, path: Path, why: str) -> None:
        aside = path.with_suffix(".json.unreadable")
        path.replace(aside)
        logger.warning("%s is measured again: %s (kept as %s)", path, why, aside.name)


@contextmanager
def opened(directory: Path, run: Run) -> Iterator[Store]:
    """The store of a new run, or of one that goes on; held against any other process.

    Args:
        directory: Made where it is missing.
        run: The run as it would begin now.

    Raises:
        InputError: another process has it, it holds something else, or a run that differs from this one.
    """
    try:
        if directory.is_dir() and not (directory / f"{RUN}.json").exists() and _used(directory):
            raise InputError(f"--out {directory} is not empty and holds no run: give another folder")
        for folder in FOLDERS:
            (directory / folder).mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK).open("w")
    except OSError as error:
        raise InputError(f"--out {directory} cannot be used: {error.strerror}; give another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"another run is using {directory}: wait for it, or give another --out") from error
        store = Store(directory)
        store.write(RUN, resumed(_earlier(store), run, directory))
        yield store


def resumed(earlier: Run | None, now: Run, directory: Path) -> Run:
    """The run that goes on: when and how it began, and what is skipped now.

    Raises:
        InputError: it was begun with another protocol, software or hardware; the first difference is named.
    """
    if earlier is None:
        return now
    for what, was, is_ in _compared(earlier, now):
        if was != is_:
            raise InputError(
                f"{directory} holds a run with {what} {was}, and this one has {is_}: "
                f"give what it was begun with, or another --out"
            )
    return earlier.model_copy(update={"skipped": now.skipped})


def _compared(earlier: Run, now: Run) -> Iterator[tuple[str, object, object]]:
    was, is_ = earlier.protocol.model_dump(mode="json"), now.protocol.model_dump(mode="json")
    for key in was:
        yield key, was[key], is_[key]
    for name in sorted({*earlier.versions, *now.versions}):
        yield f"version of {name}", earlier.versions.get(name), now.versions.get(name)
    yield "hardware", earlier.hardware, now.hardware
    yield "patch set", earlier.patch_set, now.patch_set


def _earlier(store: Store) -> Run | None:
    path = store.path(RUN)
    try:
        return Run.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise InputError(f"{path} cannot be read as a run of this version: give another --out") from error


def _used(directory: Path) -> bool:
    """Whether a folder holds anything that this module did not put there before it wrote `run.json`."""
    return any(path.name not in (*FOLDERS, LOCK) and path.suffix != ".part" for path in directory.iterdir())
