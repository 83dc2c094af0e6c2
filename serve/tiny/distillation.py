"""Training the draft to propose what the target would say, and to know when it does not.

The draft never sees labels: for every block of a text it is compared with the target's distribution
at the same position after the same tokens. Half of the text is the corpus and half was sampled from
the target itself, which is what the draft will have to follow in service.

Only blocks whose earlier drafts were accepted reach a later position. On text drawn from the target
p, a token drafted from q and accepted is drawn in proportion to min(p, q), so weighting each token of
the text by min(1, q / p) turns target text into accepted drafts, without sampling from the draft.
The product of those weights over the block so far is how much a position counts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from serve.tiny.decoding import Rounds, join_rounds, speculate
from serve.tiny.draft import BLOCK_SIZE, DSparkDraft, draft_config
from serve.tiny.pair import TinyPair
from serve.tiny.target import TwoRateOptimizer, round_to_bfloat16, sample_continuations, until, windows

ROWS, SHORT, LONG = 6, 384, 1024
SHARE_ON_SHORT_WINDOWS = 0.85
MATRIX_RATE, VECTOR_RATE = 0.01, 4e-3
KULLBACK_SHARE, CONFIDENCE_SHARE = 0.3, 0.1
LEAST_WEIGHT = 0.15  # a rarely reached position still learns a little
SAMPLED_PROMPT, SAMPLED_ROWS = 64, 160
# Mostly what is served, with some of the calmer text that low temperatures give.
SAMPLED_TEMPERATURES = (1.0, 1.0, 0.5)
REFIT_PROMPT, REFIT_ROWS, REFIT_ROUNDS = 128, 96, 24


@dataclass(frozen=True)
class BlockLosses:
    """Means over one batch of blocks."""

    distance: Tensor
    confidence: Tensor
    expected_length: Tensor


def block_losses(pair: TinyPair, tokens: Tensor, anchors: Tensor) -> BlockLosses:
    """Compare draft and target on the blocks of tokens [B, T] at anchors [A]."""
    with torch.no_grad():
        target_logits, features = pair.verify(tokens)
    at = anchors[:, None] + torch.arange(BLOCK_SIZE)
    hidden, base = pair.draft_blocks(tokens[:, anchors], anchors[None], features)
    embedding, bias = pair.draft.markov_head(tokens[:, at])
    log_q = (base.float() + bias.float()).log_softmax(-1)
    log_p = target_logits[:, at].float().log_softmax(-1)
    p = log_p.exp()
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    kullback = (p * (log_p - log_q)).sum(-1)
    counted = _reach_weights(log_p, log_q, tokens[:, at[:, :-1] + 1])
    learned = counted + LEAST_WEIGHT
    distance = (learned * (KULLBACK_SHARE * kullback + 1 - overlap)).sum() / learned.sum()
    logits = pair.draft.confidence_head(torch.cat([hidden, embedding], dim=-1))
    surprise = functional.binary_cross_entropy_with_logits(logits.float(), overlap.detach(), reduction="none")
    length = 1 + overlap.detach().cumprod(-1).sum(-1).mean()
    return BlockLosses(distance, (counted * surprise).sum() / counted.sum(), length)


def _reach_weights(log_p: Tensor, log_q: Tensor, drafted: Tensor) -> Tensor:
    """Weight [B, A, K] of each position: the product of min(1, q / p) over drafted [B, A, K - 1]."""
    gap = (log_q - log_p).detach()[..., :-1, :].gather(-1, drafted[..., None])[..., 0]
    first = torch.ones_like(gap[..., :1])
    return torch.cat([first, gap.clamp(max=0).cumsum(-1).exp()], dim=-1)


def sample_texts(
    target: Qwen3ForCausalLM, stream: Tensor, minutes: float, generator: torch.Generator
) -> Tensor:
    """Text of the target's own for as long as the budget lasts: [rows, SHORT], one batch at least."""
    batches = []
    for batch, _ in enumerate(until(minutes)):
        prompts = windows(stream, SAMPLED_ROWS, SAMPLED_PROMPT, generator)
        temperature = SAMPLED_TEMPERATURES[batch % len(SAMPLED_TEMPERATURES)]
        batches.append(sample_continuations(target, prompts, SHORT - SAMPLED_PROMPT, temperature))
    return torch.cat(batches)


def training_batch(stream: Tensor, sampled: Tensor, progress: float, generator: torch.Generator) -> Tensor:
    """Corpus and sampled rows in equal parts, with long corpus windows towards the end."""
    if progress > SHARE_ON_SHORT_WINDOWS and torch.rand((), generator=generator) < 0.5:
        return windows(stream, ROWS * SHORT // LONG, LONG, generator)
    chosen = torch.randint(0, len(sampled), (ROWS // 2,), generator=generator)
    return torch.cat([windows(stream, ROWS - ROWS // 2, SHORT, generator), sampled[chosen]])


def train_draft(target: Qwen3ForCausalLM, stream: Tensor, minutes: float, seed: int) -> TinyPair:
    """Sample texts for a quarter of the time, distil for the rest, then refit the confidence head."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    pair = TinyPair(target.requires_grad_(False), DSparkDraft(draft_config(target.config)))
    sampled = sample_texts(target, stream, minutes / 4, generator)
    optimizer = TwoRateOptimizer(pair.draft, MATRIX_RATE, VECTOR_RATE)
    for step, progress in enumerate(until(minutes * 3 / 4)):
        tokens = training_batch(stream, sampled, progress, generator)
        offset = int(torch.randint(1, 1 + BLOCK_SIZE, (), generator=generator))
        anchors = torch.arange(offset, tokens.shape[1] - BLOCK_SIZE, BLOCK_SIZE)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = block_losses(pair, tokens, anchors)
        optimizer.step(losses.distance + CONFIDENCE_SHARE * losses.confidence, progress)
        if step % 50 == 0:
            print(
                f"draft {progress:4.0%} step {step} distance {losses.distance.item():.3f} "
                f"confidence {losses.confidence.item():.3f} length {losses.expected_length.item():.2f}",
                flush=True,
            )
    round_to_bfloat16(pair.draft)
    refit_confidence(pair, stream, generator)
    return pair


def refit_confidence(pair: TinyPair, stream: Tensor, generator: torch.Generator) -> None:
    """Fit the finished draft's confidence head on real rounds of speculative decoding.

    What it predicts is the exact probability of acceptance, sum of min(p, q), at the positions whose
    turn came. It is linear, so this is a logistic regression with soft labels.
    """
    batches: list[Rounds] = []
    for _ in range(4):
        prompts = windows(stream, REFIT_ROWS, REFIT_PROMPT, generator)
        batches.append(speculate(pair, prompts, REFIT_ROUNDS, 1.0, generator)[1])
    rounds = join_rounds(batches)
    reached = rounds.reached()
    inputs, labels = rounds.confidence_inputs[reached].clone(), rounds.overlap[reached].clone()
    head = pair.draft.confidence_head
    solver = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        penalty = 1e-4 * head.proj.weight.square().sum()
        value = functional.binary_cross_entropy_with_logits(head(inputs), labels.clamp(0, 1)) + penalty
        value.backward()
        return value

    solver.step(loss)
    print(f"confidence refit on {len(labels)} drafts, loss {loss().item():.4f}", flush=True)
