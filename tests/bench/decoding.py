"""How fast requests decode while all of them do: no prompt waits any more, and none has ended.

Outputs are timed by the engine core's own clock, where they come into being: what the client takes to read them is not
in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class TooFewTokensError(RuntimeError):
    """A request ended before the last began, so that all of them never ran together."""


@dataclass(frozen=True)
class Decoding:
    """From the output with which the last request began to the one with which the first ended.

    Attributes:
        seconds: Between the two.
        tokens: What all requests got in that time.
        outputs: Steps in that time.
    """

    seconds: float
    tokens: int
    outputs: int


class Window:
    """Watches outputs as they come.

    Args:
        requests: How many there are.
    """

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._begun: set[str] = set()
        self._began: float | None = None
        self._ended: float | None = None
        self._tokens = self._outputs = 0

    def see(self, at: float, outputs: Iterable[tuple[str, int, bool]]) -> None:
        """One step's outputs.

        Args:
            at: Seconds, of any one clock.
            outputs: Request, its new tokens, and whether it has ended.
        """
        if self._ended is not None:
            return
        step = list(outputs)
        if self._began is not None:
            self._tokens += sum(tokens for _, tokens, _ in step)
            self._outputs += 1
        self._begun.update(request for request, tokens, _ in step if tokens)
        if self._began is None and len(self._begun) == self._requests:
            self._began = at
        if any(ended for _, _, ended in step):
            self._ended = at

    def decoding(self) -> Decoding:
        """What was seen.

        Raises:
            TooFewTokensError: a request ended before, or just when, the last began.
        """
        if self._began is None or self._ended is None or not self._tokens:
            raise TooFewTokensError(f"{self._requests} requests never all ran together: give them more tokens")
        return Decoding(self._ended - self._began, self._tokens, self._outputs)


def decode(engine: Any, batch: list[dict[str, Any]], tokens: int) -> Decoding:
    """Have requests answered that are sent together.

    Args:
        engine: `vllm.LLM`, which does nothing else.
        batch: Prompts.
        tokens: That each request generates.

    Raises:
        TooFewTokensError: a request ended before the last began.
    """
    from vllm import SamplingParams

    window, processor = Window(len(batch)), engine.llm_engine.output_processor
    process = processor.process_outputs

    def watched(outputs: list[Any], engine_core_timestamp: float, *args: Any, **kwargs: Any) -> Any:
        made = ((one.request_id, len(one.new_token_ids), one.finish_reason is not None) for one in outputs)
        window.see(engine_core_timestamp, made)
        return process(outputs, engine_core_timestamp, *args, **kwargs)

    # Every arm sees the same draws, and each request others than its neighbour.
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=number)
        for number in range(len(batch))
    ]
    processor.process_outputs = watched
    try:
        answers = engine.generate(batch, sampling, use_tqdm=False)
    finally:
        del processor.process_outputs
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [tokens] * len(batch)
    return window.decoding()
