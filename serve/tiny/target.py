"""The target: a small `Qwen3ForCausalLM` trained on Python source.

Every training window starts with the beginning-of-text token wherever in the corpus it was cut, so
that prompts, which start with it too, look like training. The last part of the training runs on
windows of 1,024 tokens, after a cheaper first part on short ones.

The run is bounded by time: the learning rate follows the share of the budget that is spent, so the
seed fixes initial weights and the order of the data, and the machine decides how far they get.
"""

import math
import time
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

from serve.tiny.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY_SIZE

Module = TypeVar("Module", bound=nn.Module)

LONGEST_CONTEXT = 2048
ROPE_THETA = 10_000.0
SHORT_WINDOWS = (16, 256)  # rows, tokens a row
LONG_WINDOWS = (4, 1024)
SHARE_ON_SHORT_WINDOWS = 0.75
MATRIX_RATE, VECTOR_RATE = 0.01, 3e-3
WARM_UP = 0.02


def target_config() -> Qwen3Config:
    """The shape: four layers, 1.05 million parameters, embedding and output head apart."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST_CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="bfloat16",
    )


def windows(stream: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Cut random windows out of one long token stream: [rows, length], each after a BOS."""
    starts = torch.randint(0, stream.numel() - length, (rows, 1), generator=generator)
    cut = stream[starts + torch.arange(length - 1)]
    return torch.cat([torch.full((rows, 1), BOS_ID), cut], dim=1)


class TwoRateOptimizer:
    """Muon for the matrices inside the layers, AdamW for everything else, one schedule for both."""

    def __init__(self, module: nn.Module, matrix_rate: float = MATRIX_RATE, vector_rate: float = VECTOR_RATE) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in f".{name}"]
        inside = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in inside]
        self._parameters = matrices + others
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", weight_decay=0.05), matrix_rate),
            (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), vector_rate),
        ]

    def step(self, loss: Tensor, progress: float) -> None:
        """Apply one update of loss, at a rate for progress, the share of the training done in [0, 1]."""
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        scale = min(progress / WARM_UP, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def until(minutes: float) -> Iterator[float]:
    """Yield the share of the time budget that is spent, until all of it is."""
    started = time.monotonic()
    while (progress := (time.monotonic() - started) / (60 * minutes)) < 1:
        yield progress


def train_target(stream: Tensor, minutes: float, seed: int) -> Qwen3ForCausalLM:
    """Train for next-token prediction; the result is rounded to what bfloat16 can hold."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(target_config()).float()
    optimizer = TwoRateOptimizer(model)
    for step, progress in enumerate(until(minutes)):
        rows, length = SHORT_WINDOWS if progress < SHARE_ON_SHORT_WINDOWS else LONG_WINDOWS
        tokens = windows(stream, rows, length, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.step(loss, progress)
        if step % 100 == 0:
            print(f"target {progress:4.0%} step {step} loss {loss.item():.3f}", flush=True)
    return round_to_bfloat16(model).eval()


def round_to_bfloat16(module: Module) -> Module:
    """Round weights to bfloat16 and keep computing in float32, as nothing else is saved or served."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    return module


def sample_continuations(model: Qwen3ForCausalLM, prompts: Tensor, new_tokens: int, temperature: float) -> Tensor:
    """Continue prompts [rows, length] with the target's own samples: [rows, length + new_tokens]."""
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
    return torch.as_tensor(tokens).clone()
