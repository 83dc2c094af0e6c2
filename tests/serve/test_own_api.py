"""schemathesis over the description of our own paths: whatever is sent is answered as described.

Statuses, content types, methods and bodies that stand in no description fail it. The mode is switched for real, in two
engines that answer as workers do.
"""

import asyncio

import schemathesis
from hypothesis import HealthCheck, settings

from serve.app import build_own_app
from serve.lifecycle import Lifecycle
from serve.metrics import Combined
from serve.modes import ModeSwitch
from serve.profile import Verification
from tests.serve.test_modes import Engines

life = Lifecycle()
life.ready()
modes = ModeSwitch(life, Verification.ADAPTIVE)
asyncio.run(modes.attach(Engines()))
own = schemathesis.openapi.from_asgi(
    "/dspark/openapi.json",
    build_own_app(life, Combined(), lambda: {"profile": "tiny-cpu"}, {"version": "0.32.0"}, modes),
)


@own.parametrize()
@settings(database=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))
def test_our_own_paths_answer_as_they_are_described(case: schemathesis.Case) -> None:
    case.call_and_validate()
