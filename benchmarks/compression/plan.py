"""Plans the number of steps, the same for all codecs, so that losses can be compared."""

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
    """The number of steps in a round, and the number of rounds."""

    steps: int
    rounds: int


def make_plan(step_seconds: float, steps: int | None, rounds: int | None) -> Plan:
    """Returns the user's numbers; derives missing numbers from the time of an uncompressed step.

    A round takes one or two seconds. There are enough rounds for a meaningful median and a lower
    loss, but no more than fit into half a minute, and at least five.

    Args:
        step_seconds: the seconds of one step.
        steps: the user's number of steps in a round; None to derive it.
        rounds: the user's number of rounds; None to derive it.
    """
    if steps is None:
        steps = min(MAX_STEPS, max(MIN_STEPS, round(ROUND_SECONDS / step_seconds)))
    if rounds is None:
        enough = max(ENOUGH_ROUNDS, math.ceil(ENOUGH_STEPS / steps))
        affordable = int(ENOUGH_SECONDS / (steps * step_seconds))
        rounds = max(MIN_ROUNDS, min(enough, affordable))
    return Plan(steps, rounds)
