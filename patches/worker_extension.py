"""What a worker answers to the server: which patches it has, and its verification mode.

vLLM mixes this class into its worker (`--worker-extension-cls patches.worker_extension.WorkerExtension`). It is
imported by that option and not by the plugin, so a worker that never loaded the plugin answers too, and says so.
"""

from __future__ import annotations

from typing import Any

from patches import modes
from patches.install import report


class WorkerExtension:
    """Adds methods to the worker, reachable by `collective_rpc`, which runs them between steps."""

    def dspark_patch_report(self) -> dict[str, Any]:
        """This worker process's `patches.install.report`."""
        return report()

    def dspark_mode(self) -> str:
        """This worker's `patches.modes.mode_of`."""
        return modes.mode_of(self)

    def dspark_switch_mode(self, mode: str) -> str:
        """`patches.modes.switch` this worker."""
        return modes.switch(self, mode)
