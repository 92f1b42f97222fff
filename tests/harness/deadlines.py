"""How long the code under test may wait."""

from __future__ import annotations

# Seconds beyond pytest's own limit for a test: what should end at once, and waits for such a
# deadline instead, fails by that limit, and no machine is too slow for it.
FAR = 3600.0
