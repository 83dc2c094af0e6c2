"""What a worker says of its mode and what it refuses. tests/e2e/test_modes.py switches real workers."""

from types import SimpleNamespace

import pytest

from patches.modes import Mode, mode_of, switch


def worker(*, speculates: bool = True, **runner: object) -> SimpleNamespace:
    config = SimpleNamespace(speculative_config=object() if speculates else None)
    return SimpleNamespace(vllm_config=config, model_runner=SimpleNamespace(**runner))


def adaptive() -> SimpleNamespace:
    return worker(adaptive_verification=SimpleNamespace(mode=Mode.ADAPTIVE))


def test_a_worker_says_what_it_does() -> None:
    assert mode_of(adaptive()) == "adaptive"
    assert mode_of(worker(adaptive_verification=None)) == "fixed"
    assert mode_of(worker()) == "fixed", "upstream's first runner has no such attribute"
    assert mode_of(worker(speculates=False, adaptive_verification=None)) == "off"


def test_a_switch_is_there_and_back() -> None:
    switched = adaptive()
    for mode in ("fixed", "fixed", "adaptive"):
        assert switch(switched, mode) == mode == mode_of(switched)
        assert switched.model_runner.adaptive_verification.mode is Mode(mode)


@pytest.mark.parametrize("mode", ["off", "Fixed", ""])
def test_no_other_mode_is_taken(mode: str) -> None:
    refusing = adaptive()
    with pytest.raises(ValueError, match="is not a valid Mode"):
        switch(refusing, mode)
    assert mode_of(refusing) == "adaptive"


def test_without_adaptive_verification_nothing_is_switched() -> None:
    with pytest.raises(RuntimeError, match="started without adaptive verification"):
        switch(worker(adaptive_verification=None), "adaptive")
