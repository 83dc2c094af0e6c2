"""adaptive-manager: puts our manager in the place of upstream's.

The manager's own module subclasses upstream's class, so it can be imported only after upstream's module was; this
one holds the hook that does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from patches.install import Hook, replace_everywhere


def _use_our_manager(adaptive_module: ModuleType) -> None:
    from patches.manager import AdaptiveManager

    replace_everywhere(
        "AdaptiveVerificationManager",
        AdaptiveManager,
        adaptive_module,
        ("vllm.v1.worker.gpu.model_runner",),
    )


HOOKS: Mapping[str, Hook] = {"vllm.v1.worker.gpu.spec_decode.adaptive_verification": _use_our_manager}
