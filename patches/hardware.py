"""Which hardware this vLLM runs on, told without importing torch (it takes seconds and a GPU context).

`cuda-hopper`, `rocm-gfx950` and `cpu` are served; anything else is named for what it is.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

CPU = "cpu"
CUDA_HOPPER = "cuda-hopper"
ROCM_GFX950 = "rocm-gfx950"
SERVED = (CUDA_HOPPER, ROCM_GFX950, CPU)

_KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class Hardware:
    """What the machine has: `name` is one of `SERVED` or says what it is instead."""

    name: str
    detail: str

    @property
    def served(self) -> bool:
        """Whether this package has patches and profiles for it."""
        return self.name in SERVED


def detect() -> Hardware:
    """The hardware that this environment's vLLM would use.

    A CPU build of vLLM uses the CPU on any machine (as `vllm.platforms.cpu_platform_plugin` decides); otherwise
    the first GPU counts, AMD's through the kernel's KFD topology, NVIDIA's through the driver library.
    """
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu" or _vllm_is_cpu_build():
        return Hardware(CPU, "vLLM's CPU build")
    architecture = _amd_architecture()
    if architecture is not None:
        name = ROCM_GFX950 if architecture == "gfx950" else f"rocm-{architecture}"
        return Hardware(name, f"AMD {architecture}")
    capability = _nvidia_capability()
    if capability is not None:
        major, minor = capability
        name = CUDA_HOPPER if (major, minor) == (9, 0) else f"cuda-sm{major}{minor}"
        return Hardware(name, f"NVIDIA sm{major}{minor}")
    return Hardware("none", "no GPU was found and this vLLM is not a CPU build")


def _vllm_is_cpu_build() -> bool:
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False


def _amd_architecture() -> str | None:
    """The first GPU's `gfx` name from KFD (`gfx_target_version` 90500 is gfx950), or None."""
    for properties in sorted(_KFD_NODES.glob("*/properties")):
        try:
            text = properties.read_text()
        except OSError:
            continue
        found = re.search(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
        if found and (version := int(found[1])):
            return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return None


def _nvidia_capability() -> tuple[int, int] | None:
    """The first visible GPU's compute capability from NVML, or None where there is no driver or no GPU.

    Not from the CUDA driver: this runs in the process that forks the engine, and a child of a process that called
    `cuInit` has no CUDA.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        if first.isdigit():
            missing = nvml.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(device))
        else:
            missing = nvml.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(device))
        if missing or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            return None
    finally:
        nvml.nvmlShutdown()
    return major.value, minor.value
