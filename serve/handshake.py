"""Before the server says that it is ready, every process of the engine says which patches it has.

vLLM logs and swallows a plugin that fails to import, and `VLLM_PLUGINS` can leave it out. Either way the engine would
start, serve, and be the unpatched one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from serve.engine_calls import call_core, call_workers, engine_numbers

REPORT = "dspark_patch_report"
"""Method of every engine core (`patches.engine_report`) and every worker (`patches.worker_extension`)."""

WORKER_EXTENSION = "patches.worker_extension.WorkerExtension"
"""What the engine must be given as `worker_extension_cls`."""

_PLUGIN_MISSING = (
    "has not loaded the dspark plugin: unset VLLM_PLUGINS or add 'dspark' to it, and look for "
    "'Failed to load plugin dspark' in the log"
)


class PatchMismatchError(RuntimeError):
    """A process of the engine does not have the patches that the server has. The message is one line."""


async def confirm_patches(engine_client: Any, expected_digest: str) -> None:
    """Return once every engine core and every worker has answered with the expected digest.

    Args:
        engine_client: vLLM's `AsyncLLM`, its engine started with `WORKER_EXTENSION`.
        expected_digest: What `patches.install.install` returned in this process (`Installed.digest`).

    Raises:
        PatchMismatchError: a process lacks the plugin, failed to install a patch, or has other patches; the message
            names the first such process.
    """
    engines = engine_numbers(engine_client)
    answers = await asyncio.gather(*(_ask(engine_client, engine) for engine in engines))
    for number, answer in zip(engines, answers, strict=True):
        core, workers = answer
        _check(f"engine core {number}", core, expected_digest)
        for rank, worker in enumerate(workers):
            _check(f"worker {rank} of engine {number}", worker, expected_digest)


async def _ask(engine_client: Any, engine: int) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """What an engine core (None: it lacks the plugin) and its workers report."""
    try:
        core = await call_core(engine_client, engine, REPORT)
    except Exception as error:
        if f"no attribute '{REPORT}'" not in str(error):
            raise
        return None, []
    return core, await call_workers(engine_client, engine, REPORT)


def _check(process: str, report: dict[str, Any] | None, expected_digest: str) -> None:
    if report is None:
        raise PatchMismatchError(f"{process} {_PLUGIN_MISSING}")
    if report["failure"] is not None:
        raise PatchMismatchError(f"{process} failed to install its patches: {report['failure']}")
    if report["digest"] is None:
        raise PatchMismatchError(f"{process} {_PLUGIN_MISSING}")
    if report["digest"] != expected_digest:
        has = ", ".join(report["applied"]) or "none"
        raise PatchMismatchError(
            f"{process} has other patches than the server ({has}): give every process the same vLLM, the same "
            "dspark-serve and the same DSPARK_PATCHES_OFF"
        )
