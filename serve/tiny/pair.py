"""Target and draft together: what each shows the other, and how both are saved and loaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from serve.tiny.draft import TAPPED_LAYERS, DSparkDraft, block_mask, block_positions, draft_config
from serve.tiny.tokenizer import MASK_ID

HERE = Path(__file__).parent


@dataclass(frozen=True)
class TinyPair:
    """A target and a draft that read each other's tensors."""

    target: Qwen3ForCausalLM
    draft: DSparkDraft

    def verify(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target on tokens [B, T]: logits [B, T, V], and the draft's features [B, T, taps * hidden].

        The features are taken by hooks: the last of the states that the model itself offers has
        been through the final norm, and the draft is given the stream before it.
        """
        taps: list[Tensor] = []
        layers: Sequence[nn.Module] = [self.target.model.layers[i] for i in TAPPED_LAYERS]
        hooks = [layer.register_forward_hook(lambda _module, _inputs, out: taps.append(out)) for layer in layers]
        try:
            logits = self.target(input_ids=tokens, use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.cat(taps, dim=-1)

    def draft_blocks(self, anchor_tokens: Tensor, anchors: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Draft from anchor tokens [B, A] at positions [B, A]: hidden [B, A, K, H] and logits [B, A, K, V].

        The logits are still without the Markov bias.
        """
        size = self.draft.block_size
        blocks = torch.full((*anchor_tokens.shape, size), MASK_ID)
        blocks[..., 0] = anchor_tokens
        queries = self.target.model.embed_tokens(blocks.flatten(1)).detach()
        mask = block_mask(anchors, size, features.shape[1])
        hidden = self.draft(queries, features, block_positions(anchors, size).expand(len(queries), -1), mask)
        hidden = hidden.unflatten(1, (-1, size))
        return hidden, self.target.lm_head(hidden)


def save_draft(draft: DSparkDraft, pair_folder: Path, target: Qwen3ForCausalLM) -> None:
    """Write config.json and bfloat16 weights; the confidence head stays float32, as vLLM keeps it."""
    folder = pair_folder / "draft"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(draft_config(target.config), indent=2) + "\n")
    weights = {
        name: weight.contiguous() if name.startswith("confidence_head.") else weight.to(torch.bfloat16)
        for name, weight in draft.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_target(target: Qwen3ForCausalLM, pair_folder: Path) -> None:
    """Write the target's config and bfloat16 weights; the model comes back in float32."""
    target.to(torch.bfloat16).save_pretrained(str(pair_folder / "target"))
    target.float()


def load_tokenizer(pair_folder: Path = HERE) -> PreTrainedTokenizerFast:
    """The tokenizer that both models share, saved beside the target."""
    return PreTrainedTokenizerFast.from_pretrained(str(pair_folder / "target"))


def load_target(pair_folder: Path = HERE) -> Qwen3ForCausalLM:
    """The target alone, computing in float32."""
    return Qwen3ForCausalLM.from_pretrained(str(pair_folder / "target"), dtype=torch.float32).eval()


def load_pair(pair_folder: Path = HERE) -> TinyPair:
    """Load a saved pair for plain torch, computing in float32."""
    folder = pair_folder / "draft"
    draft = DSparkDraft(json.loads((folder / "config.json").read_text()))
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return TinyPair(load_target(pair_folder), draft.eval())
