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
from typing import Any

from tests.bench import waves
from tests.bench.waves import prompts


def measure(engine: Any, requests: int, tokens: int, prompt: int, repeats: int) -> dict[str, Any]:
    """Seconds for one token and for `tokens` tokens of each request, and what the steps of the latter did."""
    from vllm import SamplingParams

    vocabulary = engine.llm_engine.model_config.get_vocab_size()
    batch = prompts(requests, prompt, vocabulary)

    def generate(count: int) -> float:
        sampling = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False, seed=1)
        started = time.perf_counter()
        outputs = engine.generate(batch, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == [count] * requests
        return seconds

    found: dict[str, Any] = {"first_token_s": [], "seconds": []}
    totals: dict[str, int] = {}
    for _ in range(repeats):
        found["first_token_s"].append(generate(1))
        before = engine.collective_rpc("bench_counts")[0]
        found["seconds"].append(generate(tokens))
        after = engine.collective_rpc("bench_counts")[0]
        for name, value in after.items():
            totals[name] = totals.get(name, 0) + value - before[name]
    return found | {"counts": totals}


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


VERBS = {"measure": measure, "accept": accept, "waves": waves.advance, "end_waves": waves.end}


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
