"""`python greedy_engine.py [async|sync]`: what the tiny pair says greedily under adaptive verification, as JSON.

More requests than slots, so that slots are reused; too few KV blocks for all, so that requests are preempted and
resumed; one request aborted while it runs. Prints as its last line
`{"applied": [ids], "tokens": {request: token ids}, "preemptions": n, "seen": {...}}`, with what `watching_worker` saw.
"""

import json
import os
import sys
from typing import Any

from serve.profile import Verification, load, resolve_model

PROFILE = load("tiny-cpu")
PROMPTS = {
    "a": range(10, 40),
    "b": range(300, 320),
    "c": range(700, 760),
    "aborted": range(100, 130),
    "d": range(500, 540),
    "e": range(40, 48),
}
LONG, SHORT = 32, 12
SLOTS, BLOCKS, BLOCK_TOKENS = 4, 8, 32
"""Requests at once, and KV blocks: fewer than so many requests need when they are long."""


def let_cpu_schedule_asynchronously() -> None:
    """vLLM's CPU platform switches it off because it gains nothing there; nothing depends on its being off."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)


def main(scheduling: str) -> None:
    os.environ.update(PROFILE.environment)
    from vllm import LLM, SamplingParams

    let_cpu_schedule_asynchronously()
    from vllm.engine.arg_utils import EngineArgs

    from patches.install import report

    known = EngineArgs.__dataclass_fields__
    arguments = {name: value for name, value in PROFILE.engine_args.items() if name in known}
    engine = LLM(
        model=resolve_model(PROFILE.model),
        speculative_config=PROFILE.speculation(Verification.ADAPTIVE),
        **arguments
        | {
            "max_model_len": 128,
            "max_num_seqs": SLOTS,
            "block_size": BLOCK_TOKENS,
            "num_gpu_blocks_override": BLOCKS,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "async_scheduling": scheduling == "async",
            "worker_extension_cls": "tests.patches.watching_worker.WatchingWorker",
        },
    )
    assert engine.llm_engine.vllm_config.scheduler_config.async_scheduling == (scheduling == "async")
    engine.collective_rpc("watch")
    core = engine.llm_engine
    for request, ids in PROMPTS.items():
        count = SHORT if request in "bd" else LONG
        greedy = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        core.add_request(request, {"prompt_token_ids": list(ids)}, greedy)
    tokens: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            said = list(output.outputs[0].token_ids)
            if output.request_id == "aborted" and len(said) > 4:
                core.abort_request(["aborted"])
            elif output.finished and output.request_id != "aborted":
                tokens[output.request_id] = said
    preemptions = next(m.value for m in engine.get_metrics() if m.name == "vllm:num_preemptions")
    (seen,) = engine.collective_rpc("seen")
    print(
        json.dumps({"applied": report()["applied"], "tokens": tokens, "preemptions": preemptions, "seen": seen}),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
