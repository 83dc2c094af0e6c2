"""`python placeholders_on_host.py`: what 0.33.0's batch-sharded sampling is told of a step with placeholder drafts.

One request has four drafts, another enters decoding with four placeholders. Prints the admitted counts that go to the
host, with all patches and with upstream's chain, as JSON; null where it is told to use the scheduled ones.
"""

import functools
import json
from types import SimpleNamespace

import numpy as np
import torch

from tests.patches.ranks import SLOTS, STEPS, _stand_in_for_a_device, manager_module, request_states


def told(adaptive, *, fast: bool) -> list[int] | None:
    states = request_states()
    states.num_computed_tokens_np[1] = 7  # the last token of its prefill, of 8
    manager = adaptive.AdaptiveVerificationManager(
        states,
        torch.zeros(SLOTS + 1, dtype=torch.int32),
        num_bonus_tokens=1,
        max_total_logits=5,
        copy_admitted_drafts_to_host=True,
    )
    assert manager._ranking is None, "upstream's chain brings the counts to the host"
    manager._takes_shortcut = fast
    manager.set_cost_curves([(1, 1.0)], [(1, 1.0), (60, 1.0)])
    drafts = np.array([STEPS, STEPS], dtype=np.int32)
    manager.get_num_tokens({"r0": STEPS + 1, "r1": STEPS + 1}, {"r0": [7] * STEPS, "r1": [-1] * STEPS})
    assert manager.plan.budget == STEPS
    _, ends = manager.compact_batch(drafts, drafts + 1, np.array([0, 5, 10]))
    logits, _, _, counts = manager.reallocate_drafts(["r0", "r1"], torch.arange(2))
    assert logits.tolist() == [0, STEPS + 1, STEPS + 2]
    assert ends.tolist() == [0, 5, 10], "each rank works out its own from the scheduled ends and the counts"
    return counts and counts.wait().tolist()


def unpinned(empty, *size, **kinds):
    return empty(*size, **{kind: value for kind, value in kinds.items() if kind != "pin_memory"})


def main() -> None:
    _stand_in_for_a_device()
    torch.empty = functools.partial(unpinned, torch.empty)
    adaptive = manager_module()
    from vllm.distributed import parallel_state

    parallel_state._TP = SimpleNamespace(world_size=1, broadcast_object=lambda value, **_from: value)
    print(json.dumps([told(adaptive, fast=fast) for fast in (True, False)]))


if __name__ == "__main__":
    main()
