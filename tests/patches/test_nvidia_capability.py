"""The GPU is asked for through NVML, so that the process that asks can still fork an engine with CUDA."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from patches import hardware


class Nvml:
    """An NVML with one Hopper GPU at each index and UUID that it knows."""

    def __init__(self, *known: bytes | int) -> None:
        self.known = known
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def _find(self, name: bytes | int, _device: Any) -> int:
        return 0 if name in self.known else 6

    nvmlDeviceGetHandleByIndex_v2 = nvmlDeviceGetHandleByUUID = _find  # noqa: N815

    def nvmlDeviceGetCudaComputeCapability(self, _device: Any, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = 9, 0
        return 0


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shared libraries that were opened; only NVML exists."""
    names: list[str] = []
    library = Nvml(0, 3, b"GPU-af")

    def load(name: str) -> Nvml:
        names.append(name)
        if name != "libnvidia-ml.so.1":
            raise OSError(name)
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(hardware, "_vllm_is_cpu_build", lambda: False)
    monkeypatch.setattr(hardware, "_amd_architecture", lambda: None)
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    return names


@pytest.mark.parametrize("visible", [None, "0", "3,0", "GPU-af"])
def test_hopper_is_found_without_the_cuda_driver(loaded, monkeypatch, visible):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.detect().name == hardware.CUDA_HOPPER
    assert loaded == ["libnvidia-ml.so.1"]
    assert ctypes.CDLL("libnvidia-ml.so.1").open == 0


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("visible", ["7", "", "GPU-b0"])
def test_a_gpu_that_is_not_visible_is_none(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.detect().name == "none"
    assert ctypes.CDLL("libnvidia-ml.so.1").open == 0
