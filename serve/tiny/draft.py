"""The draft: a `Qwen3DSparkModel` in plain torch, with the parameter names that vLLM loads.

One block of drafting (upstream: `DFlashQwen3Model`, `DSparkSpeculator`):

- The *context* is the target's residual stream after the tapped layers, for every token that the
  target has seen. `fc` mixes it down to the hidden size and `hidden_norm` scales it; each layer makes
  keys and values of it, and nothing else of the draft ever looks at the past.
- The *queries* are the anchor, which is the newest token and the only one that the target has not
  seen, and K - 1 mask tokens, at consecutive positions. Within a block every query sees every other.
  The query at position p predicts the token at p + 1, so the anchor's predicts the first draft.
- The *Markov head* adds a bias that depends on the previous token, so the drafts of one block are
  sampled one after the other although the layers ran once.
- The *confidence head* reads a query's output and the Markov embedding of the token before the draft,
  and predicts how probably the target accepts that draft if it accepted those before it.

The embedding and the output head are the target's own. The target never meets the mask token, so its
untrained embedding row is free to mark the blanks here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from serve.tiny.target import ROPE_THETA
from serve.tiny.tokenizer import MASK_ID

BLOCK_SIZE = 5
TAPPED_LAYERS = (0, 1, 2, 3)
MARKOV_RANK = 64
DRAFT_LAYERS = 2
DRAFT_HEADS = 4
DRAFT_INTERMEDIATE = 512
NORM_EPSILON = 1e-6


def draft_config(target: Qwen3Config) -> dict[str, Any]:
    """The draft's config.json. `target_layer_ids` count from 0 and mean the stream *after* a layer."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": DRAFT_INTERMEDIATE,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": DRAFT_HEADS,
        "num_key_value_heads": DRAFT_HEADS,
        "head_dim": target.hidden_size // DRAFT_HEADS,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "attention_bias": False,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": target.eos_token_id,
        "mask_token_id": MASK_ID,
        "block_size": BLOCK_SIZE,
        "num_target_layers": target.num_hidden_layers,
        "target_layer_ids": list(TAPPED_LAYERS),
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dtype": "bfloat16",
    }


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding (half-split layout) of heads [B, heads, S, D] at positions [B or 1, S]."""
    size = heads.shape[-1]
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    angles = positions[:, None, :, None].float() * ROPE_THETA**-exponents
    cosine, sine = angles.cos(), angles.sin()
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.to(heads.dtype)


class Attention(nn.Module):  # type: ignore[misc]
    """Attention from a block's queries to the context and to the block itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.head_dim = config["hidden_size"], config["head_dim"]
        inner = self.head_dim * config["num_attention_heads"]
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=NORM_EPSILON)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=NORM_EPSILON)

    def forward(self, queries: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Shapes as in `DSparkDraft.forward`; context is already mixed down and normed."""
        source = torch.cat([context, queries], dim=1)
        past = torch.arange(context.shape[1])[None].expand(positions.shape[0], -1)
        q = rotate(self.q_norm(self._split(self.q_proj(queries))), positions)
        k = rotate(self.k_norm(self._split(self.k_proj(source))), torch.cat([past, positions], dim=1))
        v = self._split(self.v_proj(source))
        attended = functional.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=mask)
        return torch.as_tensor(self.o_proj(attended.transpose(1, 2).flatten(2)))

    def _split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):  # type: ignore[misc]
    """The gated feed-forward part of a layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows [..., hidden] to [..., hidden]."""
        return torch.as_tensor(self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows)))


class Layer(nn.Module):  # type: ignore[misc]
    """A pre-norm decoder layer. Its input norm applies to queries only, never to the context."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config["hidden_size"], eps=NORM_EPSILON)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config["hidden_size"], eps=NORM_EPSILON)
        self.mlp = MLP(config)

    def forward(self, rows: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Shapes as in `DSparkDraft.forward`."""
        rows = rows + self.self_attn(self.input_layernorm(rows), context, positions, mask)
        return rows + torch.as_tensor(self.mlp(self.post_attention_layernorm(rows)))


class MarkovHead(nn.Module):  # type: ignore[misc]
    """A low-rank table of token-to-token biases."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config["vocab_size"], config["markov_rank"])
        self.markov_w2 = nn.Linear(config["markov_rank"], config["vocab_size"], bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.1)

    def forward(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Map previous tokens [...] to their embeddings [..., rank] and biases [..., vocabulary]."""
        embedding = self.markov_w1(previous)
        return embedding, self.markov_w2(embedding)


class ConfidenceHead(nn.Module):  # type: ignore[misc]
    """A linear map from a query's output and a Markov embedding to the logit of acceptance."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.proj = nn.Linear(config["hidden_size"] + config["markov_rank"], 1)

    def forward(self, features: Tensor) -> Tensor:
        """Map features [..., hidden + rank] to logits [...]."""
        return torch.as_tensor(self.proj(features.float())).squeeze(-1)


class DSparkDraft(nn.Module):  # type: ignore[misc]
    """The draft's layers and heads. Embedding and output head are passed in as results, not owned."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.block_size: int = config["block_size"]
        self.fc = nn.Linear(hidden * len(config["target_layer_ids"]), hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=NORM_EPSILON)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Qwen3RMSNorm(hidden, eps=NORM_EPSILON)
        self.markov_head = MarkovHead(config)
        self.confidence_head = ConfidenceHead(config)

    def forward(self, queries: Tensor, features: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Run blocks of queries against the context.

        queries [B, Q, hidden]: embeddings of anchors and masks, blocks one after the other;
        features [B, T, taps * hidden]: what the target showed at positions 0..T-1;
        positions [B, Q]: the queries' positions; mask [B or 1, 1, Q, T + Q]: from `block_mask`.
        Returns the normed outputs [B, Q, hidden].
        """
        context = self.hidden_norm(self.fc(features))
        rows = queries
        for layer in self.layers:
            rows = layer(rows, context, positions, mask)
        return torch.as_tensor(self.norm(rows))


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Positions [B, A * block_size] of the queries of blocks at anchors [B, A]."""
    return (anchors[:, :, None] + torch.arange(block_size)).flatten(1)


def block_mask(anchors: Tensor, block_size: int, context_length: int) -> Tensor:
    """Who sees whom [B, 1, Q, T + Q]: the context before one's own anchor, and one's own block."""
    anchor_of_query = anchors.repeat_interleave(block_size, dim=1)
    past = torch.arange(context_length)[None, None, :] < anchor_of_query[:, :, None]
    block = torch.arange(anchors.shape[1]).repeat_interleave(block_size)
    own = (block[:, None] == block[None, :]).expand(anchors.shape[0], -1, -1)
    return torch.cat([past, own], dim=2)[:, None]
