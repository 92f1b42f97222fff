"""Deadlines for the code under test."""

from __future__ import annotations

# A deadline that is longer than pytest's time limit for a test. If code should end immediately but
# waits for this deadline instead, pytest's limit makes the test fail. Correct code never waits
# until this deadline, even on a slow machine.
FAR = 3600.0
