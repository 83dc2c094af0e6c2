"""A trace of every decision, one JSON object a line, for checking and for debugging.

`DSPARK_TRACE_FILE` names the file. A trace copies confidences and admitted counts to the host in every step, which
waits for the device: it is not for production. Tensor-parallel rank 0 of each data-parallel engine writes one, nobody
else. A fault in writing ends the trace, never the engine.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from typing import IO, Any

FILE_VARIABLE = "DSPARK_TRACE_FILE"

logger = logging.getLogger("vllm.dspark")

_file: IO[str] | None = None


def trace_file(path: str, engine: int) -> str:
    """The file of a data-parallel engine: that of the first is `path`, the others' have their rank behind it."""
    return path if engine == 0 else f"{path}.{engine}"


def start(engine: int) -> None:
    """Begin the trace of this process's engine, if one was asked for."""
    global _file
    path = os.environ.get(FILE_VARIABLE)
    if not path or _file is not None:
        return
    try:
        # Open for as long as the process lives.
        _file = open(trace_file(path, engine), "a", buffering=1)  # noqa: SIM115
    except OSError as error:
        logger.error("dspark trace is off: %s", error)


def enabled() -> bool:
    """Whether this process writes a trace."""
    return _file is not None


def record_ranking(
    request_ids: Sequence[str], *, budget: int, eligible: Sequence[int], confidences: Any, admitted: Any
) -> None:
    """One line for the ranking of a step.

    Args:
        request_ids: The batch, in order.
        budget: Drafts to verify.
        eligible: [requests] drafts that were really drafted.
        confidences: [requests, steps] tensor of the confidences that were ranked.
        admitted: [requests] tensor of the drafts admitted.
    """
    _write(
        kind="ranking",
        requests=list(request_ids),
        budget=budget,
        eligible=list(eligible),
        confidences=confidences.tolist(),
        admitted=admitted.tolist(),
    )


def record_verification(
    request_ids: Sequence[str], *, plan: str, proposed: int, verified: int, accepted: Sequence[int]
) -> None:
    """One line for the outcome of a step.

    Args:
        request_ids: The requests that had drafts.
        plan: One of `patches.telemetry.counters.PLANS`.
        proposed: Drafts that were really drafted.
        verified: Drafts that were admitted.
        accepted: Drafts accepted, per request.
    """
    _write(
        kind="verification",
        requests=list(request_ids),
        plan=plan,
        proposed=proposed,
        verified=verified,
        accepted=list(accepted),
    )


def _write(**record: object) -> None:
    global _file
    try:
        if _file is not None:
            _file.write(json.dumps(record) + "\n")
    except OSError as error:
        logger.error("dspark trace is off: %s", error)
        _file = None
