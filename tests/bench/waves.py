"""Requests in waves: as many as fit begin together, all end, and the next wave begins.

The shape in which tensor-parallel ranks are in danger (vllm#54011): a batch that drains. What is under way stays under
way between two calls, so that whoever asks is answered soon and can tell a hang from a long run.
"""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass, field
from typing import Any


def prompts(requests: int, tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": [(7 * request + 13 * place) % (vocabulary - 8) + 4 for place in range(tokens)]}
        for request in range(requests)
    ]


@dataclass
class Seen:
    """What happened since the engine started, or waves were last ended.

    Attributes:
        waves: Waves that began.
        finished: Requests that ended with all their tokens.
        aborted: Requests that were aborted while they ran.
        outputs: Times the engine handed something over: steps, as the client sees them.
        longest_s: Longest wait for that.
        together: Most requests that ended at once.
    """

    waves: int = 0
    finished: int = 0
    aborted: int = 0
    outputs: int = 0
    longest_s: float = 0.0
    together: int = 0


@dataclass
class _Waves:
    seen: Seen = field(default_factory=Seen)
    wanted: dict[str, int] = field(default_factory=dict)
    """Request id -> tokens it must end with; the requests under way."""
    chance: random.Random = field(default_factory=lambda: random.Random(5))


_waves = _Waves()


def advance(
    engine: Any, *, lasting: float, requests: int, prompt: int, shortest: int, longest: int, aborts: float
) -> dict[str, Any]:
    """Go on for a while; returns `Seen`.

    Args:
        engine: `vllm.LLM`, which does nothing else.
        lasting: Seconds, and until the next output.
        requests: Of a wave.
        prompt: Tokens of each prompt.
        shortest: Tokens that a request generates, from `shortest` to `longest`, drawn for each.
        longest: Where both are equal, a wave ends within few steps.
        aborts: Probability that one request is aborted after an output.
    """
    state, core = _waves, engine.llm_engine
    until = time.monotonic() + lasting
    while time.monotonic() < until:
        if not core.has_unfinished_requests():
            assert not state.wanted, f"never ended: {sorted(state.wanted)}"
            _begin(core, state, requests, prompt, shortest, longest)
        asked = time.monotonic()
        outputs = core.step()
        state.seen.longest_s = max(state.seen.longest_s, time.monotonic() - asked)
        state.seen.outputs += 1
        ended = [output for output in outputs if output.finished]
        for output in ended:
            got = len(output.outputs[0].token_ids)
            wanted = state.wanted.pop(output.request_id)
            assert got == wanted, f"{output.request_id} ended with {got} tokens of {wanted}"
        state.seen.finished += len(ended)
        state.seen.together = max(state.seen.together, len(ended))
        if state.wanted and state.chance.random() < aborts:
            victim = state.chance.choice(sorted(state.wanted))
            core.abort_request([victim])
            del state.wanted[victim]
            state.seen.aborted += 1
    return asdict(state.seen)


def end(engine: Any) -> int:
    """Abort what is under way, so that the engine can do something else; returns how many requests that were."""
    state, core = _waves, engine.llm_engine
    ended = len(state.wanted)
    core.abort_request(sorted(state.wanted))
    state.wanted.clear()
    while core.has_unfinished_requests():
        core.step()
    state.seen = Seen()
    return ended


def _begin(core: Any, state: _Waves, requests: int, prompt: int, shortest: int, longest: int) -> None:
    from vllm import SamplingParams

    for number, each in enumerate(prompts(requests, prompt, core.model_config.get_vocab_size())):
        tokens = state.chance.randint(shortest, longest)
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=number)
        name = f"w{state.seen.waves}-{number}"
        core.add_request(name, each, sampling)
        state.wanted[name] = tokens
    state.seen.waves += 1
