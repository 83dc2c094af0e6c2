"""The plan against vLLM's own parser: what preflight judges is what vLLM would read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from made_up import made_up_plan

from serve.profile import Verification, bundled_names, load

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
def read(words):
    found = vars(parser.parse_args(words))
    kept = {name: found[name] for name in NAMES}
    compilation = found["compilation_config"]
    return kept | {"max_cudagraph_capture_size": compilation.max_cudagraph_capture_size}
print(json.dumps([read(words) for words in json.load(sys.stdin)], default=str))
"""
NAMES = [
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_num_seqs", "max_model_len",
    "gpu_memory_utilization", "kv_cache_dtype", "speculative_config", "enforce_eager", "enable_expert_parallel",
    "enable_lora", "optimization_level",
]  # fmt: skip
WORDS = [
    [],
    ["-tp", "2", "-cc.max_cudagraph_capture_size=64", "--speculative-config.num_speculative_tokens", "3", "-O2"],
    ["--max-num-seqs=7", "--max_model_len", "8k", "--enforce-eager", "--enable-lora", "--gpu-memory-utilization=0.5"],
    ["--speculative_config.draft_sample_method=greedy", "-ep", "--kv-cache-dtype", "bfloat16", "-dp=2"],
    ["--compilation-config", '{"max_cudagraph_capture_size": 32}', "--no-enforce-eager", "--max-model-len=8K"],
]
STARTS = [
    (name, mode, words)
    for name in bundled_names()
    for mode in Verification
    for words in WORDS
    if mode is not Verification.OFF or "speculative" not in " ".join(words)
]
FLAGS = ("enforce_eager", "enable_expert_parallel", "enable_lora")


@pytest.fixture(scope="module")
def parsed() -> list[dict[str, Any]]:
    """Every start as vLLM's parser reads it, in one process: its import takes most of the time."""
    lines = [["--model", *load(name).command_line(mode, words)] for name, mode, words in STARTS]
    result = subprocess.run(
        [sys.executable, "-c", f"NAMES = {NAMES}\n{PARSE}"],
        input=json.dumps(lines),
        env={**os.environ, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_the_plan_reads_every_start_as_vllm_does(parsed: list[dict[str, Any]]) -> None:
    for (name, mode, words), theirs in zip(STARTS, parsed, strict=True):
        plan = made_up_plan(name, extra=words, verification=mode)
        flags = {flag: plan.on(flag) for flag in FLAGS}
        sizes = {size: getattr(plan, size) for size in theirs if hasattr(plan, size)}
        ours = flags | sizes | {"speculative_config": dict(plan.speculation) or None}
        ours["optimization_level"] = int(plan.arguments.get("optimization_level", 2))
        theirs |= {flag: bool(theirs[flag]) for flag in FLAGS}
        assert ours == theirs | {"optimization_level": int(theirs["optimization_level"])}, (name, mode, words)
