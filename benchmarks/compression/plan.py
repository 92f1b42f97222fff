"""How many steps are taken; as many by all codecs, so that their losses can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

ROUND_SECONDS = 1.5
MAX_STEPS = 40
MIN_STEPS = 2
ENOUGH_STEPS = 60
ENOUGH_ROUNDS = 10
ENOUGH_SECONDS = 30.0
MIN_ROUNDS = 5


@dataclass(frozen=True)
class Plan:
    """Rounds of so many steps."""

    steps: int
    rounds: int


def make_plan(step_seconds: float, steps: int | None, rounds: int | None) -> Plan:
    """What the user said, and the rest by how long a step takes without compression.

    A round lasts a second or two. There are so many rounds that a median is worth something and the
    loss has fallen, but no more than last half a minute, where five do not take longer.

    Args:
        step_seconds: of one step.
        steps: in a round; None where the user did not say.
        rounds: how many; None where the user did not say.
    """
    if steps is None:
        steps = min(MAX_STEPS, max(MIN_STEPS, round(ROUND_SECONDS / step_seconds)))
    if rounds is None:
        enough = max(ENOUGH_ROUNDS, math.ceil(ENOUGH_STEPS / steps))
        affordable = int(ENOUGH_SECONDS / (steps * step_seconds))
        rounds = max(MIN_ROUNDS, min(enough, affordable))
    return Plan(steps, rounds)
