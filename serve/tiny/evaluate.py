"""Measure the bundled pair on files it never saw: `python -m serve.tiny.evaluate`.

Decodes speculatively in plain torch and prints JSON: acceptance length, greedy and sampled at
temperature 1, acceptance by position, and how far the confidence can be trusted. Temperatures are
fitted on one half of the held-out files and judged on the other.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from serve.tiny.calibration import (
    acceptance_by_quantile,
    expected_calibration_error,
    fit_temperatures,
    survival,
)
from serve.tiny.corpus import SourceFile, read_sources
from serve.tiny.decoding import Rounds, join_rounds, speculate
from serve.tiny.pair import HERE, TinyPair, load_pair, load_tokenizer

BATCH = 64


@dataclass(frozen=True)
class Workload:
    """How much to decode: prompts a file, tokens a prompt, rounds of drafting a prompt."""

    prompts_a_file: int = 4
    prompt_length: int = 128
    rounds: int = 24


def held_out_prompts(pair_folder: Path, sources: list[SourceFile], workload: Workload) -> Tensor:
    """Evenly spaced excerpts of the sources as prompts [B, prompt_length], each after a BOS."""
    tokenizer = load_tokenizer(pair_folder)
    prompts = []
    for source in sources:
        tokens = torch.tensor(tokenizer(source.text, add_special_tokens=False, verbose=False)["input_ids"])
        excerpt = workload.prompt_length - 1
        if len(tokens) >= excerpt:
            starts = np.linspace(0, len(tokens) - excerpt, workload.prompts_a_file, dtype=int)
            prompts += [tokens[start : start + excerpt] for start in starts]
    return functional.pad(torch.stack(prompts), (1, 0), value=tokenizer.bos_token_id)


def decode(pair: TinyPair, prompts: Tensor, rounds: int, temperature: float, seed: int = 0) -> Rounds:
    """Run rounds of speculative decoding on all prompts, a batch at a time."""
    generator = torch.Generator().manual_seed(seed)
    parts = [speculate(pair, batch, rounds, temperature, generator)[1] for batch in prompts.split(BATCH)]
    return join_rounds(parts)


def acceptance_report(rounds: Rounds) -> dict[str, Any]:
    """Acceptance length, and how often each position's draft survived or passed when its turn came."""
    survived, reached = rounds.survived().float(), rounds.reached().float()
    return {
        "rounds": len(rounds.accepted),
        "acceptance_length": round(rounds.acceptance_length(), 3),
        "survival_by_position": _rounded(survived.mean(0).numpy()),
        "acceptance_by_position_when_reached": _rounded((survived.sum(0) / reached.sum(0)).numpy()),
    }


def calibration_report(fitted_on: Rounds, judged_on: Rounds) -> dict[str, Any]:
    """Calibration error of survival before and after the temperatures, and acceptance by quintile."""
    temperatures = fit_temperatures(fitted_on.confidence_logits.numpy(), fitted_on.survived().numpy())
    logits, survived = judged_on.confidence_logits.numpy(), judged_on.survived().numpy()
    before, after = survival(logits), survival(logits, temperatures)
    return {
        "temperatures": _rounded(temperatures),
        "calibration_error_before": round(expected_calibration_error(before, survived), 4),
        "calibration_error_after": round(expected_calibration_error(after, survived), 4),
        "quintiles_predicted_and_accepted": [
            _rounded(quintile) for quintile in acceptance_by_quantile(after, survived)
        ],
    }


def evaluate(pair_folder: Path, workload: Workload) -> dict[str, Any]:
    """Everything above for a saved pair, as one JSON-ready object."""
    pair = load_pair(pair_folder)
    sources = read_sources("held_out")
    halves = sources[::2], sources[1::2]
    fitting, judging = (held_out_prompts(pair_folder, half, workload) for half in halves)
    fitted_on = decode(pair, fitting, workload.rounds, 1.0)
    sampled = decode(pair, judging, workload.rounds, 1.0)
    greedy = decode(pair, judging, workload.rounds, 0.0)
    return {
        "files": len(sources),
        "block_size": pair.draft.block_size,
        "sampled": acceptance_report(sampled) | calibration_report(fitted_on, sampled),
        "greedy": acceptance_report(greedy) | calibration_report(fitted_on, greedy),
    }


def _rounded(numbers: Any) -> list[float]:
    return [round(float(number), 3) for number in numbers]


def main() -> None:
    """Print the report of a pair, the bundled one by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, default=HERE, help="folder that holds target/ and draft/")
    parser.add_argument("--rounds", type=int, default=Workload.rounds)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(evaluate(arguments.pair, Workload(rounds=arguments.rounds)), indent=2))


if __name__ == "__main__":
    main()
