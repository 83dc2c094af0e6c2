"""What would be started: a profile, the user's own arguments and the verification mode, as typed values.

The values are read from the very words that vLLM would get, so that preflight judges what would run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.arguments import ArgumentNames, split_words
from serve.errors import InputError
from serve.profile import Profile, Verification

_MULTIPLIERS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_LARGEST = 1 << 63
_TRUE = ("true", "1")


@dataclass(frozen=True)
class Plan:
    """One start, typed. Names are vLLM's; None is "not set, vLLM decides".

    Attributes:
        profile: The recipe.
        verification: The mode.
        arguments: Every argument vLLM would get, by name.
        environment: The process's environment over the profile's.
        adaptive: Whether vLLM would be told to verify adaptively.
        speculation: The speculative configuration; empty without speculation.
        headless: Whether this node would have no API.
        nodes: Nodes that the ranks are spread over.
        node_rank: Which of them this is.
        local_engines: Data-parallel ranks that this node is told to run; None where they are spread evenly.
    """

    profile: Profile
    verification: Verification
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    adaptive: bool
    speculation: Mapping[str, Any]
    model: str
    revision: str | None
    draft_model: str | None
    draft_revision: str | None
    num_speculative_tokens: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    headless: bool
    nodes: int
    node_rank: int
    local_engines: int | None
    max_num_seqs: int | None
    max_model_len: int | None
    max_cudagraph_capture_size: int | None
    cudagraph_mode: str | None
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    kv_cache_dtype: str
    indexer_kv_dtype: str | None

    @property
    def gpus(self) -> int:
        """GPUs that the engine's ranks need on this node; none on a CPU."""
        if self.profile.hardware == "cpu":
            return 0
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        if self.local_engines is None:
            return -(-ranks * self.data_parallel_size // self.nodes)
        nodes_an_engine = max(self.nodes * self.local_engines // self.data_parallel_size, 1)
        return self.local_engines * -(-ranks // nodes_an_engine)

    @property
    def mono_decode(self) -> bool:
        """Whether the mono decode layer is asked for: by a variable in 0.32.0, by an argument from 0.33.0 on."""
        return self.variable_on("VLLM_ROCM_MONO_DECODE") or self.on("monokernel")

    def on(self, name: str) -> bool:
        """Whether a yes-or-no argument is set."""
        return self.arguments.get(name) is True

    def variable_on(self, name: str) -> bool:
        """Whether an environment variable says yes, as vLLM reads it."""
        return self.environment.get(name, "").lower() in _TRUE


def plan(
    profile: Profile,
    verification: Verification,
    extra: Sequence[str] = (),
    *,
    names: ArgumentNames | None = None,
    environment: Mapping[str, str] | None = None,
    headless: bool = False,
) -> Plan:
    """What `profile` with the words `extra` would start.

    Raises:
        InputError: a word is no argument, or a value has the wrong type; every wrong value is named at once.
    """
    model, *words = profile.command_line(verification, list(extra))
    arguments = split_words(words, names)
    read = _Reader(names)
    read.types(arguments)
    speculation = read.mapping(arguments, "speculative_config")
    compilation = read.mapping(arguments, "compilation_config")
    attention = read.mapping(arguments, "attention_config")
    sizes = arguments.get("cudagraph_capture_sizes", compilation.get("cudagraph_capture_sizes"))
    largest = read.count({**compilation, **arguments}, "max_cudagraph_capture_size", least=0)
    if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
        largest = max(sizes)
    result = Plan(
        profile=profile,
        verification=verification,
        arguments=arguments,
        environment={**profile.environment, **(os.environ if environment is None else environment)},
        adaptive=speculation.get("enable_adaptive_verification") is True,
        speculation=speculation,
        model=read.text(arguments, "model") or model,
        revision=read.text(arguments, "revision"),
        draft_model=read.text(speculation, "model"),
        draft_revision=read.text(speculation, "revision"),
        num_speculative_tokens=read.count(speculation, "num_speculative_tokens"),
        tensor_parallel_size=read.count(arguments, "tensor_parallel_size") or 1,
        pipeline_parallel_size=read.count(arguments, "pipeline_parallel_size") or 1,
        data_parallel_size=read.count(arguments, "data_parallel_size") or 1,
        headless=headless,
        nodes=read.count(arguments, "nnodes") or 1,
        node_rank=read.count(arguments, "node_rank", least=0) or 0,
        local_engines=_local_engines(read, arguments),
        max_num_seqs=read.count(arguments, "max_num_seqs"),
        max_model_len=read.count(arguments, "max_model_len", least=-1),
        max_cudagraph_capture_size=largest,
        cudagraph_mode=read.text(compilation, "cudagraph_mode"),
        gpu_memory_utilization=read.fraction(arguments, "gpu_memory_utilization", 0.92),
        kv_cache_memory_bytes=read.count(arguments, "kv_cache_memory_bytes"),
        kv_cache_dtype=read.text(arguments, "kv_cache_dtype") or "auto",
        indexer_kv_dtype=read.text(attention, "indexer_kv_dtype"),
    )
    read.finish(profile.name)
    return result


def _local_engines(read: _Reader, arguments: Mapping[str, Any]) -> int | None:
    """As in `EngineArgs.create_engine_config`: a rank whose requests are spread from outside is alone on its node."""
    if arguments.get("data_parallel_external_lb") is True or arguments.get("data_parallel_rank") is not None:
        return 1
    return read.count(arguments, "data_parallel_size_local", least=0)


class _Reader:
    """Reads typed values and remembers what is wrong with the others."""

    def __init__(self, names: ArgumentNames | None) -> None:
        self._names = names
        self._wrong: dict[str, str] = {}

    def types(self, arguments: Mapping[str, Any]) -> None:
        """Compare every argument with the type that this vLLM declares for it."""
        for name, value in arguments.items():
            if self._names is not None and (takes := self._names.wrong_type(name, value)) is not None:
                self._refuse(name, takes, value)

    def mapping(self, values: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = values.get(name)
        if value is None or isinstance(value, dict):
            return value or {}
        if name == "compilation_config" and isinstance(value, int):
            return {"mode": value}
        self._refuse(name, "a mapping", value)
        return {}

    def text(self, values: Mapping[str, Any], name: str) -> str | None:
        value = values.get(name)
        if value is None or isinstance(value, str):
            return value
        self._refuse(name, "text", value)
        return None

    def count(self, values: Mapping[str, Any], name: str, least: int = 1) -> int | None:
        """A whole number; `8k` is 8,000 and `8K` is 8,192, as vLLM reads them, and -1 or `auto` is None."""
        value = values.get(name)
        if value is None or value == "auto":
            return None
        if isinstance(value, str) and value[-1:] in {**_MULTIPLIERS, **_BINARY}:
            try:
                value = int(float(value[:-1]) * {**_MULTIPLIERS, **_BINARY}[value[-1]])
            except (ValueError, OverflowError):
                self._refuse(name, "a whole number", value)
                return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LARGEST:
            self._refuse(name, f"a whole number of at least {least}", value)
            return None
        return None if value < 0 else value

    def fraction(self, values: Mapping[str, Any], name: str, default: float) -> float:
        value = values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            self._refuse(name, "a number above 0, up to 1", value)
            return default
        return float(value)

    def finish(self, profile: str) -> None:
        if self._wrong:
            raise InputError(f"profile {profile}: {'; '.join(self._wrong.values())}")

    def _refuse(self, name: str, takes: str, value: object) -> None:
        self._wrong.setdefault(name, f"{name} takes {takes}, not {value!r}")
