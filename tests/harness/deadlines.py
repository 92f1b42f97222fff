"""Deadlines for the code under test."""

from __future__ import annotations

# More seconds than pytest's own limit for a test. Code that should end at once, but waits for this
# deadline, fails by pytest's limit; code that works never reaches it, even on a slow machine.
FAR = 3600.0
