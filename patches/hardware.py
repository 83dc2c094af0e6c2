"""Which hardware this vLLM runs on, told without importing torch (it takes seconds and a GPU context).

`cuda-hopper`, `rocm-gfx950` and `cpu` are served; anything else is named for what it is, with why it is not.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
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

    @property
    def why_not_served(self) -> str:
        """Why nothing here runs on it; empty where it is served."""
        if self.served:
            return ""
        if self.name.startswith("cuda-sm10"):
            return "upstream vLLM serves adaptive verification on Blackwell itself: use its own image"
        if self.name.startswith("cuda-"):
            return "only Hopper (sm90: H100, H200, H20, GH200) was validated among NVIDIA's GPUs"
        if self.name.startswith("rocm-"):
            return "only gfx950 (MI350X, MI355X) was validated among AMD's GPUs"
        return "a GPU needs its driver and its device files in the container; a CPU needs vLLM's CPU build"


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


def amd_render_minors() -> tuple[int, ...]:
    """The `renderD` number of every AMD GPU that KFD lists, in its order."""
    return tuple(int(node["drm_render_minor"]) for node in _amd_nodes() if "drm_render_minor" in node)


def _amd_architecture() -> str | None:
    """The first GPU's `gfx` name from KFD (`gfx_target_version` 90500 is gfx950), or None."""
    for node in _amd_nodes():
        version = int(node["gfx_target_version"])
        return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return None


def _amd_nodes() -> Iterator[dict[str, str]]:
    """The properties of every KFD node that is a GPU (a CPU's target version is 0)."""
    for properties in sorted(_KFD_NODES.glob("*/properties"), key=lambda path: (len(path.parts[-2]), path)):
        try:
            found = dict(re.findall(r"^(\w+) (\d+)$", properties.read_text(), re.MULTILINE))
        except OSError:
            continue
        if int(found.get("gfx_target_version", 0)):
            yield found


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
