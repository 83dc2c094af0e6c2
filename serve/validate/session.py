"""A server that stands, and the measuring of one thing after another on it."""

from __future__ import annotations

from pathlib import Path

from serve.validate import accuracy, exactness, load
from serve.validate.load import Target
from serve.validate.plan import Cell, Sampling, Serving, Task, Work
from serve.validate.prompts import PromptSet
from serve.validate.results import Accuracy, Arm, Load, Protocol


class Session:
    """Measures on one server.

    Args:
        target: The server.
        protocol: What is measured.
        prompts: Of the load.
        serving: What the server was started for.
        directory: The run's.
    """

    def __init__(
        self, target: Target, protocol: Protocol, prompts: PromptSet, serving: Serving, directory: Path
    ) -> None:
        self._target = target
        self._protocol = protocol
        self._prompts = prompts
        self._serving = serving
        self._directory = directory
        self._warm: set[Arm] = set()

    def measure(self, work: Work) -> Load | Accuracy | exactness.Outputs:
        """Put the server into the arm's mode and measure.

        Raises:
            EndpointError, LoadError, AccuracyError: it could not be measured.
        """
        # One of ours that was started with its only arm has to do it; somebody else's is left as it is.
        if len(self._serving.arms) > 1 or (self._protocol.url is None and work.arm is not Arm.OFF):
            self._target.endpoint.switch(work.arm)
        match work:
            case Cell():
                self._warm_up(work.arm)
                return load.measure(self._target, self._protocol, self._prompts, work, self._directory)
            case Task():
                return accuracy.measure(self._target, self._protocol, work, self._directory)
            case Sampling():
                return exactness.ask(self._target.endpoint, work.arm, self._protocol.seed)

    def _warm_up(self, arm: Arm) -> None:
        if arm not in self._warm:
            name = f"{self._serving.name}-{arm}"
            load.warm_up(self._target, self._protocol, self._prompts, name, self._directory)
            self._warm.add(arm)
