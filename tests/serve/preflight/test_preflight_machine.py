"""The machine's facts from made-up kernel files and from this machine, and the memory arithmetic."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_up import CONFIGS, V4_CONFIG, made_up_facts, made_up_plan

from patches import hardware
from patches.hardware import CPU, CUDA_HOPPER, ROCM_GFX950, SERVED, Hardware
from serve.listening import port_problem
from serve.preflight import machine
from serve.preflight.checks.machine import memory_estimate
from serve.preflight.machine import Gpu, cache_folders, survey_machine
from serve.preflight.memory import GIB, estimate, kv_bytes_per_token
from serve.profile import Verification


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """KFD and DRM files of a host with two GPUs, of which this container has the second one's render node only."""
    nodes, drm = tmp_path / "nodes", tmp_path / "drm"
    for index, (target, minor) in enumerate([(0, 0), (90500, 128), (90500, 129)]):
        device = drm / f"renderD{minor}" / "device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{288 * GIB}\n")
        (device / "mem_info_vram_used").write_text(f"{8 * GIB}\n")
        folder = nodes / str(index)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {target}\ndrm_render_minor {minor}\n"
        )
    monkeypatch.setattr(hardware, "_KFD_NODES", nodes)
    monkeypatch.setattr(hardware, "_vllm_is_cpu_build", lambda: False)
    monkeypatch.setattr(machine, "_DRM", drm)
    monkeypatch.setattr(machine, "_RENDER", tmp_path / "dri")
    monkeypatch.setattr(machine, "_KFD", tmp_path / "kfd")
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD129").touch()
    (tmp_path / "kfd").touch()
    return nodes


@pytest.mark.usefixtures("amd")
def test_an_amd_machine_is_told_from_the_kernels_files() -> None:
    found = survey_machine({})
    assert found.hardware == Hardware(ROCM_GFX950, "AMD gfx950")
    assert found.gpus == (Gpu(288 * GIB, 280 * GIB),)
    assert survey_machine({"HIP_VISIBLE_DEVICES": "1"}).gpus == ()
    assert survey_machine({"ROCR_VISIBLE_DEVICES": "0"}).gpus == found.gpus


def two_gpus() -> SimpleNamespace:
    """NVML of a machine with GPUs of 140 and 80 GiB, the second with 10 GiB in use."""
    gpus, uuids = ((140, 140), (80, 70)), (b"GPU-aa", b"GPU-bb")
    absent = 6

    def tell(target: Any, value: int) -> int:
        target._obj.value = value
        return 0

    def by_index(index: int, handle: Any) -> int:
        return tell(handle, index + 1) if index < len(gpus) else absent

    def by_uuid(uuid: bytes, handle: Any) -> int:
        return by_index(uuids.index(uuid), handle) if uuid in uuids else absent

    def memory(handle: Any, told: Any) -> int:
        told._obj.total, told._obj.free = (size * GIB for size in gpus[handle.value - 1])
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlSystemGetCudaDriverVersion_v2=lambda version: tell(version, 13010),
        nvmlDeviceGetCount_v2=lambda count: tell(count, len(gpus)),
        nvmlDeviceGetHandleByIndex_v2=by_index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetMemoryInfo=memory,
    )


@pytest.mark.parametrize(
    ("visible", "totals"),
    [
        (None, [140, 80]),
        ("0,1", [140, 80]),
        ("1", [80]),
        ("GPU-bb, GPU-aa", [80, 140]),
        ("", []),
        ("0,7,1", [140]),
        ("-1", []),
        ("GPU-cc", []),
    ],
)
def test_nvidia_gpus_are_those_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, totals: list[int]
) -> None:
    libraries: list[str] = []
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: libraries.append(name) or two_gpus())
    monkeypatch.setattr(hardware, "detect", lambda: Hardware(CUDA_HOPPER, "NVIDIA sm90"))
    found = survey_machine({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.total // GIB for gpu in found.gpus] == totals
    assert found.driver_cuda == 13010
    # Never libcuda: the engine is forked from this process.
    assert set(libraries) == {"libnvidia-ml.so.1"}


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    monkeypatch.setattr(hardware, "detect", lambda: Hardware(CUDA_HOPPER, "NVIDIA sm90"))
    found = survey_machine({})
    assert (found.gpus, found.driver_cuda) == ((), None)


@pytest.mark.usefixtures("amd")
def test_amd_devices_that_are_missing_from_the_container_are_told(tmp_path: Path) -> None:
    assert survey_machine({}).closed_devices == ()
    (tmp_path / "kfd").unlink()
    (tmp_path / "dri" / "renderD129").unlink()
    found = survey_machine({})
    assert (found.closed_devices, found.gpus) == ((str(tmp_path / "kfd"),), ())


@pytest.mark.parametrize(("target", "name"), [("90402", "rocm-gfx942"), ("110000", "rocm-gfx1100")])
def test_another_amd_gpu_is_named_with_why_it_is_not_served(amd: Path, target: str, name: str) -> None:
    for properties in amd.glob("*/properties"):
        properties.write_text(properties.read_text().replace("90500", target))
    found = hardware.detect()
    assert found.name == name
    assert "gfx950" in found.why_not_served


@pytest.mark.parametrize(
    ("name", "reason"),
    [("cuda-sm100", "Blackwell"), ("cuda-sm80", "Hopper"), ("rocm-gfx942", "gfx950"), ("none", "driver")],
)
def test_what_is_not_served_says_why(name: str, reason: str) -> None:
    assert reason in Hardware(name, "").why_not_served
    assert all(Hardware(served, "").why_not_served == "" for served in SERVED)


def test_this_machine_is_surveyed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = survey_machine({"HOME": str(tmp_path), "PATH": "/nowhere", "HF_HOME": f"{file}/models"})
    assert found.hardware.name == CPU
    assert found.memory_available > 0
    assert found.open_files != 0
    assert found.gpus == ()
    assert found.readonly_caches == (f"HF_HOME {file}/models",)


def test_compilers_are_looked_for_on_the_given_path(tmp_path: Path) -> None:
    for name in ("gcc", "hipcc"):
        (tmp_path / name).touch(mode=0o755)
    assert {"gcc", "cc", "hipcc"} <= survey_machine({"PATH": str(tmp_path)}).compilers
    assert "cc" not in survey_machine({"PATH": str(tmp_path / "empty")}).compilers
    toolkit = tmp_path / "cuda" / "bin"
    toolkit.mkdir(parents=True)
    (toolkit / "nvcc").touch(mode=0o755)
    assert "nvcc" in survey_machine({"PATH": "", "CUDA_HOME": str(tmp_path / "cuda")}).compilers


def test_caches_follow_their_variables() -> None:
    folders = cache_folders({"HOME": "/h", "XDG_CACHE_HOME": "/x", "TRITON_CACHE_DIR": "/t", "HF_HOME": "/m"})
    assert (folders["VLLM_CACHE_ROOT"], folders["TRITON_CACHE_DIR"]) == (Path("/x/vllm"), Path("/t"))
    assert folders["HF_HOME"] == Path("/m")
    assert cache_folders({"HOME": "/h"})["HF_HOME"] == Path("/h/.cache/huggingface")


def test_a_library_has_a_cache_of_its_own_only_where_its_variable_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "DG_JIT_CACHE_DIR" not in cache_folders({"HOME": "/h"})
    assert cache_folders({"HOME": "/h", "DG_JIT_CACHE_DIR": "/dg"})["DG_JIT_CACHE_DIR"] == Path("/dg")
    found = survey_machine({"HOME": "/tmp", "PATH": "", "AITER_JIT_DIR": f"{file}/aiter"})
    assert found.readonly_caches == (f"AITER_JIT_DIR {file}/aiter",)


def test_a_port_is_tried() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_problem("127.0.0.1", port) == f"cannot listen on 127.0.0.1:{port}: Address already in use"
    assert port_problem("127.0.0.1", port) is None
    assert port_problem("::1", 0) is None or "address" in str(port_problem("::1", 0)).lower()
    assert port_problem("no such host", 80)
    assert port_problem("127.0.0.1", 70000)


def test_kv_of_a_plain_model_is_two_rows_a_layer_split_over_ranks() -> None:
    config = CONFIGS["Qwen/Qwen3-8B"]
    assert kv_bytes_per_token(config, 2, 1) == 2 * 36 * 8 * 128 * 2
    assert kv_bytes_per_token(config, 1, 4) == 2 * 36 * 2 * 128
    assert kv_bytes_per_token(config, 2, 64) == 2 * 36 * 1 * 128 * 2
    assert kv_bytes_per_token({}, 2, 1) == 0


def test_kv_of_a_compressed_model_is_one_row_per_ratio_and_indexer_keys() -> None:
    assert kv_bytes_per_token({"compress_ratios": [0, 4, 128]}, 1, 4) == 584 / 4 + 584 / 128 + 132 / 4
    assert kv_bytes_per_token({"compress_ratios": ["x", None, True, -1]}, 1, 1) == 0


def test_the_estimate_says_its_arithmetic() -> None:
    need = estimate(
        weight_bytes=160 * GIB, ranks=4, config=V4_CONFIG, tokens=8192, kv_bytes=1, shards=2, graphs=5 * GIB
    )
    assert need.total == 40 * GIB + int(kv_bytes_per_token(V4_CONFIG, 1, 2) * 8192) + 5 * GIB
    assert str(need).startswith("weights 160.0/4 = 40.0 GiB + KV of one request of 8,192 tokens 0.0")
    assert str(need).endswith("GiB + graphs 5.00 GiB = 45.0 GiB")


@pytest.mark.parametrize(("verification", "graphs"), [(Verification.ADAPTIVE, 4.71), (Verification.FIXED, 2.61)])
def test_adaptive_verification_captures_more(verification: Verification, graphs: float) -> None:
    planned = made_up_plan("deepseek-v4-flash-h200x4", verification=verification)
    need = memory_estimate(made_up_facts(planned), planned)
    assert need is not None
    assert need.graphs == int(graphs * GIB)
    assert need.ranks == 4
    assert need.weights == int(155.5 * GIB) // 4


def test_weights_are_replicated_over_data_parallel_ranks_without_expert_parallelism() -> None:
    planned = made_up_plan("deepseek-v4-flash-h200x4", ["enable_expert_parallel=false"])
    need = memory_estimate(made_up_facts(planned), planned)
    assert need is not None
    assert need.ranks == 2


def test_a_separate_drafts_weights_count() -> None:
    planned = made_up_plan("tiny-cpu")
    facts = made_up_facts(planned)
    need = memory_estimate(facts, planned)
    assert need is not None
    assert facts.draft is not None
    assert need.weights == (facts.target.weight_bytes or 0) + (facts.draft.weight_bytes or 0)
    assert need.graphs == 0


def test_hardware_names_are_those_of_the_profiles() -> None:
    assert {made_up_plan(name).profile.hardware for name in ("tiny-cpu", "qwen3-8b-dspark-h200")} == {CPU, CUDA_HOPPER}
