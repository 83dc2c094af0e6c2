"""`torchrun --nproc-per-node 2 -m tests.bench.consensus_cost`: what tp-consensus adds to a step on GPUs. Needs no vLLM.

Per batch size: the broadcast of rank 0's estimates, and the ranking with a stable sort against one with `topk`, both
compiled as upstream compiles its own; microseconds a step, on the host and until the device is done. Then, over
batches full of ties, how often both ranks admitted the same drafts.
"""

import os
import time
from collections.abc import Callable

import torch
import torch.distributed

from patches.consensus import admit_best_drafts

STEPS, SLOTS, REPEATS, BATCHES = 7, 256, 300, 2_000


def admit_by_topk(
    estimates: torch.Tensor, slots: torch.Tensor, capacities: torch.Tensor, budget: int, steps: int
) -> None:
    """The same choice without an order among ties."""
    survival = estimates[slots].cumprod(dim=1)
    survival = survival.masked_fill(torch.arange(steps, device=survival.device) >= capacities[:, None], -1.0)
    best = survival.flatten().topk(budget).indices
    admitted = torch.zeros(survival.numel(), dtype=capacities.dtype, device=survival.device).index_fill_(0, best, 1)
    torch.sum(admitted.view_as(survival), dim=1, dtype=capacities.dtype, out=capacities)


RANKINGS = {
    "stable sort": torch.compile(admit_best_drafts, dynamic=True),
    "topk": torch.compile(admit_by_topk, dynamic=True),
}


def microseconds(step: Callable[[], object]) -> str:
    """Time of a step, after warming up."""
    for _ in range(REPEATS // 10):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        step()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    wall = time.perf_counter() - start
    return f"host {host / REPEATS * 1e6:.1f} us, done {wall / REPEATS * 1e6:.1f} us"


def full(requests: int) -> torch.Tensor:
    """Capacities that admit every draft."""
    return torch.full((requests,), STEPS, dtype=torch.int32, device="cuda")


def main() -> None:
    """Measure on every rank, and print on rank 0."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    say = print if rank == 0 else lambda *_: None
    for requests in (4, 16, 64, 256):
        estimates = torch.rand(SLOTS, STEPS, device="cuda")
        slots = torch.randperm(SLOTS, device="cuda")[:requests]
        for name, ranking in RANKINGS.items():
            time_taken = microseconds(
                lambda: ranking(estimates, slots, full(requests), 3 * requests, STEPS)  # noqa: B023 (called at once)
            )
            say(f"{requests} requests, {name}: {time_taken}")
        shared = estimates[:requests]
        say(f"{requests} requests, broadcast: {microseconds(lambda: torch.distributed.broadcast(shared, 0))}")  # noqa: B023

    generator = torch.Generator("cuda")
    slots = torch.arange(64, device="cuda")
    for name, ranking in RANKINGS.items():
        equal = torch.zeros((), device="cuda", dtype=torch.int32)
        for seed in range(BATCHES):
            generator.manual_seed(seed)
            estimates = torch.randint(1, 5, (SLOTS, STEPS), device="cuda", generator=generator) / 4
            admitted = full(64)
            ranking(estimates, slots, admitted, 150, STEPS)
            of_rank_0 = admitted.clone()
            torch.distributed.broadcast(of_rank_0, 0)
            equal += (of_rank_0 == admitted).all()
        torch.distributed.all_reduce(equal, torch.distributed.ReduceOp.MIN)
        say(f"{name}: {int(equal)} of {BATCHES} batches full of ties ranked alike")


if __name__ == "__main__":
    main()
