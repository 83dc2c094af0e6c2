"""A worker extension that compares the confidences each budget reads with a record of the device's."""

from __future__ import annotations

from typing import Any

import numpy as np

FRESH = 1.0

CHUNK_ROWS = (12, 16)
"""Rows of logits that the rejection sampler takes at once, in turns: fewer than a full batch has.

With the larger chunk budgets tend to fit into it, with the smaller one to take everything.
"""


class WatchingWorker:
    """Methods for `LLM.collective_rpc`."""

    model_runner: Any

    def watch(self) -> None:
        """From now on keep every record and compare what budgets read: two records old with the ring, else one.

        The sampler's chunk shrinks to one of `CHUNK_ROWS`, so that full budgets need several.
        """
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler

        manager = self.model_runner.adaptive_verification
        age = 1 if manager._ring is None else 2
        add, record, choose = manager.add_request, manager.record_confidences, manager.get_num_tokens
        table = manager._confidence_probs
        records: list[np.ndarray] = []
        used: set[int] = set()
        counts = ("records", "budgets", "reused", "wrong", "steps", "trimmed", "chunked")
        self._seen = seen = {"age": age} | dict.fromkeys(counts, 0)

        def added(slot: int) -> None:
            seen["reused"] += slot in used
            used.add(slot)
            for each in records:
                each[slot] = FRESH
            add(slot)

        def recorded(*args: Any) -> None:
            record(*args)
            records.append(table.numpy().copy())
            del records[: -(age + 1)]
            seen["records"] += 1

        def chosen(*args: Any) -> int:
            read = manager._stale_confidences[manager._stale_idx].np if age == 1 else manager._ring.values
            # Before the engine was watched it only warmed up, so what was recorded then is not compared.
            if len(records) == age + 1:
                seen["budgets"] += 1
                seen["wrong"] += not np.array_equal(read[sorted(used)], records[0][sorted(used)])
            rows = CHUNK_ROWS[seen["steps"] % len(CHUNK_ROWS)]
            seen["steps"] += 1
            rejection_sampler.MAX_CHUNK_BYTES = rows * 4 * self.model_runner.vocab_size
            manager._max_total_logits = rows
            tokens: int = choose(*args)
            drafts, _, budget = manager._batch_budget
            seen["trimmed"] += budget < sum(drafts.values())
            seen["chunked"] += budget > 0 and budget + len(drafts) > rows
            return tokens

        manager.add_request, manager.record_confidences, manager.get_num_tokens = added, recorded, chosen

    def seen(self) -> dict[str, int]:
        """Counts: records, budgets compared, slots reused, budgets that read something else, that bound, in chunks."""
        return self._seen
