"""Put on PYTHONPATH, it gives every process of a server a rejection sampler that takes no more than 64 rows at once.

With a vocabulary of 151,936 tokens upstream's limit is 1,766 rows; with the tiny pair's 1,024 no test would reach it.
"""

import wrapt

ROWS, VOCABULARY, BYTES_PER_LOGIT = 64, 1024, 4


def _limit(sampler_module):
    sampler_module.MAX_CHUNK_BYTES = ROWS * VOCABULARY * BYTES_PER_LOGIT


wrapt.register_post_import_hook(_limit, "vllm.v1.worker.gpu.spec_decode.rejection_sampler")
