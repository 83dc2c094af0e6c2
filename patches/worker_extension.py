"""What a worker answers when the server asks which patches it has.

vLLM mixes this class into its worker (`--worker-extension-cls patches.worker_extension.PatchReport`). It is imported
by that option and not by the plugin, so a worker that never loaded the plugin answers too, and says so.
"""

from __future__ import annotations

from typing import Any

from patches.install import report


class PatchReport:
    """Adds one method to the worker, reachable by `collective_rpc`."""

    def dspark_patch_report(self) -> dict[str, Any]:
        """This worker process's `patches.install.report`."""
        return report()
