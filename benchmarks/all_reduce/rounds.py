"""Measures one size in several short rounds; each round measures every backend once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.all_reduce.team import Team, TeamError

ROUND_SECONDS = 0.03
MAX_REPETITIONS = 1_000_000


@dataclass
class Times:
    """The measurements of one backend.

    Attributes:
        seconds: for each round, the time of one reduction in seconds.
        wrong: the total number of wrong elements in all rounds and on all ranks.
    """

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


def take_rounds(
    teams: Mapping[str, Team],
    size: int,
    rounds: int,
    drop: Callable[[str, str], None],
) -> dict[str, Times]:
    """Measures one size with all teams in several rounds.

    Args:
        teams: the teams by backend.
        size: the number of bytes to reduce.
        rounds: the number of rounds.
        drop: a function that is called if a team fails, with the name of its backend and the
            reason. The backend is not measured again.

    Returns:
        The measurements of all backends that did not fail, by backend.
    """
    repetitions: dict[str, int] = {}
    for backend, team in teams.items():
        try:
            repetitions[backend] = calibrate(team, size)
        except TeamError as error:
            drop(backend, str(error))
    times = {backend: Times() for backend in repetitions}
    for turn in range(rounds):
        # Every other round has the reverse order, because a backend may affect the next one.
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
    """Returns the number of repetitions that take about `ROUND_SECONDS` together."""
    repetitions = 1
    while True:
        seconds, _ = team.measure(size, repetitions)
        spent = seconds * repetitions
        if spent > ROUND_SECONDS / 3 or repetitions == MAX_REPETITIONS:
            return min(MAX_REPETITIONS, max(1, round(ROUND_SECONDS / seconds)))
        # The first repetitions are slower than later ones, so a few of them do not suffice to
        # estimate the time of a repetition.
        growth = min(50.0, 1.5 * ROUND_SECONDS / spent)
        repetitions = min(MAX_REPETITIONS, math.ceil(repetitions * growth))
