"""Calibration: per-position temperatures for the confidences, fitted while serving from what verification accepts.

A confidence that is too low costs drafts that would have been accepted, most of all while the device has time to
spare; one that is too high costs verification of drafts that are refused. `fit` is the arithmetic, `stage` the part of
the manager that applies it, `mode` what the operator chooses.
"""
