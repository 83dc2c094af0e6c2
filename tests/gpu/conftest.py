"""GPU tests run on a Hopper GPU and are skipped, with the reason, everywhere else."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("needs a Hopper GPU; this host has no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"needs a Hopper GPU (sm90); this one is sm{capability[0]}{capability[1]}")
