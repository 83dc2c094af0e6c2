"""`python handshake_engine.py RANKS`: start a real CPU engine and print what the handshake with it says.

One line for the digest that this process has, one for a digest that no process has.
"""

import asyncio
import sys

from patches.install import install
from serve.handshake import WORKER_EXTENSION, PatchMismatchError, confirm_patches
from serve.profile import resolve_model


async def main(ranks: int) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    expected = install().digest
    arguments = AsyncEngineArgs(
        model=resolve_model("bundled:tiny/target"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel_size=ranks,
        worker_extension_cls=WORKER_EXTENSION,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        for digest in (expected, "no such digest"):
            try:
                await confirm_patches(engine, digest)
                print("said: every process agrees", flush=True)
            except PatchMismatchError as error:
                print("said:", error, flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
