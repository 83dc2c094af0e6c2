"""`python greedy_engine.py`: what the tiny pair says greedily under adaptive verification, as JSON.

Prints `{"applied": [ids of the patches], "tokens": [token ids of each request]}` as its last line.
"""

import json
import os

from serve.profile import Verification, load, resolve_model

PROFILE = load("tiny-cpu")
PROMPTS = (range(10, 40), range(300, 320), range(700, 760))


def main() -> None:
    os.environ.update(PROFILE.environment)
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from patches.install import report

    known = EngineArgs.__dataclass_fields__
    arguments = {name: value for name, value in PROFILE.engine_args.items() if name in known}
    engine = LLM(
        model=resolve_model(PROFILE.model),
        speculative_config=PROFILE.speculation(Verification.ADAPTIVE),
        **arguments | {"max_model_len": 128, "kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True},
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": list(ids)} for ids in PROMPTS], greedy, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"applied": report()["applied"], "tokens": tokens}))


if __name__ == "__main__":
    main()
