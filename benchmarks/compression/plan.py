"""Plans the number of steps. It is the same for all codecs, so that losses can be compared."""

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
    """Returns a plan with the numbers that the user has set, and computes the others.

    By default, a round takes one or two seconds. The default number of rounds suffices for a
    meaningful median and for a decrease of the loss. But all rounds together take at most half a
    minute, unless there are only five rounds.

    Args:
        step_seconds: the time of a step with the first codec, in seconds. If `none` is measured, it
            is the first codec.
        steps: the number of steps in a round that the user has set; None to compute the number.
        rounds: the number of rounds that the user has set; None to compute the number.
    """
    if steps is None:
        steps = min(MAX_STEPS, max(MIN_STEPS, round(ROUND_SECONDS / step_seconds)))
    if rounds is None:
        enough = max(ENOUGH_ROUNDS, math.ceil(ENOUGH_STEPS / steps))
        affordable = int(ENOUGH_SECONDS / (steps * step_seconds))
        rounds = max(MIN_ROUNDS, min(enough, affordable))
    return Plan(steps, rounds)
