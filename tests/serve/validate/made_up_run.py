"""Directories as `dspark-serve validate` leaves them, with numbers as a server of four GPUs would give."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from serve.validate.reading import Records
from serve.validate.results import (
    Accuracy,
    Arm,
    Drafts,
    Exactness,
    Load,
    Protocol,
    Record,
    Run,
    Score,
    Skipped,
    Start,
)

ARMS = (Arm.OFF, Arm.FIXED, Arm.ADAPTIVE)
K = 5


def protocol(
    concurrencies: Iterable[int] = (1, 4, 16, 64),
    rounds: int = 3,
    arms: Iterable[Arm] = ARMS,
    tasks: Iterable[str] = ("gsm8k", "niah-16384"),
    exactness: bool = True,
) -> Protocol:
    return Protocol(
        profile="deepseek-v4-flash-h200x4",
        arms=tuple(arms),
        concurrencies=tuple(concurrencies),
        rounds=rounds,
        prompts="speed-bench",
        requests=64,
        requests_per_stream=4,
        warmup_requests=64,
        output_tokens=512,
        temperature=1.0,
        tasks=tuple(tasks),
        exactness=exactness,
        seed=7,
    )


def run(planned: Protocol, skipped: Iterable[Skipped] = ()) -> Run:
    return Run(
        started="2026-11-29T21:00:00Z",
        command=("dspark-serve", "validate", planned.profile or "", "--rounds", str(planned.rounds)),
        protocol=planned,
        versions={"dspark-serve": "0.1.0", "vllm": "0.32.0", "torch": "2.13.0"},
        hardware="cuda-hopper",
        machine="4x NVIDIA H200, 141 GiB each; 64 cores, 512 GiB",
        patches={"tp-consensus": "applied", "cpu-engine": "not for this hardware"},
        patch_set="0123456789abcdef",
        skipped=tuple(skipped),
    )


def speed(arm: Arm, concurrency: int) -> float:
    """Output tokens a second: speculation pays most at low load, trimming most at high."""
    alone = {Arm.OFF: 115.0, Arm.FIXED: 255.0, Arm.ADAPTIVE: 251.0}[arm]
    half = {Arm.OFF: 90.0, Arm.FIXED: 28.0, Arm.ADAPTIVE: 35.0}[arm]
    return alone * concurrency / (1 + concurrency / half) ** 0.95


def load(arm: Arm, concurrency: int, number: int, chance: random.Random, failed: int = 0) -> Load:
    requested = max(64, 4 * concurrency)
    completed = requested - failed
    tokens = completed * 512
    rate = speed(arm, concurrency) * chance.gauss(1, 0.008) * (1 - 0.5 * failed / requested)
    steps = tokens / 3.2
    width = K + 1 if arm is Arm.FIXED else 1 + K / (1 + concurrency / 90)
    accepted = steps * (2.3 if arm is Arm.FIXED else 2.3 / (1 + concurrency / 250))
    drafts = Drafts(
        proposed=steps * K,
        verified=steps * (width - 1),
        accepted=accepted,
        expected=0.0 if arm is Arm.FIXED else accepted * chance.gauss(1.02, 0.01),
        steps=steps,
        emitted=accepted + steps,
        width=steps * width,
    )
    return Load(
        round=number,
        arm=arm,
        concurrency=concurrency,
        requested=requested,
        completed=completed,
        failed=failed,
        errors={"HTTP 503: the server | is <draining>\n[retry](x)": failed} if failed else {},
        duration_s=tokens / rate,
        input_tokens=completed * 300,
        output_tokens=tokens,
        output_tokens_per_s=rate,
        ttft_ms=(40.0 + concurrency, 90.0 + 3 * concurrency) if completed else None,
        tpot_ms=(1e3 * concurrency / rate, 1.4e3 * concurrency / rate) if completed else None,
        drafts=None if arm is Arm.OFF else drafts,
        raw=f"raw/round-{number}-{arm}-c{concurrency}.json",
        command=("vllm", "bench", "serve", "--max-concurrency", str(concurrency), "--extra-body", '{"cache_salt":"a"}'),
    )


def start(arms: tuple[Arm, ...], number: int, chance: random.Random) -> Start:
    adaptive = Arm.ADAPTIVE in arms
    return Start(
        round=number,
        arms=arms,
        ready_s=(240 if adaptive else 170) + chance.uniform(0, 9),
        graph_s=121 + chance.uniform(0, 4) if adaptive else 52 + chance.uniform(0, 4),
        graph_gib=4.71 if adaptive else 2.61,
        command=("dspark-serve", "up", "deepseek-v4-flash-h200x4", "--port", "9000"),
        environment={"VLLM_ENGINE_READY_TIMEOUT_S": "7200", "HF_TOKEN": "hf_shown_to_nobody"},
    )


def accuracy(arm: Arm, task: str, chance: random.Random) -> Accuracy:
    def score(centre: float) -> Score:
        return Score(value=centre + chance.uniform(-0.004, 0.004), standard_error=0.0072)

    scores = {"exact_match,strict-match": score(0.9262), "exact_match,flexible-extract": score(0.927)}
    if task != "gsm8k":
        scores = {"score": Score(value=0.988, standard_error=None if task == "niah-65536" else 0.004)}
    return Accuracy(
        arm=arm,
        task=task,
        scores=scores,
        samples=1319 if task == "gsm8k" else 500,
        acceptance_length=None if arm is Arm.OFF else 4.1,
        raw=f"raw/{arm}-{task}",
        command=("lm_eval", "--tasks", task, "--seed", "42"),
    )


def exactness(arm: Arm, equal: int = 32, p_value: float = 0.31) -> Exactness:
    return Exactness(
        arm=arm,
        greedy_prompts=32,
        greedy_equal=equal,
        greedy_tokens=32 * 128,
        first_difference=dict.fromkeys(range(32 - equal), 17),
        sampled_tokens=20_000,
        p_values={1: p_value, 2: 0.62, 8: 0.9},
        raw=f"raw/exactness-{arm}",
    )


def records(
    planned: Protocol | None = None,
    *,
    seed: int = 1,
    failed: Mapping[tuple[Arm, int, int], int] | None = None,
    skipped: Iterable[Skipped] = (),
) -> Records:
    """A finished run.

    Args:
        failed: (arm, concurrency, round) -> requests that failed.
    """
    planned = planned or protocol()
    chance = random.Random(seed)
    servers = [tuple(arm for arm in planned.arms if arm is Arm.OFF), tuple(a for a in planned.arms if a is not Arm.OFF)]
    rounds = range(1, planned.rounds + 1)
    return Records(
        run=run(planned, skipped),
        starts=tuple(start(arms, number, chance) for number in rounds for arms in servers if arms),
        loads=tuple(
            load(arm, concurrency, number, chance, (failed or {}).get((arm, concurrency, number), 0))
            for number in rounds
            for arm in planned.arms
            for concurrency in planned.concurrencies
        ),
        accuracies=tuple(accuracy(arm, task, chance) for task in planned.tasks for arm in planned.arms),
        exactnesses=tuple(exactness(arm) for arm in planned.arms if planned.exactness and arm is not Arm.OFF),
    )


def write(directory: Path, made: Records) -> Path:
    """Lay records down as the run does."""
    put(directory / "run.json", made.run)
    for each in made.starts:
        put(directory / "starts" / f"round-{each.round}-{each.arms[0]}.json", each)
    for cell in made.loads:
        put(directory / "load" / f"round-{cell.round}-{cell.arm}-c{cell.concurrency}.json", cell)
    for task in made.accuracies:
        put(directory / "accuracy" / f"{task.arm}-{task.task}.json", task)
    for check in made.exactnesses:
        put(directory / "exactness" / f"{check.arm}.json", check)
    return directory


def put(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record.model_dump_json(indent=1))
