"""What the operator chooses. Imports nothing, so that the command line can ask it at once."""

from __future__ import annotations

import os
from enum import StrEnum

VARIABLE = "DSPARK_CALIBRATION"


class CalibrationMode(StrEnum):
    """What is done with the fitted temperatures."""

    OFF = "off"
    SHADOW = "shadow"
    ON = "on"


def chosen_mode() -> CalibrationMode:
    """The mode that `DSPARK_CALIBRATION` names; `shadow` without it.

    Raises:
        ValueError: it names no mode.
    """
    name = os.environ.get(VARIABLE, CalibrationMode.SHADOW.value)
    try:
        return CalibrationMode(name)
    except ValueError as error:
        raise ValueError(f"{VARIABLE} is '{name}': use {', '.join(CalibrationMode)}") from error
