"""Deadlines for the code under test."""

from __future__ import annotations

# More seconds than pytest's own limit for a test. Code that should end immediately, but waits for
# this deadline, fails by pytest's limit. Correct code never waits for it, even on a slow machine.
FAR = 3600.0
