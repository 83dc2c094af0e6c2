"""What this machine has: GPUs and their memory, driver, shared memory, limits, compilers. No torch is imported.

NVIDIA's GPUs are asked through NVML, AMD's through the kernel's KFD and DRM files. Not through libcuda: the engine
is forked from the process that runs this, and a child of a process that called `cuInit` has no CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from patches import hardware
from patches.hardware import Hardware

_DRM = Path("/sys/class/drm")
_KFD = Path("/dev/kfd")
_RENDER = Path("/dev/dri")
_SHARED_MEMORY = Path("/dev/shm")

COMPILERS = ("cc", "gcc", "clang", "nvcc", "hipcc")

_KERNEL_CACHES = (
    "AITER_JIT_DIR",
    "DG_JIT_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "TILELANG_CACHE_DIR",
)
"""Where a library puts the kernels that it builds, if it is not to be under one of the other caches."""


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use; sizes in bytes."""

    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """Facts about the machine and this process.

    Attributes:
        hardware: What vLLM would run on.
        gpus: The GPUs that this process may use, in its order.
        memory_available: Host memory that is available, in bytes.
        driver_cuda: CUDA version that the driver supports, as 1000 * major + 10 * minor; None without NVIDIA.
        torch_cuda: CUDA version that the installed torch was built for, in the same form; None where it is not known.
        closed_devices: Device files of AMD GPUs that this user may not open, or that are missing.
        shared_memory: Size of `/dev/shm` in bytes; None where there is none.
        open_files: Soft limit of open files.
        compilers: The compilers of `COMPILERS` on the path, and `cc` where `$CC` names one.
        readonly_caches: Cache folders (variable or usual name, then path) that cannot be written.
    """

    hardware: Hardware
    gpus: tuple[Gpu, ...] = ()
    memory_available: int = 0
    driver_cuda: int | None = None
    torch_cuda: int | None = None
    closed_devices: tuple[str, ...] = ()
    shared_memory: int | None = None
    open_files: int = 0
    compilers: frozenset[str] = frozenset()
    readonly_caches: tuple[str, ...] = ()


def survey_machine(environment: Mapping[str, str]) -> Machine:
    """Everything about this machine, with the caches that `environment` names."""
    found = hardware.detect()
    rocm = found.name.startswith("rocm")
    gpus: tuple[Gpu, ...] = ()
    if found.name.startswith("cuda"):
        gpus = _nvidia_gpus(environment)
    elif rocm:
        gpus = _amd_gpus(environment)
    return Machine(
        hardware=found,
        gpus=gpus,
        memory_available=psutil.virtual_memory().available,
        driver_cuda=_driver_cuda() if found.name.startswith("cuda") else None,
        torch_cuda=_torch_cuda(),
        closed_devices=_closed_devices() if rocm else (),
        shared_memory=_size(_SHARED_MEMORY),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        compilers=_compilers(environment),
        readonly_caches=tuple(
            f"{name} {path}" for name, path in cache_folders(environment).items() if not _writable(path)
        ),
    )


def cache_folders(environment: Mapping[str, str]) -> dict[str, Path]:
    """Every folder that vLLM or a kernel compiler writes to, by the variable that moves it."""
    home = Path(environment.get("HOME") or "/")
    base = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    usual = {
        "VLLM_CACHE_ROOT": base / "vllm",
        "TRITON_CACHE_DIR": home / ".triton",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()),
        "TMPDIR": Path(tempfile.gettempdir()),
    }
    folders = {name: Path(environment.get(name) or path) for name, path in usual.items()}
    kernels = {name: Path(environment[name]) for name in _KERNEL_CACHES if environment.get(name)}
    return {**folders, **kernels, "HF_HOME": _hub_cache(environment)}


def _hub_cache(environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HOME") or "/")
    base = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    return Path(environment.get("HF_HUB_CACHE") or environment.get("HF_HOME") or base / "huggingface")


def _existing(path: Path) -> Path:
    """The folder itself or the nearest one above it that exists."""
    try:
        return next(folder for folder in (path, *path.parents) if folder.exists())
    except (StopIteration, OSError, ValueError):
        return Path("/")


def _writable(path: Path) -> bool:
    folder = _existing(path)
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _size(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _compilers(environment: Mapping[str, str]) -> frozenset[str]:
    found = {name for name in COMPILERS if shutil.which(name, path=environment.get("PATH"))}
    for variable, root, name in (("CUDA_HOME", "/usr/local/cuda", "nvcc"), ("ROCM_PATH", "/opt/rocm", "hipcc")):
        if os.access(Path(environment.get(variable) or root) / "bin" / name, os.X_OK):
            found.add(name)
    if (environment.get("CC") and shutil.which(environment["CC"])) or found & {"gcc", "clang"}:
        found.add("cc")
    return frozenset(found)


def _torch_cuda() -> int | None:
    """From the local part of torch's version (`+cu130`), else from the CUDA runtime wheel that it depends on."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = re.search(r"\+cu(\d+)(\d)$", metadata.version("torch"))
        if found:
            return int(found[1]) * 1000 + int(found[2]) * 10
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            major, minor, *_ = metadata.version(name).split(".")
            return int(major) * 1000 + int(minor) * 10
    return None


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised; None where the driver is not there."""
    library: Any = None
    with contextlib.suppress(OSError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
    if library is None or library.nvmlInit_v2():
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _driver_cuda() -> int | None:
    version = ctypes.c_int()
    with _nvml() as nvml:
        if nvml is None or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version)):
            return None
    return version.value


def _nvidia_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, by index or UUID; as CUDA does, none after one that is not there."""
    with _nvml() as nvml:
        count = ctypes.c_uint()
        if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        chosen = environment.get("CUDA_VISIBLE_DEVICES")
        names = [str(index) for index in range(count.value)] if chosen is None else chosen.split(",")
        gpus = (_nvidia_gpu(nvml, name.strip()) for name in names)
        return tuple(iter(lambda: next(gpus, None), None))


def _nvidia_gpu(nvml: Any, name: str) -> Gpu | None:
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if name.isdecimal():
        missing = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        missing = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    if missing or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
        return None
    return Gpu(total=memory.total, free=memory.free)


def _amd_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that KFD lists and this container has a render node of, less the hidden ones."""
    gpus = []
    for minor in hardware.amd_render_minors():
        node = f"renderD{minor}"
        if not (_RENDER / node).exists():
            continue
        device = _DRM / node / "device"
        try:
            total = int((device / "mem_info_vram_total").read_text())
            used = int((device / "mem_info_vram_used").read_text())
        except (OSError, ValueError):
            continue
        gpus.append(Gpu(total=total, free=total - used))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        chosen = environment.get(variable)
        if chosen is not None:
            indices = [int(part) for part in chosen.split(",") if part.strip().isdigit()]
            return tuple(gpus[index] for index in indices if index < len(gpus))
    return tuple(gpus)


def _closed_devices() -> tuple[str, ...]:
    """What this user may not open: the compute device (also where it is missing) and the render nodes that are here."""
    nodes = (_RENDER / f"renderD{minor}" for minor in hardware.amd_render_minors())
    devices = [_KFD, *(node for node in nodes if node.exists())]
    return tuple(str(path) for path in devices if not os.access(path, os.R_OK | os.W_OK))
