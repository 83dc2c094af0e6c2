"""Train the bundled pair: `python -m serve.tiny.train --out DIR [--minutes N]`.

Writes DIR/target (tokenizer included) and DIR/draft. Three tenths of the time is the draft's, the
rest the target's. One core is used, and nothing is downloaded.
"""

import argparse
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from serve.tiny.corpus import SourceFile, read_sources
from serve.tiny.distillation import train_draft
from serve.tiny.pair import save_draft, save_target
from serve.tiny.target import train_target
from serve.tiny.tokenizer import EOS_ID, save_tokenizer, train_tokenizer

SEED = 0
DEFAULT_MINUTES = 24.0
DRAFT_SHARE = 0.5


def token_stream(tokenizer: PreTrainedTokenizerFast, sources: list[SourceFile]) -> torch.Tensor:
    """All sources as one stream of tokens, each file closed by the end-of-text token."""
    encoded = tokenizer([source.text for source in sources], add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    return torch.cat([torch.tensor([*ids, EOS_ID]) for ids in encoded])


def main() -> None:
    """Train tokenizer, target and draft, one after the other, and save each when it is ready."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=DEFAULT_MINUTES, help="for target and draft together"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sources = read_sources("train")
    tokenizer = train_tokenizer(source.text for source in sources)
    save_tokenizer(tokenizer, arguments.out / "target")
    stream = token_stream(tokenizer, sources)
    target = train_target(stream, arguments.minutes * (1 - DRAFT_SHARE), SEED)
    save_target(target, arguments.out)
    pair = train_draft(target, stream, arguments.minutes * DRAFT_SHARE, SEED)
    save_draft(pair.draft, arguments.out, target)


if __name__ == "__main__":
    main()
