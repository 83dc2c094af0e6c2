"""Speculative decoding in plain torch, a batch of texts at a time, to train on and to measure with.

It does what the engine does with a full budget: draft K tokens from the anchor, verify all of them
in one run of the target, keep the longest accepted prefix, and add the target's own token after it.
Nothing is cached; texts are short and each run of the target recomputes them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from serve.tiny.pair import TinyPair
from serve.tiny.tokenizer import PAD_ID


@dataclass(frozen=True)
class Drafted:
    """One drafted block a text: what was drafted, from which logits, how confidently."""

    tokens: Tensor  # [B, K]
    logits: Tensor  # [B, K, V], Markov bias included
    confidence_inputs: Tensor  # [B, K, hidden + rank]


@dataclass(frozen=True)
class Rounds:
    """What N rounds of draft-and-verify showed."""

    accepted: Tensor  # [N] accepted drafts, 0..K
    overlap: Tensor  # [N, K] sum of min(p, q): how probably draft k is accepted if its prefix was
    confidence_inputs: Tensor  # [N, K, hidden + rank]
    confidence_logits: Tensor  # [N, K]

    def survived(self) -> Tensor:
        """[N, K] True where the draft and all before it were accepted."""
        return torch.arange(self.overlap.shape[1]) < self.accepted[:, None]

    def reached(self) -> Tensor:
        """[N, K] True where every draft before this one was accepted, so that its turn came."""
        return torch.arange(self.overlap.shape[1]) <= self.accepted[:, None]

    def acceptance_length(self) -> float:
        """Mean tokens a round: the accepted drafts and the target's own."""
        return float(self.accepted.float().mean()) + 1


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Next-token distribution; temperature 0 puts everything on the likeliest token."""
    if temperature == 0:
        return functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits.float() / temperature).softmax(-1)


def draw(distribution: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one token [B] from each row [B, V]."""
    return torch.multinomial(distribution, 1, generator=generator)[:, 0]


def draft_block(
    pair: TinyPair,
    anchor: Tensor,
    outputs: tuple[Tensor, Tensor],
    temperature: float,
    generator: torch.Generator,
) -> Drafted:
    """Draft one block after anchors [B], each token given the one before it.

    outputs: what the draft's layers made of the block, hidden [B, K, H] and logits [B, K, V].
    """
    hidden, base = outputs
    previous, tokens, logits, inputs = anchor, [], [], []
    for step in range(pair.draft.block_size):
        embedding, bias = pair.draft.markov_head(previous)
        logits.append(base[:, step] + bias)
        inputs.append(torch.cat([hidden[:, step], embedding], dim=-1))
        previous = draw(probabilities(logits[-1], temperature), generator)
        tokens.append(previous)
    return Drafted(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(inputs, 1))


def accept(drafts: Tensor, p: Tensor, q: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rejection sampling of drafts [B, K] drawn from q [B, K, V] against the target's p [B, K + 1, V].

    Returns how many drafts were accepted [B], and the target's token after them [B]: drawn from what
    p has over q where a draft was rejected, and from p where none was.
    """
    size = drafts.shape[1]
    chosen = drafts[..., None]
    ratio = (p[:, :size].gather(-1, chosen) / q.gather(-1, chosen))[..., 0]
    passed = torch.rand(ratio.shape, generator=generator) < ratio
    accepted = passed.long().cumprod(dim=1).sum(dim=1)
    rest = torch.cat([(p[:, :size] - q).clamp(min=0), p[:, size:]], dim=1)
    at_stop = rest[torch.arange(len(drafts)), accepted]
    fallback = p[torch.arange(len(drafts)), accepted]
    at_stop = torch.where(at_stop.sum(-1, keepdim=True) > 0, at_stop, fallback)
    return accepted, draw(at_stop, generator)


@dataclass
class _Texts:
    """Texts being decoded: all tokens so far, where each text's anchor is, and what the target showed."""

    tokens: Tensor  # [B, room]
    anchor_at: Tensor  # [B]
    features: Tensor  # [B, T, taps * hidden], right before every anchor; later positions are not read


def speculate(
    pair: TinyPair, prompts: Tensor, rounds: int, temperature: float, generator: torch.Generator
) -> tuple[list[Tensor], Rounds]:
    """Continue prompts [B, T] for a number of rounds.

    Returns the texts, and the rounds: round by round, and text by text within each.
    """
    rows, length = prompts.shape
    room = length + 1 + rounds * (pair.draft.block_size + 1) + pair.draft.block_size
    tokens = functional.pad(prompts, (0, room - length), value=PAD_ID)
    with torch.inference_mode():
        logits, features = pair.verify(prompts)
        tokens[:, length] = draw(probabilities(logits[:, -1], temperature), generator)
        texts = _Texts(tokens, torch.full((rows,), length), features)
        seen = join_rounds([_run_round(pair, texts, temperature, generator) for _ in range(rounds)])
    return [text[: end + 1] for text, end in zip(texts.tokens, texts.anchor_at, strict=True)], seen


def _run_round(pair: TinyPair, texts: _Texts, temperature: float, generator: torch.Generator) -> Rounds:
    """Draft, verify and accept once for every text, and move its anchor on."""
    size = pair.draft.block_size
    row, at = torch.arange(len(texts.tokens)), texts.anchor_at
    anchor = texts.tokens[row, at]
    hidden, base = pair.draft_blocks(anchor[:, None], at[:, None], texts.features)
    block = draft_block(pair, anchor, (hidden[:, 0], base[:, 0]), temperature, generator)
    texts.tokens[row[:, None], at[:, None] + torch.arange(1, size + 1)] = block.tokens
    logits, texts.features = pair.verify(texts.tokens[:, : int(at.max()) + size + 1])
    p = probabilities(logits[row[:, None], at[:, None] + torch.arange(size + 1)], temperature)
    q = probabilities(block.logits, temperature)
    accepted, own = accept(block.tokens, p, q, generator)
    texts.anchor_at = at + accepted + 1
    texts.tokens[row, texts.anchor_at] = own
    overlap = torch.minimum(p[:, :size], q).sum(-1)
    confidence = pair.draft.confidence_head(block.confidence_inputs)
    return Rounds(accepted, overlap, block.confidence_inputs, confidence)


def join_rounds(parts: list[Rounds]) -> Rounds:
    """Put the rounds of several parts into one."""
    return Rounds(
        torch.cat([part.accepted for part in parts]),
        torch.cat([part.overlap for part in parts]),
        torch.cat([part.confidence_inputs for part in parts]),
        torch.cat([part.confidence_logits for part in parts]),
    )
