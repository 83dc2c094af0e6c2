"""The checks, by what they look at. `TABLE` is all of them, in the order in which they are reported."""

from serve.preflight.check import Check
from serve.preflight.checks import conflicts, machine, model, software

TABLE: tuple[Check, ...] = machine.CHECKS + software.CHECKS + model.CHECKS + conflicts.CHECKS
