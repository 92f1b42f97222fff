"""Teams take turns: for each size some short rounds, in each of which every backend has one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.all_reduce.team import Team, TeamError

ROUND_SECONDS = 0.03
MAX_REPETITIONS = 1_000_000


@dataclass
class Times:
    """What the rounds of one backend gave.

    Attributes:
        seconds: of one reduction, for each round.
        wrong: elements that came out wrong, of all rounds and ranks.
    """

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


def take_rounds(
    teams: Mapping[str, Team],
    size: int,
    rounds: int,
    drop: Callable[[str, str], None],
) -> dict[str, Times]:
    """Measures one size with all teams in turns.

    Args:
        teams: by backend.
        size: bytes to reduce.
        rounds: how many.
        drop: told the backend and the reason when a team fails.

    Returns:
        The times of those that did not fail.
    """
    repetitions: dict[str, int] = {}
    for backend, team in teams.items():
        try:
            repetitions[backend] = calibrate(team, size)
        except TeamError as error:
            drop(backend, str(error))
    times = {backend: Times() for backend in repetitions}
    for turn in range(rounds):
        # There and back, so that nobody always follows the same neighbour.
        for backend in list(times)[:: -1 if turn % 2 else 1]:
            try:
                seconds, wrong = teams[backend].measure(size, repetitions[backend])
            except TeamError as error:
                drop(backend, str(error))
                del times[backend]
                continue
            times[backend].seconds.append(seconds)
            times[backend].wrong += wrong
    return times


def calibrate(team: Team, size: int) -> int:
    """How many repetitions make a round of about `ROUND_SECONDS`."""
    repetitions = 1
    while True:
        seconds, _ = team.measure(size, repetitions)
        spent = seconds * repetitions
        if spent > ROUND_SECONDS / 3 or repetitions == MAX_REPETITIONS:
            return min(MAX_REPETITIONS, max(1, round(ROUND_SECONDS / seconds)))
        # The first ones are slower than the rest, so it goes by steps.
        growth = min(50.0, 1.5 * ROUND_SECONDS / spent)
        repetitions = min(MAX_REPETITIONS, math.ceil(repetitions * growth))
