"""A vLLM plugin for hosts without the CuTe DSL: DeepSeek-V4's KV compressor in Triton.

On CUDA, vLLM's `models/deepseek_v4/compressor.py` takes a CuTe DSL kernel for head size 512 and does not ask whether
`nvidia-cutlass-dsl` is installed. Its Triton kernel for other platforms does the same work. Only the smoke test of
this folder uses it; it is no part of the patched backend.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

_COMPRESSOR = "vllm.models.deepseek_v4.compressor"


class _AnotherPlatform(wrapt.ObjectProxy):
    """The platform as it is, except that it does not call itself CUDA."""

    def is_cuda(self) -> bool:
        return False


def _use_triton(compressor: ModuleType) -> None:
    compressor_module: Any = compressor
    compressor_module.current_platform = _AnotherPlatform(compressor_module.current_platform)


def register() -> None:
    wrapt.register_post_import_hook(_use_triton, _COMPRESSOR)
