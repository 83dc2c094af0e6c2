"""The directory of a run: whole records, one run at a time, one protocol."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from validation_samples import begun, protocol, record_of

from serve.errors import InputError
from serve.validate.plan import Cell, Sampling, Task, Work, plan, works_of
from serve.validate.results import Arm, Load, Skipped
from serve.validate.store import Store, opened

CELL = Cell(1, Arm.FIXED, 4)
WORKS: tuple[Work, ...] = (CELL, Task(Arm.OFF, "gsm8k"), Sampling(Arm.ADAPTIVE))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with opened(tmp_path / "run", begun()) as found:
        return found


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_a_record_that_was_written_is_done(store: Store, work: Work) -> None:
    assert store.done(WORKS) == frozenset()
    store.write(work.record, record_of(work))
    assert store.done(WORKS) == {work}
    assert not list(store.directory.rglob("*.part"))


@given(cut=st.floats(0, 1, exclude_max=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_torn_record_is_measured_again(store: Store, cut: float) -> None:
    store.write(CELL.record, record_of(CELL))
    path = store.path(CELL.record)
    whole = path.read_bytes().rstrip()
    path.write_bytes(whole[: int(len(whole) * cut)])
    assert store.done([CELL]) == frozenset()
    assert not path.exists()
    assert path.with_suffix(".json.unreadable").exists()
    store.write(CELL.record, record_of(CELL))
    assert store.done([CELL]) == {CELL}


def test_the_record_of_something_else_is_measured_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.write(CELL.record, record_of(Cell(2, Arm.FIXED, 4)))
    assert store.done([CELL]) == frozenset()
    assert store.path(CELL.record).with_suffix(".json.unreadable").exists()


def test_a_crash_while_writing_leaves_the_old_record(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(CELL.record, record_of(CELL))
    before = store.path(CELL.record).read_bytes()

    def crash(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="no space"):
        store.write(CELL.record, Load(**{**record_of(CELL).model_dump(), "requested": 9}))
    assert store.path(CELL.record).read_bytes() == before


def test_a_foreign_record_is_refused_by_name(store: Store) -> None:
    works = works_of(plan(protocol()))
    store.check_foreign(works)
    other = Cell(9, Arm.FIXED, 4)
    store.write(other.record, record_of(other))
    with pytest.raises(InputError, match=r"round-9-fixed-c4\.json is no part of this run's protocol: move it away"):
        store.check_foreign(works)


def test_the_same_run_goes_on_and_keeps_how_it_began(tmp_path: Path) -> None:
    with opened(tmp_path, begun()) as store:
        store.write(CELL.record, record_of(CELL))
    later = begun().model_copy(
        update={"started": "later", "command": ("again",), "skipped": (Skipped(what="gsm8k", reason="gone"),)}
    )
    with opened(tmp_path, later) as store:
        assert store.done(WORKS) == {CELL}
    text = (tmp_path / "run.json").read_text()
    assert '"later"' not in text
    assert '"again"' not in text
    assert '"gone"' in text


OTHER_PROTOCOLS = {
    "rounds": 3,
    "concurrencies": (1, 8),
    "arms": (Arm.OFF, Arm.FIXED),
    "sets": ("max_num_seqs=4",),
    "extra": ("--seed", "3"),
    "prompts": "/a.jsonl",
    "requests": 5,
    "requests_per_stream": 2,
    "warmup_requests": 1,
    "output_tokens": 9,
    "temperature": 0.5,
    "tasks": (),
    "gsm8k": "/g.jsonl",
    "questions": 3,
    "exactness": False,
    "server_per_arm": True,
    "seed": 7,
    "profile": "other",
    "url": "http://127.0.0.1:1",
}


@pytest.mark.parametrize("key", OTHER_PROTOCOLS)
def test_another_protocol_is_refused_and_the_key_named(tmp_path: Path, key: str) -> None:
    with opened(tmp_path, begun()):
        pass
    with (
        pytest.raises(InputError, match=f"holds a run with {key} .* or another --out"),
        opened(tmp_path, begun(**{key: OTHER_PROTOCOLS[key]})),
    ):
        pass


def test_every_key_of_a_protocol_was_tried() -> None:
    assert set(OTHER_PROTOCOLS) == set(type(protocol()).model_fields)


@pytest.mark.parametrize(
    ("update", "named"),
    [
        ({"versions": {"vllm": "0.31.0"}}, "version of vllm 0.32.0, and this one has 0.31.0"),
        ({"versions": {"vllm": "0.32.0", "lm_eval": "1"}}, "version of lm_eval None"),
        ({"patch_set": "def"}, "patch set abc"),
        ({"hardware": "cuda-hopper"}, "hardware cpu"),
    ],
)
def test_other_software_or_hardware_is_refused(tmp_path: Path, update: dict[str, Any], named: str) -> None:
    with opened(tmp_path, begun()):
        pass
    with pytest.raises(InputError, match=named), opened(tmp_path, begun().model_copy(update=update)):
        pass


def test_two_runs_cannot_use_one_directory(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from serve.errors import InputError\n"
        "from serve.validate.results import Run; from serve.validate.store import opened\n"
        "run = Run.model_validate_json(sys.argv[2])\n"
        "try:\n    opened(Path(sys.argv[1]), run).__enter__()\nexcept InputError as error:\n    print(error)\n"
    )
    with opened(tmp_path, begun()):
        other = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), begun().model_dump_json()],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    assert other.stdout == f"another run is using {tmp_path}: wait for it, or give another --out\n"
    with opened(tmp_path, begun()):
        pass


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="is not empty and holds no run"), opened(tmp_path, begun()):
        pass
    with pytest.raises(InputError, match="cannot be used"), opened(tmp_path / "thesis.tex", begun()):
        pass


def test_a_broken_run_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"started": ')
    with pytest.raises(InputError, match="cannot be read as a run of this version"), opened(tmp_path, begun()):
        pass
