"""Starts a DeepSeek-V4-shaped model with DSpark on one GPU and generates. usage: deepseek_v4.py FOLDER adaptive|fixed

Layer sizes are V4-Flash's, the layers are few, and the weights are random: nothing is downloaded. Prints one line
`RESULT {json}`; everything else is vLLM's log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LAYERS, DRAFTS = 6, 3
CONTEXT, OUTPUT, BATCHES, REPEATS = 1024, 128, (1, 4, 16), 3
MAX_REQUESTS = 16
BATCHED_TOKENS = 1024
"""The cost tables are profiled up to this size, and each size compiles kernels of its own."""

SLIDING, SPARSE, DENSE = 0, 4, 128
"""Compression of a layer's KV: none, the indexer's, the heaviest."""

MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "num_hash_layers": 1,
    "expert_dtype": "fp4",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "sliding_window": 128,
    "compress_ratios": [SLIDING, SPARSE, DENSE, SPARSE, DENSE, SPARSE],
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 3,
    "n_mtp_layers": 3,
    "dspark_block_size": DRAFTS,
    "dspark_target_layer_ids": [1, 3, LAYERS - 1],
    "dspark_noise_token_id": 3,
    "dspark_markov_rank": 256,
    "enable_confidence_head": True,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def start(folder: Path, mode: str) -> Any:
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(MODEL))
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=8192,
        max_num_seqs=MAX_REQUESTS,
        max_num_batched_tokens=BATCHED_TOKENS,
        gpu_memory_utilization=0.6,
        enable_prefix_caching=False,
        seed=0,
        kv_cache_dtype="fp8",
        block_size=256,
        # Compile what is used, when it is used: warming every key up takes minutes.
        kernel_config={"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "max_cudagraph_capture_size": MAX_REQUESTS * (DRAFTS + 1),
        },
        speculative_config={
            "method": "dspark",
            "num_speculative_tokens": DRAFTS,
            "draft_sample_method": "probabilistic",
            "enable_adaptive_verification": mode == "adaptive",
            "draft_load_config": {"load_format": "dummy"},
        },
    )


def generate(llm: Any, batch: int, tokens: int) -> float:
    """Seconds for `tokens` tokens of each of `batch` requests."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [(7 * request + 13 * place) % 129_000 + 8 for place in range(CONTEXT)]}
        for request in range(batch)
    ]
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=1)
    started = time.monotonic()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.monotonic() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens] * batch
    return seconds


def main(folder: Path, mode: str) -> None:
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    started = time.monotonic()
    llm = start(folder, mode)
    ready = time.monotonic() - started
    token_ms = {}
    for batch in BATCHES:
        generate(llm, batch, OUTPUT)
        runs = []
        for _ in range(REPEATS):
            prefill = generate(llm, batch, 1)
            runs.append(1e3 * (generate(llm, batch, OUTPUT) - prefill) / (OUTPUT - 1))
        token_ms[batch] = [round(milliseconds, 3) for milliseconds in sorted(runs)]
    print("RESULT", json.dumps({"mode": mode, "ready_s": round(ready, 1), "token_ms": token_ms}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
