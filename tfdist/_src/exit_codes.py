"""Exit codes with a specific meaning, for workers and for the launcher."""

from __future__ import annotations

PREEMPTED = 75
"""The state was saved after SIGTERM: no failure, start the job again elsewhere (EX_TEMPFAIL)."""
