"""Checks of the machine and of what this process may use of it."""

from __future__ import annotations

from patches.hardware import CPU, CUDA_HOPPER, ROCM_GFX950
from serve.preflight.check import Check, Finding, Problem, Severity, Unknown
from serve.preflight.facts import Facts
from serve.preflight.memory import ADAPTIVE_GRAPHS, FIXED_GRAPHS, GIB, Estimate, estimate
from serve.preflight.plan import Plan

SHARED_MEMORY = GIB
"""Least `/dev/shm` for more than one rank: Docker's default of 64 MiB is what fails in practice."""

CPU_SHARED_MEMORY = GIB // 4
"""Least `/dev/shm` on a CPU, whose one rank is a process of its own: vLLM's queue to it takes 160 MiB
(`vllm.distributed.device_communicators.shm_broadcast`)."""

OPEN_FILES = 4096
"""Least soft limit: one file a connection, and the engine's own sockets and shared memory."""

_CPU_KV_DEFAULT = 4 * GIB
_TOOLKIT = {CUDA_HOPPER: ("nvcc", "the CUDA toolkit (or CUDA_HOME)"), ROCM_GFX950: ("hipcc", "ROCm's hipcc")}


def _hardware(facts: Facts, plan: Plan) -> Finding:
    here = facts.machine.hardware
    if here.name == plan.profile.hardware:
        return None
    reason = f"; {here.why_not_served}" if here.why_not_served else ""
    return Problem(f"the profile is for {plan.profile.hardware} and this is {here.name} ({here.detail}){reason}")


def _gpu_count(facts: Facts, plan: Plan) -> Finding:
    have = len(facts.machine.gpus)
    if have >= plan.gpus:
        return None
    here = plan.local_engines is not None
    engines = plan.local_engines if here else plan.data_parallel_size
    product = f"{plan.tensor_parallel_size} x {plan.pipeline_parallel_size} x {engines}"
    nodes = f", over {plan.nodes} nodes" if plan.nodes > 1 else ""
    return Problem(
        f"{plan.gpus} GPUs are needed (tensor x pipeline x data parallel{' here' if here else ''} = {product}{nodes})"
        f" and {have} are visible"
    )


def _free_memory(facts: Facts, plan: Plan) -> Finding:
    for index, gpu in enumerate(facts.machine.gpus[: plan.gpus]):
        wanted = plan.gpu_memory_utilization * gpu.total
        if gpu.free < wanted:
            return Problem(
                f"GPU {index} has {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free, and vLLM wants"
                f" {plan.gpu_memory_utilization:g} x {gpu.total / GIB:.1f} = {wanted / GIB:.1f} GiB"
            )
    return None


def memory_estimate(facts: Facts, plan: Plan) -> Estimate | None:
    """What one GPU (or the host) needs for `plan`; None where the weights' size is not known."""
    if facts.target.weight_bytes is not None:
        weights = facts.target.weight_bytes
    elif plan.profile.checkpoint_gib is not None:
        weights = int(plan.profile.checkpoint_gib * GIB)
    else:
        return None
    if facts.draft is not None and facts.draft.name != facts.target.name:
        weights += facts.draft.weight_bytes or 0
    ranks = plan.tensor_parallel_size * plan.pipeline_parallel_size
    if plan.on("enable_expert_parallel"):
        ranks *= plan.data_parallel_size
    graphs = 0
    if plan.profile.hardware != CPU and not plan.on("enforce_eager"):
        graphs = ADAPTIVE_GRAPHS if plan.adaptive else FIXED_GRAPHS
    return estimate(
        weight_bytes=weights,
        ranks=ranks,
        config=facts.target.text_config,
        tokens=plan.max_model_len or facts.target.number("max_position_embeddings") or 0,
        kv_bytes=1 if plan.kv_cache_dtype.startswith("fp8") else 2,
        shards=plan.tensor_parallel_size,
        graphs=graphs,
    )


def _memory(facts: Facts, plan: Plan) -> Finding:
    need = memory_estimate(facts, plan)
    if need is None:
        return Unknown("the size of the weights")
    if plan.profile.hardware == CPU:
        cache = plan.kv_cache_memory_bytes or _CPU_KV_DEFAULT
        total, have = need.weights + cache, facts.machine.memory_available
        if total <= have:
            return None
        return Problem(
            f"weights {need.weights / GIB:.2f} GiB + KV cache {cache / GIB:.2f} GiB = {total / GIB:.2f} GiB,"
            f" and {have / GIB:.2f} GiB of memory are available",
            "set kv_cache_memory_bytes lower, or give the machine more memory",
        )
    if not facts.machine.gpus:
        return Unknown("the GPUs' memory")
    smallest = min(gpu.total for gpu in facts.machine.gpus[: plan.gpus])
    allowed = plan.gpu_memory_utilization * smallest
    if need.total <= allowed:
        return None
    share = f"{plan.gpu_memory_utilization:g} x {smallest / GIB:.1f} = {allowed / GIB:.1f} GiB"
    return Problem(f"{need}, and one GPU's share is {share}")


def _driver(facts: Facts, plan: Plan) -> Finding:
    if plan.profile.hardware != CUDA_HOPPER:
        return None
    driver, torch = facts.machine.driver_cuda, facts.machine.torch_cuda
    if driver is None or torch is None:
        return Unknown("the CUDA version of the driver or of torch")
    if driver // 1000 >= torch // 1000:
        return None
    return Problem(f"the driver supports CUDA {_cuda(driver)} and torch was built for CUDA {_cuda(torch)}")


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _devices(facts: Facts, _: Plan) -> Finding:
    closed = facts.machine.closed_devices
    return Problem(f"this user cannot open {', '.join(closed)}") if closed else None


def _shared_memory(facts: Facts, plan: Plan) -> Finding:
    if plan.profile.hardware == CPU:
        ranks, least = "the engine and its worker", CPU_SHARED_MEMORY
    elif plan.gpus > 1:
        ranks, least = f"{plan.gpus} ranks", SHARED_MEMORY
    else:
        return None
    size = facts.machine.shared_memory
    if size is not None and size >= least:
        return None
    have = "there is none" if size is None else f"it has {_mib(size)}"
    return Problem(f"{ranks} exchange data over /dev/shm, and {have} (at least {_mib(least)} are needed)")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def _open_files(facts: Facts, _: Plan) -> Finding:
    limit = facts.machine.open_files
    if limit < 0 or limit >= OPEN_FILES:
        return None
    return Problem(f"this process may open {limit} files; every connection takes one (at least {OPEN_FILES} are right)")


def _caches(facts: Facts, _: Plan) -> Finding:
    closed = facts.machine.readonly_caches
    return Problem(f"cannot be written: {', '.join(closed)}") if closed else None


def _compiler(facts: Facts, plan: Plan) -> Finding:
    if plan.profile.hardware == CPU or "cc" in facts.machine.compilers:
        return None
    return Problem("Triton compiles a launcher for each kernel at its first use, and there is no C compiler")


def _kernel_compiler(facts: Facts, plan: Plan) -> Finding:
    if plan.profile.hardware not in _TOOLKIT or _TOOLKIT[plan.profile.hardware][0] in facts.machine.compilers:
        return None
    program, origin = _TOOLKIT[plan.profile.hardware]
    return Problem(f"kernels that are built at first use need {program}, which is not here", f"install {origin}")


def _port(facts: Facts, _: Plan) -> Finding:
    return Problem(facts.port) if facts.port else None


CHECKS = (
    Check(
        "hardware",
        "This machine is the hardware that the profile is for, and that hardware is served",
        "NVML (NVIDIA), the kernel's topology (AMD), vLLM's build (CPU)",
        "choose a profile for this hardware: dspark-serve profiles marks them",
        _hardware,
    ),
    Check(
        "gpu-count",
        "As many GPUs are visible as the ranks need",
        "NVML or KFD and the visible-devices variables against the parallel sizes",
        "give the container more GPUs, or set tensor_parallel_size and data_parallel_size lower",
        _gpu_count,
    ),
    Check(
        "gpu-memory-free",
        "Every GPU has as much free memory as vLLM will claim",
        "NVML or the DRM files against gpu_memory_utilization",
        "end what else runs on the GPU, or set gpu_memory_utilization lower",
        _free_memory,
    ),
    Check(
        "memory",
        "Weights, KV cache of one longest request and graphs fit",
        "the weights' index (else the profile's checkpoint_gib), config.json, graphs as measured upstream",
        "use more GPUs, or set max_model_len lower",
        _memory,
    ),
    Check(
        "driver",
        "The NVIDIA driver supports torch's CUDA version",
        "NVML against the installed torch's build",
        "update the driver, or use an image built for its CUDA version",
        _driver,
    ),
    Check(
        "device-access",
        "This user may open the AMD device files",
        "/dev/kfd and the render nodes",
        "docker run --device /dev/kfd --device /dev/dri with --group-add for their numeric groups; in Kubernetes the"
        " device plugin and supplementalGroups",
        _devices,
    ),
    Check(
        "shared-memory",
        "/dev/shm is large enough for the ranks",
        "its size",
        "docker run --shm-size 16g, or a memory-backed emptyDir at /dev/shm in Kubernetes",
        _shared_memory,
    ),
    Check(
        "open-files",
        "Enough files may be open",
        "the soft limit of this process",
        "ulimit -n 65536, or docker run --ulimit nofile=65536:65536",
        _open_files,
        Severity.WARNING,
    ),
    Check(
        "caches",
        "The caches of vLLM, of kernel compilers and of models can be written",
        "the folders that HOME and the cache variables name",
        "set HOME (or the named variable) to a writable volume",
        _caches,
    ),
    Check(
        "compiler",
        "There is a C compiler for Triton",
        "the path and CC",
        "install gcc, or use this project's image",
        _compiler,
    ),
    Check(
        "kernel-compiler",
        "There is a compiler for kernels that are built at first use",
        "nvcc or hipcc on the path, under CUDA_HOME or ROCM_PATH",
        "use this project's image",
        _kernel_compiler,
        Severity.WARNING,
    ),
    Check(
        "port",
        "The server's port is free",
        "by binding it for a moment",
        "choose another with --port or --host, or end what listens there",
        _port,
    ),
)
