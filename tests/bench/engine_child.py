"""`python -m tests.bench.engine_child FD ARGUMENTS`: one engine that does what its parent asks.

Requests come as JSON lines on standard input, answers go to the file descriptor; standard output is vLLM's log.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

from tests.bench import waves
from tests.bench.decoding import decode
from tests.bench.waves import prompts


def measure(engine: Any, requests: int, tokens: int, prompt: int, repeats: int) -> dict[str, Any]:
    """How long requests that run together take for how many tokens, and what all their steps did."""
    batch = prompts(requests, prompt, engine.llm_engine.model_config.get_vocab_size())
    before = engine.collective_rpc("bench_counts")[0]
    windows = [decode(engine, batch, tokens) for _ in range(repeats)]
    after = engine.collective_rpc("bench_counts")[0]
    return {
        "decode_s": [window.seconds for window in windows],
        "decoded": [window.tokens for window in windows],
        "outputs": [window.outputs for window in windows],
        "counts": {name: value - before[name] for name, value in after.items()},
    }


def accept(engine: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Greedy answers, and per request-step how many drafts were accepted while they were written."""
    from vllm import SamplingParams

    def counted() -> tuple[int, int]:
        values = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
        return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"]

    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    batch = [{"prompt_token_ids": ids} for ids in prompts]
    before = counted()
    outputs = engine.generate(batch, greedy, use_tqdm=False)
    steps, accepted = (after - earlier for after, earlier in zip(counted(), before, strict=True))
    said = [list(output.outputs[0].token_ids) for output in outputs]
    return {"request_steps": steps, "accepted": accepted, "said": zlib.crc32(json.dumps(said).encode())}


VERBS: dict[str, Callable[..., Any]] = {
    "measure": measure,
    "accept": accept,
    "waves": waves.advance,
    "end_waves": waves.end,
}


def main(answers: int, arguments: dict[str, Any]) -> None:
    started = time.monotonic()
    with os.fdopen(answers, "w", buffering=1) as out:

        def answer(**what: Any) -> None:
            out.write(json.dumps(what) + "\n")

        try:
            from vllm import LLM

            engine = LLM(**arguments)
            engine.collective_rpc("bench_watch")
        except BaseException as error:
            answer(error=f"{type(error).__name__}: {error}"[:2000])
            raise
        gc.collect()
        gc.freeze()
        answer(**{"is": {"ready_s": round(time.monotonic() - started, 1)}})
        for line in sys.stdin:
            request = json.loads(line)
            try:
                do = request.pop("do")
                if do == "rpc":
                    result = engine.collective_rpc(request["method"], args=tuple(request["args"]))
                else:
                    result = VERBS[do](engine, **request)
            except Exception as error:
                answer(error=f"{type(error).__name__}: {error}"[:2000])
            else:
                answer(**{"is": result})


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
