"""`python ranks.py OUT STEPS {shared,own}`: two tensor-parallel ranks plan the same steps from different estimates.

Each rank is a process of a real gloo group with vLLM's own tensor-parallel coordinator, and plans with the real
manager of the vLLM on `PYTHONPATH`, patched as that release on that hardware is. Scheduling is the same on both;
every estimate of rank 1 is off by a little, and those of rank 0 are quarters, whose products are exact. `own` leaves
out the sharing of estimates. With `DSPARK_CALIBRATION=on` rank 0, which alone counts, finds new temperatures all the
time. What each rank decided goes to OUT, one file a rank: per step the budget, then the boundaries of the batch.
"""

import multiprocessing
import os
import socket
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from patches.calibration.mode import CalibrationMode, chosen_mode
from patches.hardware import CPU, CUDA_HOPPER
from patches.install import apply, survey, switched_off_ids, vllm_root

RANKS, SLOTS, STEPS, WIDTH = 2, 12, 4, 64
"""Ranks, request slots, longest draft, and numbers recorded for a step."""

CAPTURED, CHUNK = [1, 2, 4, *range(8, 57, 8)], 24
"""Token counts with a graph, and rows of logits that the sampler takes at once."""


class _NoDevice:
    """A CPU has neither streams nor events nor pinned memory: work is done when its call returns."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...
    def wait_stream(self, _other: object) -> None: ...
    def synchronize(self) -> None: ...
    def record(self, _stream: object = None) -> None: ...


def _stand_in_for_a_device() -> None:
    torch.cuda.Stream = torch.cuda.Event = _NoDevice  # type: ignore[misc, assignment]
    torch.cuda.current_stream = lambda _device=None: _NoDevice()  # type: ignore[assignment]
    torch.cuda.set_stream = lambda _stream: None
    torch.Tensor.pin_memory = lambda self, *_args: self  # type: ignore[method-assign]


def manager_module():
    """Upstream's module with the patches of its release applied, its ranking run eagerly."""
    import vllm

    release = os.environ["DSPARK_TEST_RELEASE"]
    hardware = CPU if "site-packages" in vllm.__file__ else CUDA_HOPPER
    installed = apply(
        survey(release=release, hardware_name=hardware, vllm_root=vllm_root(), switched_off=switched_off_ids())
    )
    assert {"adaptive-manager", "tp-consensus"} <= set(installed.applied), installed.decisions
    from vllm.v1.worker.cpu.buffer_utils import UvaBuffer
    from vllm.v1.worker.gpu import buffer_utils

    # Upstream's own stand-in for pinned memory, and that there is any.
    buffer_utils.UvaBuffer, buffer_utils.is_uva_available = UvaBuffer, lambda: True
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    assert adaptive_verification.AdaptiveVerificationManager.__module__ == "patches.manager"
    adaptive_verification._assign_draft_token_budget_compiled = adaptive_verification._assign_draft_token_budget
    return adaptive_verification


def request_states() -> SimpleNamespace:
    """What the manager reads of `RequestState`: slots, and requests that are all past their prefill of 8 tokens."""
    return SimpleNamespace(
        num_speculative_steps=STEPS,
        device=torch.device("cpu"),
        max_num_reqs=SLOTS,
        max_model_len=4096,
        max_num_batched_tokens=SLOTS * (STEPS + 1),
        req_id_to_index={f"r{slot}": slot for slot in range(SLOTS)},
        num_computed_tokens_np=np.full(SLOTS, 8, dtype=np.int32),
        prefill_len=SimpleNamespace(np=np.full(SLOTS, 8, dtype=np.int32)),
    )


def count_writes(pool) -> list[torch.Tensor]:
    """What is written to upstream's `UvaBufferPool` from now on."""
    written, copy_to_uva = [], pool.copy_to_uva

    def counted(values):
        written.append(copy_to_uva(values))
        return written[-1]

    pool.copy_to_uva = counted
    return written


def plan(manager, rank: int, steps: int) -> np.ndarray:
    """[steps, WIDTH] what this rank decides."""
    written, ranked = count_writes(manager._batches), 0
    schedule = np.random.default_rng(1)
    noise = np.random.default_rng(2)
    decisions = np.zeros((steps, WIDTH), dtype=np.int32)
    for slot in range(SLOTS):
        manager.add_request(slot)
    for step in range(steps):
        slots = schedule.permutation(SLOTS)[: schedule.integers(1, SLOTS + 1)]
        ids = [f"r{slot}" for slot in slots]
        drafts = schedule.integers(1, STEPS + 1, len(ids))
        if schedule.random() < 0.2:
            manager.add_request(int(slots[0]))
        tokens = {i: int(n) + 1 for i, n in zip(ids, drafts, strict=True)}
        decisions[step, 0] = manager.get_num_tokens(tokens, {i: [7] * (tokens[i] - 1) for i in ids})
        rows = drafts.astype(np.int32)
        counts, ends = manager.compact_batch(rows, rows + 1, np.cumsum(np.append(0, rows + 1)))
        # `GPUModelRunner.prepare_inputs` uploads the host's boundaries before it asks for the device's.
        manager.query_start_loc.fill_(int(decisions[step, 0]))
        manager.query_start_loc[: len(ids) + 1] = torch.from_numpy(np.cumsum(np.append(0, counts)))
        written.clear()
        logits, queries, budget = manager.reallocate_drafts(ids, torch.from_numpy(slots))[:3]
        assert len(written) <= 1, "a place is used again after as many writes as there can be steps under way"
        ranked += len(written)
        if budget + len(ids) > CHUNK:
            assert ends.tolist() == logits.tolist(), "the sampler cuts chunks where the host says"
        boundaries = np.concatenate((logits.numpy(), queries[: len(ids) + 1].numpy()))
        decisions[step, 1] = budget
        decisions[step, 2 : 2 + boundaries.size] = boundaries
        # Estimates in quarters tie often; a rank's own error is as likely to break a tie as to keep it.
        estimates = schedule.integers(1, 5, (SLOTS, STEPS)) / 4 - rank * 1e-3 * noise.integers(0, 2, (SLOTS, STEPS))
        if rank == 0 and chosen_mode() is CalibrationMode.ON:
            manager.calibration.temperatures = noise.uniform(0.5, 2, STEPS)
        batch = SimpleNamespace(num_reqs=len(ids), idx_mapping=torch.from_numpy(slots))
        manager.record_confidences(torch.from_numpy(estimates.astype(np.float32)), batch)
    if rank == 0 and chosen_mode() is CalibrationMode.ON:
        assert (manager.calibration.applied != 1).all(), "the temperatures were never used"
    assert (ranked > 0) == (manager._ranking is not None)
    return decisions


def timed(batch: dict[str, int], rank: int) -> SimpleNamespace:
    """What a rank measures of one batch of its profile."""
    tokens = batch["num_tokens"]
    requests = min(tokens, SLOTS)
    return SimpleNamespace(
        num_target_tokens=tokens,
        num_reqs=requests,
        forward_ms=10.0
        + 1e-4 * batch["context_len"] * requests
        + (0.1 + 0.2 * rank) * tokens
        + 0.02 * max(tokens - 24, 0) ** 1.5,
        drafter_ms=1.0 + rank + 0.1 * requests,
        full_cudagraph=tokens <= CAPTURED[-1],
    )


def manager_of(rank: int, port: int, adaptive):
    """This rank's manager, in a group of `RANKS`, and the states that it reads."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        parallel_state.initialize_model_parallel(RANKS, backend="gloo")
    states = request_states()
    manager = adaptive.AdaptiveVerificationManager(
        states, torch.zeros(SLOTS + 1, dtype=torch.int32), num_bonus_tokens=1, max_total_logits=CHUNK
    )
    assert manager._shares_estimates
    # Rank 1 measures costs of its own; upstream's broadcast replaces them by rank 0's.
    manager.set_initial_cost_curves([timed(batch, rank) for batch in manager.batches_to_profile(CAPTURED)])
    return manager, states


def run_rank(rank: int, port: int, out: Path, steps: int, shared: bool, adaptive) -> None:
    manager, _ = manager_of(rank, port, adaptive)
    manager._shares_estimates = shared
    np.save(out / f"{rank}.npy", plan(manager, rank, steps))


def main(out: str, steps: str, estimates: str, run=run_rank) -> None:
    torch.set_num_threads(1)
    # Names the ranks' shared memory, as executors do; a process id comes again, and vLLM leaves the memory behind.
    os.environ["VLLM_DIST_IDENT"] = name = uuid.uuid4().hex
    _stand_in_for_a_device()
    adaptive = manager_module()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run, args=(rank, port, Path(out), int(steps), estimates == "shared", adaptive))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    for left in Path("/dev/shm").glob(f"{name}-*"):
        left.unlink()
    sys.exit(max(abs(process.exitcode) for process in ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
