"""The verification mode of a running engine: how its workers choose the next budget.

`adaptive` verifies the drafts that pay for themselves, `fixed` all of them. Both leave the manager, its confidences
and the drafter's context in place, so that a switch is one attribute: it takes effect with the next batch that is
prepared. Every worker of an engine must switch between the same two steps, since budgets that differ hang the ranks
in a collective. vLLM's `collective_rpc` sees to that: it runs between steps, in the same order on every rank.

A budget that trims is bounded in either mode by what the rejection sampler takes in one chunk (`get_max_chunk_logits`):
upstream's sampler asserts it of every step of a server that was started adaptive, and its engine would die. One that
takes every draft may be larger where `patches.full_budgets` is applied, and else verifies the best that fit.

No speculation at all (`off`) is no mode of a running engine: without drafting, the drafter's context would be left with
a gap, and acceptance collapses when drafting is taken up again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Mode(StrEnum):
    """What a running engine can be switched between."""

    ADAPTIVE = "adaptive"
    FIXED = "fixed"


OFF = "off"
"""What a worker without speculation says of its mode."""


def mode_of(worker: Any) -> str:
    """A `Mode`, or `OFF`: what this worker does, whatever it was asked to.

    An engine that was started fixed has no manager. Neither has one that was asked for adaptive verification and
    whose draft cannot do it: upstream's speculator clears the flag when it loads.

    Args:
        worker: vLLM's worker.
    """
    if worker.vllm_config.speculative_config is None:
        return OFF
    manager = _manager(worker)
    return Mode.FIXED.value if manager is None else str(manager.mode)


def switch(worker: Any, mode: str) -> str:
    """Switch a worker, from its next batch on; returns the mode that is then in force.

    Args:
        worker: vLLM's worker.
        mode: A `Mode`.

    Raises:
        ValueError: no such mode.
        RuntimeError: the worker was started without adaptive verification.
    """
    wanted, manager = Mode(mode), _manager(worker)
    if manager is None:
        raise RuntimeError("this engine was started without adaptive verification and has one mode only")
    manager.mode = wanted
    return wanted.value


def _manager(worker: Any) -> Any:
    """The worker's `patches.manager.AdaptiveManager`, or None; upstream's first runner has no such attribute."""
    return getattr(worker.model_runner, "adaptive_verification", None)
