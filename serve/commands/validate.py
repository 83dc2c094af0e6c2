"""`dspark-serve validate`: the seeds' validation protocol against the servers of a profile, and its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from serve.arguments import ArgumentNames
from serve.errors import ExitCode, InputError
from serve.overrides import override
from serve.preflight import installed_names, judge
from serve.preflight.facts import gather
from serve.preflight.plan import plan as planned_start
from serve.profile import Profile, Verification, load
from serve.validate.accuracy import GSM8K, check_questions, missing_data
from serve.validate.children import tool_environment
from serve.validate.endpoint import key_in
from serve.validate.here import check_extra, modules_of, run_here
from serve.validate.plan import Cell, Serving, Task, Work, needed_context, plan, works_of
from serve.validate.progress import Reporting
from serve.validate.prompts import prompt_set
from serve.validate.protocol import Options, profile_protocol
from serve.validate.results import Arm, Load, Protocol, Skipped
from serve.validate.runner import Servers, run
from serve.validate.servers import ProfileServers
from serve.validate.stopping import StoppedError, stoppable
from serve.validate.store import Store, opened


def validate_command(
    profile: str,
    sets: Sequence[str],
    extra: Sequence[str],
    options: Options,
    *,
    out: Path | None,
    tasks: str | None,
    gsm8k: Path | None,
    questions: int | None,
    exactness: bool,
    server_per_arm: bool = False,
) -> int:
    """Measure, or go on measuring, and write the report; returns the exit code.

    Args:
        profile: A bundled profile's name or the path of a YAML file.
        sets: `key=value` words that override the profile.
        extra: Arguments of vllm serve.
        options: Of the sweep.
        out: The run's directory; None for one that is named after the profile and the day.
        tasks: Accuracy tasks, separated by commas.
        gsm8k: The user's own questions.
        questions: Of a task, at most.
        exactness: Whether outputs are compared.
        server_per_arm: Whether `fixed` has servers of its own.

    Raises:
        InputError: anything that cannot be measured as it was asked for.
    """
    names = installed_names()
    recipe = override(load(profile), sets, names)
    protocol = profile_protocol(
        recipe,
        profile,
        sets,
        extra,
        options,
        tasks=tasks,
        gsm8k=gsm8k,
        questions=questions,
        exactness=exactness,
        server_per_arm=server_per_arm,
    )
    check_extra(modules_of(protocol))
    prompts = prompt_set(protocol.prompts)
    if gsm8k is not None:
        check_questions(gsm8k)
    starts = [planned_start(recipe, verification, extra, names=names) for verification in _verifications(protocol)]
    facts = [gather(start, names=names, address=None) for start in starts]
    errors = {result.line for start, found in zip(starts, facts, strict=True) for result in judge(start, found).errors}
    if errors:
        for line in sorted(errors):
            print(f"dspark-serve: {line}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    context = starts[-1].max_model_len
    if context is not None and protocol.output_tokens >= context:
        raise InputError(
            f"--output-tokens {protocol.output_tokens}: {recipe.name} has a context of {context} tokens for prompt and "
            "answer together; give fewer, or a longer --set max_model_len=TOKENS"
        )
    key = key_in(os.environ)
    longest = facts[-1].target.number("max_position_embeddings")
    skipped = what_is_skipped(protocol, longest, tool_environment(os.environ, key))
    directory = out or Path(f"validate-{recipe.name}-{datetime.now(UTC):%Y-%m-%d}")
    servings = plan(protocol, starts[-1].max_model_len, [each.what for each in skipped])
    check_context(servings, recipe, extra, names)
    begun = run_here(sys.argv, protocol, facts[-1].patches, facts[-1].machine, skipped)
    with opened(directory.absolute(), begun) as store:
        # What was measured before its data was lost belongs to the run all the same.
        store.check_foreign(works_of(plan(protocol, starts[-1].max_model_len)))
        servers = ProfileServers(recipe, protocol, prompts, store, os.environ, key)
        return carry_out(servings, servers, store, skipped)


def what_is_skipped(protocol: Protocol, longest: int | None, environment: Mapping[str, str]) -> list[Skipped]:
    """What of the protocol cannot be measured here, with reason and remedy.

    Args:
        protocol: What is asked for.
        longest: Tokens that the model was made for; None where its config does not say.
        environment: Of the tools, which say where data sets come from.
    """
    skipped = []
    for task in protocol.tasks:
        if longest is not None and needed_context(task) > longest:
            reason = f"the model takes {longest} tokens and the task {needed_context(task)}: choose a shorter LENGTH"
            skipped.append(Skipped(what=task, reason=reason))
    if GSM8K in protocol.tasks and protocol.gsm8k is None and (problem := missing_data(environment)) is not None:
        reason = f"{problem}; give a file of its questions with --gsm8k, or a mirror in HF_ENDPOINT"
        skipped.append(Skipped(what=GSM8K, reason=reason))
    if protocol.exactness and (Arm.OFF not in protocol.arms or len(protocol.arms) == 1):
        reason = "it compares arms with off: give --arms off and another one"
        skipped.append(Skipped(what="exactness", reason=reason))
    return skipped


def check_context(
    servings: Sequence[Serving], recipe: Profile, extra: Sequence[str], names: ArgumentNames | None
) -> None:
    """See that the longer context of a task's own server is not undone by the user's words, which vLLM reads last.

    Raises:
        InputError: it is; a server would be started that refuses the task's requests.
    """
    for serving in servings:
        if (needed := serving.max_model_len) is None:
            continue
        longer = override(recipe, [f"max_model_len={needed}"], names)
        start = planned_start(longer, Verification(serving.verification.value), extra, names=names)
        if start.max_model_len is not None and start.max_model_len < needed:
            tasks = dict.fromkeys(work.task for work in serving.works if isinstance(work, Task))
            raise InputError(
                f"-- --max-model-len {start.max_model_len}: {' and '.join(tasks)} needs --set max_model_len={needed}, "
                "and what stands after -- wins; leave it out there, or leave the task out of --tasks"
            )


def carry_out(servings: Sequence[Serving], servers: Servers, store: Store, skipped: Sequence[Skipped] = ()) -> int:
    """Measure what is missing, write the report, and say what came of it; returns the exit code."""
    from serve.validate.report import write_report

    console = Console(stderr=True, highlight=False)
    works = works_of(servings)
    missing = len(works) - len(store.done(works))
    code, problems = ExitCode.OK, list[str]()
    with stoppable():
        try:
            with Reporting(missing, console) as reporting:
                for each in skipped:
                    reporting.failed(f"{each.what} is skipped: {each.reason}")
                problems = run(servings, servers, store, reporting)
        except StoppedError:
            # Told while the last server ended, there is nothing left to measure.
            code = ExitCode.PARTIAL if len(store.done(works)) < len(works) else ExitCode.OK
        report = write_report(store.directory)
    for problem in problems:
        print(f"dspark-serve: not measured: {problem}", file=sys.stderr)
    if problems:
        code = ExitCode.START_FAILED
    if code is not ExitCode.OK:
        print("dspark-serve: the report is partial; the same command measures the rest", file=sys.stderr)
    for failure in what_failed_whole(works, store):
        print(f"dspark-serve: {failure}", file=sys.stderr)
        code = ExitCode.START_FAILED if code is ExitCode.OK else code
    print(report)
    return code


def what_failed_whole(works: Sequence[Work], store: Store) -> list[str]:
    """Cells that are counted in the report and yet say nothing: every request failed, with the reason most had."""
    failures = []
    for work in works:
        record = store.read(work.record, Load) if isinstance(work, Cell) else None
        if record is not None and record.failed == record.requested:
            failures.append(f"{work}: every request failed: {next(iter(record.errors), 'no reason given')}")
    return failures


def _verifications(protocol: Protocol) -> list[Verification]:
    """The modes that servers are started with, the one that asks most of the machine last."""
    started = {serving.verification for serving in plan(protocol)}
    return [Verification(arm.value) for arm in Arm if arm in started]
