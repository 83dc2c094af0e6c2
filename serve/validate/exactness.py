"""Whether speculation changes what the model says: greedy outputs token for token, sampled ones by their distribution.

Needs no data. Greedy: a few prompts of the built-in set, all at once, so that the budget binds. Sampled: one prompt
many times, each time with another seed; speculative sampling must leave the distribution of every position as it is
(Leviathan et al. 2023, appendix A.1), so both arms' counts of tokens are compared by a chi-square test of homogeneity.
The arms have different seeds: with the same ones their samples would agree more than chance has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serve.validate.endpoint import Endpoint
from serve.validate.prompts import BUILT_IN
from serve.validate.results import Arm, Exactness, Record

GREEDY_PROMPTS = 16
GREEDY_TOKENS = 48
SAMPLES = 512
SAMPLES_OF_A_REQUEST = 16
SAMPLED_TOKENS = 4
"""The first comes from the prompt itself; drafts are verified from the second on."""
REQUESTS_AT_ONCE = 16
LEAST_EXPECTED = 5
"""Expected count of a cell below which chi-square is no approximation (Cochran 1954): rarer tokens are pooled."""


class Outputs(Record):
    """`raw/exactness-ARM.json`: what one arm answered.

    Attributes:
        prompts: Those answered greedily.
        greedy: Token ids of each answer.
        sampled_prompt: The one that was sampled from.
        sampled: Token ids of each sample.
        seed: Of the first sample; sample i has seed + i.
    """

    arm: Arm
    prompts: tuple[str, ...]
    greedy: tuple[tuple[int, ...], ...]
    sampled_prompt: str
    sampled: tuple[tuple[int, ...], ...]
    seed: int


def ask(endpoint: Endpoint, arm: Arm, seed: int, samples: int = SAMPLES) -> Outputs:
    """Ask a server for one arm's outputs.

    Args:
        endpoint: The server, already in the arm's mode.
        arm: What it is called.
        seed: Of the run.
        samples: How often the sampled prompt is asked.

    Raises:
        EndpointError: a request failed.
        StoppedError: the run was told to stop.
    """
    prompts = BUILT_IN[:GREEDY_PROMPTS]
    sampled_prompt = BUILT_IN[GREEDY_PROMPTS]
    first_seed = seed + (1 + list(Arm).index(arm)) * 1_000_000
    greedy = [_body(prompt, GREEDY_TOKENS, temperature=0.0) for prompt in prompts]
    sampled = [
        _body(sampled_prompt, SAMPLED_TOKENS, temperature=1.0, n=SAMPLES_OF_A_REQUEST, seed=first_seed + start)
        for start in range(0, samples, SAMPLES_OF_A_REQUEST)
    ]
    pool = ThreadPoolExecutor(REQUESTS_AT_ONCE)
    try:
        answers = list(pool.map(endpoint.complete, [*greedy, *sampled]))
    finally:
        # A run that is stopped does not wait for answers; those under way end with the server.
        pool.shutdown(wait=False, cancel_futures=True)
    tokens = [tuple(tuple(choice["token_ids"]) for choice in answer["choices"]) for answer in answers]
    return Outputs(
        arm=arm,
        prompts=prompts,
        greedy=tuple(choices[0] for choices in tokens[: len(greedy)]),
        sampled_prompt=sampled_prompt,
        sampled=tuple(sample for choices in tokens[len(greedy) :] for sample in choices)[:samples],
        seed=first_seed,
    )


def compare(reference: Outputs, own: Outputs, raw: str) -> Exactness:
    """One arm's outputs against those without speculation.

    Args:
        reference: What `off` answered to the same prompts.
        own: What the arm answered.
        raw: Where `own` is, relative to the run's directory.
    """
    first_difference = {}
    for number, (theirs, ours) in enumerate(zip(reference.greedy, own.greedy, strict=True)):
        if theirs != ours:
            pairs = enumerate(zip(theirs, ours, strict=False))
            first_difference[number] = next((at for at, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
    return Exactness(
        arm=own.arm,
        greedy_prompts=len(own.greedy),
        greedy_equal=len(own.greedy) - len(first_difference),
        greedy_tokens=sum(map(len, own.greedy)),
        first_difference=first_difference,
        sampled_tokens=sum(map(len, own.sampled)),
        p_values={
            position: homogeneity(
                [sample[position] for sample in reference.sampled], [sample[position] for sample in own.sampled]
            )
            for position in range(min(map(len, (*reference.sampled, *own.sampled)), default=0))
        },
        raw=raw,
    )


def homogeneity(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Probability of a difference at least as large, if both samples come from one distribution.

    Tokens that would be expected fewer than `LEAST_EXPECTED` times in the smaller sample are counted as one.

    Returns:
        The p-value of a chi-square test of homogeneity; 1.0 where a single token is left to count.
    """
    from scipy.stats import chi2_contingency

    counts, others = Counter(ours), Counter(theirs)
    total = len(ours) + len(theirs)
    share = min(len(ours), len(theirs)) / total if total else 0.0
    table: list[tuple[int, int]] = []
    rare = (0, 0)
    for token in sorted({*counts, *others}, key=lambda token: counts[token] + others[token]):
        pair = (counts[token], others[token])
        # The rare ones come first; they are pooled until the pool itself is common enough.
        if sum(pair) * share < LEAST_EXPECTED or 0 < sum(rare) * share < LEAST_EXPECTED:
            rare = (rare[0] + pair[0], rare[1] + pair[1])
        else:
            table.append(pair)
    if sum(rare):
        table.append(rare)
    if len(table) < 2:
        return 1.0
    return float(chi2_contingency([list(row) for row in zip(*table, strict=True)], correction=False).pvalue)


def _body(prompt: str, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **fields}
