"""Goes through a plan: one server after the other, one thing after the other, each on disk before the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol as Interface

from serve.validate.accuracy import AccuracyError
from serve.validate.endpoint import EndpointError
from serve.validate.exactness import Outputs, compare
from serve.validate.load import LoadError
from serve.validate.plan import Sampling, Serving, Work, remaining, works_of
from serve.validate.progress import Reporting
from serve.validate.results import Accuracy, Arm, Load
from serve.validate.servers import ServerError
from serve.validate.stopping import go_on
from serve.validate.store import Store

Measured = Load | Accuracy | Outputs


class Measuring(Interface):
    """Measures one thing on a server that stands."""

    def measure(self, work: Work) -> Measured:
        """The record of one thing."""
        ...


class Servers(Interface):
    """Makes servers stand."""

    def serving(self, serving: Serving) -> AbstractContextManager[Measuring]:
        """A server until the block ends."""
        ...


def run(servings: Sequence[Serving], servers: Servers, store: Store, reporting: Reporting) -> list[str]:
    """Measure what is not on disk yet.

    A thing that cannot be measured is left out and the rest goes on; with its server gone, so does the next server.

    Args:
        servings: The whole plan.
        servers: What the servers are.
        store: Where the records go.
        reporting: Told of everything.

    Returns:
        What could not be measured, one line each. The same run, started again, tries only that.

    Raises:
        StoppedError: the run was told to stop.
    """
    works = works_of(servings)
    problems: list[str] = []
    try:
        for serving in remaining(servings, store.done(works)):
            problems += _measure_on(serving, servers, store, reporting)
    finally:
        compare_outputs([work for work in works if isinstance(work, Sampling)], store)
    return problems


def _measure_on(serving: Serving, servers: Servers, store: Store, reporting: Reporting) -> list[str]:
    """Measure everything of one server; returns what could not be measured."""
    problems = []
    left = list(serving.works)
    reporting.doing(f"waiting for the server of {' and '.join(serving.arms)}")
    try:
        with servers.serving(serving) as measuring:
            while left:
                go_on()
                reporting.doing(str(left[0]))
                try:
                    record = measuring.measure(left[0])
                except (LoadError, AccuracyError) as error:
                    problems.append(f"{left[0]}: {error}")
                    reporting.failed(problems[-1])
                else:
                    store.write(left[0].record, record)
                    reporting.done(f"{left[0]}: {summary(record)}")
                left.pop(0)
    except (ServerError, EndpointError) as error:
        problems += [f"{work}: {error}" for work in left]
        reporting.failed(f"{serving.name}: {error}")
    return problems


def compare_outputs(samplings: Sequence[Sampling], store: Store) -> None:
    """Write the exactness record of every arm whose outputs are there beside those without speculation."""
    outputs = {sampling.arm: store.read(sampling.record, Outputs) for sampling in samplings}
    reference = outputs.pop(Arm.OFF, None)
    for sampling in samplings:
        own = outputs.get(sampling.arm)
        if reference is not None and own is not None:
            store.write(f"exactness/{sampling.arm}", compare(reference, own, f"{sampling.record}.json"))


def summary(record: Measured) -> str:
    """One line of what was measured."""
    match record:
        case Load():
            return f"{record.output_tokens_per_s:.1f} tokens/s, {record.failed} of {record.requested} requests failed"
        case Accuracy():
            return ", ".join(f"{name} {score.value:.4f}" for name, score in record.scores.items())
        case Outputs():
            return f"{len(record.greedy)} greedy answers, {len(record.sampled)} samples"
