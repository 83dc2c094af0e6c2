"""patch-report: lets the server ask an engine core which patches it has.

vLLM swallows a plugin that fails to import, and `VLLM_PLUGINS` can leave it out; the engine then serves unpatched and
nobody is told. So the server asks every process before it says that it is ready. A worker answers through
`patches.worker_extension`. An engine core has no such slot, but looks up the method that a utility call names on
itself (`EngineCoreProc._handle_client_request`): this adds the method. Without the plugin the method is missing, and
the call fails, which is an answer as well.

Delete this when upstream reports the plugins that every process has loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from patches.install import Hook, report


def _answer_utility_calls(core_module: ModuleType) -> None:
    def dspark_patch_report(_core: object) -> dict[str, Any]:
        """This engine core process's `patches.install.report`."""
        return report()

    core_module.EngineCore.dspark_patch_report = dspark_patch_report


HOOKS: Mapping[str, Hook] = {"vllm.v1.engine.core": _answer_utility_calls}
