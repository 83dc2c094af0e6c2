"""Python imports this at start where the folder is on `PYTHONPATH`: the drafter's head then doubles its log-odds.

Every confidence is nearer to 0 or 1 than the trained head means it, which makes the head far too sure of itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

FACTOR = 2.0


def _make_bold(speculator_module: ModuleType) -> None:
    def sample(wrapped: Callable[..., None], speculator: Any, args: Any, kwargs: Any) -> None:
        wrapped(*args, **kwargs)
        confidences = speculator.draft_token_confidence_probs
        confidences.copy_((FACTOR * confidences.logit(1e-6)).sigmoid())

    wrapt.wrap_function_wrapper(speculator_module, "DSparkSpeculator._sample_sequential", sample)


wrapt.register_post_import_hook(_make_bold, "vllm.v1.worker.gpu.spec_decode.dspark.speculator")
