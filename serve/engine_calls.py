"""Calls to each engine (data-parallel rank) of a client by itself, and to its workers.

A data-parallel client's own broadcast answers for the first engine only (before 0.32.0), or raises without saying which
engine failed. An engine carries its calls out between two steps, in the order they were sent.
"""

from __future__ import annotations

from typing import Any


def engine_numbers(engine_client: Any) -> list[int]:
    """The data-parallel ranks of the engines of vLLM's `AsyncLLM`."""
    return list(engine_client.engine_core.engine_ranks_managed)


async def call_core(engine_client: Any, engine: int, method: str, *arguments: Any) -> Any:
    """What a method of one engine's core returns.

    Args:
        engine_client: vLLM's `AsyncLLM`.
        engine: One of `engine_numbers`.
        method: Name of the method.
        arguments: Its arguments, plain data.
    """
    core_client = engine_client.engine_core
    address = core_client.core_engines[engine_numbers(engine_client).index(engine)]
    return await core_client._call_utility_async(method, *arguments, engine=address)


async def call_workers(engine_client: Any, engine: int, method: str, *arguments: Any) -> list[Any]:
    """What a method of `patches.worker_extension` returns, from every worker of one engine by rank.

    Args:
        engine_client: vLLM's `AsyncLLM`.
        engine: One of `engine_numbers`.
        method: Name of the method.
        arguments: Its arguments, plain data.
    """
    answers: list[Any] = await call_core(engine_client, engine, "collective_rpc", method, None, arguments, None)
    return answers
