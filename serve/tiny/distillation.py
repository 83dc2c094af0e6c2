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
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from serve.tiny.decoding import Rounds, join_rounds, speculate
from serve.tiny.draft import BLOCK_SIZE, DSparkDraft, draft_config
from serve.tiny.pair import TinyPair
from serve.tiny.target import TwoRateOptimizer, round_to_bfloat16, sample_continuations, until, windows

ROWS, SHORT, LONG = 6, 384, 1024
SHARE_ON_SHORT_WINDOWS = 0.85
MATRIX_RATE, VECTOR_RATE = 0.008, 3e-3
KULLBACK_SHARE, CONFIDENCE_SHARE = 0.3, 0.1
# Agreeing on the likeliest token is what counts at temperature 0; a low one is its smooth stand-in.
SHARP_SHARE, SHARP_TEMPERATURE = 0.5, 0.3
LEAST_WEIGHT = 0.15  # a rarely reached position still learns a little
SAMPLED_PROMPT, SAMPLED_ROWS = 64, 96
# Mostly what is served, with some of the calmer text that low temperatures give.
SAMPLED_TEMPERATURES = (1.0, 0.6, 1.0, 0.2)
REFIT_PROMPT, REFIT_ROWS, REFIT_ROUNDS = 96, 64, 24


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
    overlap = _overlap(log_p, log_q, temperature=1.0)
    kullback = (log_p.exp() * (log_p - log_q)).sum(-1)
    missed = 1 - overlap + SHARP_SHARE * (1 - _overlap(log_p, log_q, SHARP_TEMPERATURE))
    counted = _reach_weights(log_p, log_q, tokens[:, at[:, :-1] + 1])
    learned = counted + LEAST_WEIGHT
    distance = (learned * (KULLBACK_SHARE * kullback + missed)).sum() / learned.sum()
    logits = pair.draft.confidence_head(torch.cat([hidden, embedding], dim=-1))
    surprise = functional.binary_cross_entropy_with_logits(logits.float(), overlap.detach(), reduction="none")
    length = 1 + overlap.detach().cumprod(-1).sum(-1).mean()
    return BlockLosses(distance, (counted * surprise).sum() / counted.sum(), length)


def _overlap(log_p: Tensor, log_q: Tensor, temperature: float) -> Tensor:
    """Probability of acceptance [...] when both sides [..., V] are sampled at a temperature."""
    p, q = (log_p / temperature).softmax(-1), (log_q / temperature).softmax(-1)
    return torch.minimum(p, q).sum(-1)


def _reach_weights(log_p: Tensor, log_q: Tensor, drafted: Tensor) -> Tensor:
    """Weight [B, A, K] of each position: the product of min(1, q / p) over drafted [B, A, K - 1]."""
    gap = (log_q - log_p).detach()[..., :-1, :].gather(-1, drafted[..., None])[..., 0]
    first = torch.ones_like(gap[..., :1])
    return torch.cat([first, gap.clamp(max=0).cumsum(-1).exp()], dim=-1)


def sample_texts(target: Qwen3ForCausalLM, stream: Tensor, minutes: float, generator: torch.Generator) -> Tensor:
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


def start_from_target(draft: DSparkDraft, target: Qwen3ForCausalLM) -> None:
    """Start the draft's layers as the target's last ones, which already know how to read the context.

    A target layer reads the stream before it, and the draft's context is one mix for all layers: the
    mean of those streams. Norm weights move into the projections after them, because the draft norms
    context and queries apart, and key and value heads are repeated up to the draft's number.
    """
    first = target.config.num_hidden_layers - len(draft.layers)
    hidden = target.config.hidden_size
    with torch.no_grad():
        draft.norm.weight.copy_(target.model.norm.weight)
        draft.fc.weight.mul_(0.1)
        for layer, source in zip(draft.layers, target.model.layers[first:], strict=True):
            tap = source.self_attn.layer_idx - 1
            draft.fc.weight[:, tap * hidden : (tap + 1) * hidden] += torch.eye(hidden) / len(draft.layers)
            _copy_attention(layer.self_attn, source)
            layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
            known = source.mlp.gate_proj.out_features
            layer.mlp.gate_proj.weight[:known] = source.mlp.gate_proj.weight
            layer.mlp.up_proj.weight[:known] = source.mlp.up_proj.weight
            layer.mlp.down_proj.weight[:, :known] = source.mlp.down_proj.weight
            layer.mlp.down_proj.weight[:, known:] = 0


def _copy_attention(attention: nn.Module, source: nn.Module) -> None:
    """Copy a target layer's attention, with the weight of its input norm folded in."""
    size = attention.head_dim
    scale = source.input_layernorm.weight
    for name in ("q_proj", "k_proj", "v_proj"):
        ours, theirs = getattr(attention, name).weight, getattr(source.self_attn, name).weight * scale
        repeats = len(ours) // len(theirs)
        ours.copy_(theirs.unflatten(0, (-1, size)).repeat_interleave(repeats, dim=0).flatten(0, 1))
    attention.o_proj.weight.copy_(source.self_attn.o_proj.weight)
    attention.q_norm.weight.copy_(source.self_attn.q_norm.weight)
    attention.k_norm.weight.copy_(source.self_attn.k_norm.weight)


def train_draft(target: Qwen3ForCausalLM, stream: Tensor, minutes: float, seed: int) -> TinyPair:
    """Sample texts for a fifth of the time, distil for the rest, then refit the confidence head."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    pair = TinyPair(target.requires_grad_(False), DSparkDraft(draft_config(target.config)))
    start_from_target(pair.draft, target)
    sampled = sample_texts(target, stream, minutes / 5, generator)
    optimizer = TwoRateOptimizer(pair.draft, MATRIX_RATE, VECTOR_RATE)
    for step, progress in enumerate(until(minutes * 4 / 5)):
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
