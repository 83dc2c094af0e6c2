"""request-aware-costs: the cost of a step by its tokens and its requests, not by its tokens alone.

Upstream profiles what verifying costs by the number of tokens, and runs a batch of T tokens as T requests of one token
each, as far as there are so many requests. Every request reads its context from the KV cache, 8,192 tokens in the
profile, so the table says that a draft costs what a request costs. It does not: a step's requests are given, and a
draft shares its request's context. At 16 requests x 8 tokens the table prices the contexts of 128 requests. The budget
is then cut where verifying is nearly free, and adaptive verification yields less than fixed: on an H200 the table said
6.8 ms for a step that took 5.5, sampling included (tests/bench/RESULTS.md).

A batch that replays a graph has as many requests as the graph was captured with, so requests cannot be taken out of
the profile. Their contexts can. Here every captured size is profiled twice: as upstream does, and with contexts so
short that together they are those of whole requests, of one bonus token and all drafts each. The difference says what
reading a context adds to a step. The rest is the cost of tokens alone. A step's cost is

    drafting for R requests + R x what a context adds + verifying T tokens.

The middle term is no matter of the budget. It joins the draft curve, so tables, planning and telemetry stay as they
are: two curves, made the same on every rank by `set_cost_curves`. A sparse indexer scores its context for every token,
not once a request; such models are profiled with upstream's contexts alone.

Two more things about the points. Costs cannot fall with size, and upstream makes sure by a running maximum: one
disturbed point prices everything up to the next size that really costs as much, and budgets stop below it. Here
points that fall are pooled at their median. And the profile shrinks, since it is the larger part of an adaptive start:
three replays of each batch instead of five, and not all of the captured sizes that are less than an eighth apart.

What the tables leave out, as upstream's do: logits and sampling, which take time for every row, and the host's work.

Upstream reference: `AdaptiveVerificationManager.batches_to_profile`, `set_initial_cost_curves` and
`build_cost_tables_from_curves`, all releases. Hardware: all GPUs; nothing is profiled on a CPU. Delete this when
upstream's profile knows how many requests a step has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from patches.install import Hook
from patches.token_grid import coarser

PATCH_ID = "request-aware-costs"

REPLAYS = 3
"""Runs of each profiled batch."""

PARTS = 8
"""Profiled sizes are at most one part in so many apart; between them costs are interpolated."""

Curve = list[tuple[int, float]]
"""(size, milliseconds), as upstream's `set_cost_curves` takes it."""


def profiled_batches(
    batches: Iterable[Mapping[str, Any]],
    captured: Sequence[int],
    *,
    width: int,
    longest_context: int,
    shares_context: bool,
) -> Iterator[dict[str, Any]]:
    """Upstream's batches to profile, fewer of them, and beside each one the same with the contexts of whole requests.

    Args:
        batches: Arguments of `GPUModelRunner._dummy_run`, as upstream's `batches_to_profile` yields them.
        captured: Token counts with a graph, ascending.
        width: Tokens of a request that keeps all its drafts.
        longest_context: Tokens before a step that a request can have; `_dummy_run` would shorten longer ones.
        shares_context: Whether a request's tokens read its context together.
    """
    by_tokens = {batch["num_tokens"]: dict(batch) for batch in batches}
    kept = set(coarser(captured, PARTS))
    for tokens, batch in by_tokens.items():
        if tokens in captured and tokens not in kept:
            continue
        context = min(batch["context_len"], longest_context)
        # Beyond the graphs a step holds a prefill, and upstream's batch is as good as another.
        contexts = [context, context // width] if shares_context and tokens in captured else [context]
        for _ in range(REPLAYS):
            for length in contexts:
                yield batch | {"context_len": length}


def cost_curves(
    samples: Iterable[Any], batches: Sequence[Mapping[str, Any]], captured: Sequence[int]
) -> tuple[Curve, Curve]:
    """Draft and verify curves of a profile.

    Args:
        samples: Upstream's `StepTimingSample`s, one for each batch; none at all where nothing was timed.
        batches: What was run.
        captured: Token counts with a graph, ascending.

    Returns:
        Milliseconds by requests, what their contexts add to verification included, and milliseconds by tokens. Both
        empty without samples, of which `AdaptiveVerificationManager.set_cost_curves` says what to do.
    """
    samples = list(samples)
    if not samples:
        return [], []
    full = max((batch["context_len"] for batch in batches), default=0)
    drafting: dict[int, list[float]] = defaultdict(list)
    verifying: dict[tuple[int, float], list[float]] = defaultdict(list)
    for sample, batch in zip(samples, batches, strict=True):
        share = batch["context_len"] / full if full else 1.0
        # As upstream: drafts after an eager target wait for the host and say nothing.
        if sample.full_cudagraph and share == 1:
            drafting[sample.num_reqs].append(sample.drafter_ms)
        verifying[sample.num_target_tokens, share * sample.num_reqs].append(sample.forward_ms)
    by_contexts: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (tokens, contexts), times in sorted(verifying.items()):
        by_contexts[tokens].append((contexts, float(np.median(times))))

    added = added_by_a_context(by_contexts.values())
    rest = [float(np.mean([ms - added * contexts for contexts, ms in points])) for points in by_contexts.values()]
    risen = dict(zip(by_contexts, rising(rest), strict=True))
    draft_curve = [(requests, float(np.median(times)) + added * requests) for requests, times in drafting.items()]
    return sorted(draft_curve), at_every_size(risen, captured)


def added_by_a_context(sizes: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Milliseconds that one context more adds to a step of as many tokens; 0 where nothing tells.

    The median over sizes, each weighted by how many contexts its points lie apart.

    Args:
        sizes: For each size (contexts, milliseconds), ascending.
    """
    slopes = sorted(
        ((points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]), points[-1][0] - points[0][0])
        for points in sizes
        if len(points) > 1
    )
    if not slopes:
        return 0.0
    weights = np.cumsum([weight for _, weight in slopes])
    middle = int(np.searchsorted(weights, weights[-1] / 2))
    return max(slopes[middle][0], 0.0)


def rising(values: Sequence[float]) -> list[float]:
    """The closest values, by absolute distance, that never fall: neighbours that do are pooled at their median."""
    blocks: list[list[float]] = []
    for value in values:
        block = [value]
        while blocks and np.median(blocks[-1]) > np.median(block):
            block = blocks.pop() + block
        blocks.append(block)
    return [float(np.median(block)) for block in blocks for _ in block]


def at_every_size(points: Mapping[int, float], captured: Sequence[int]) -> Curve:
    """Points for captured sizes that were not profiled: a step pads to them, so the table needs each.

    Args:
        points: Size -> milliseconds, ascending.
        captured: Token counts with a graph, ascending.
    """
    profiled = [size for size in points if size in captured]
    if not profiled:
        return list(points.items())
    costs = np.interp(captured, profiled, [points[size] for size in profiled])
    beyond = [(size, ms) for size, ms in points.items() if size > captured[-1]]
    return [*zip(captured, costs.tolist(), strict=True), *beyond]


HOOKS: Mapping[str, Hook] = {}
"""`patches.manager` profiles and plans with it."""
