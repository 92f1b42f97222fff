"""Trains with several codecs in rounds.

In each round, each codec takes some steps while the workers of the other codecs sleep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.all_reduce.cleanup import undisturbed
from benchmarks.compression.plan import Plan
from benchmarks.compression.team import Team
from benchmarks.compression.turn import Turn
from benchmarks.step_time.members import TeamError

WARM_UP_STEPS = 3


@dataclass
class Course:
    """The measurements of one training run with one codec.

    Attributes:
        warm_up: the measurement of the steps before the first round, except for the very first
            step, which is slow. None if these steps failed.
        turns: for each round, the measurement of its steps.
        missing: if the codec failed, the reason; otherwise "".
    """

    warm_up: Turn | None = None
    turns: list[Turn] = field(default_factory=list)
    missing: str = ""


def take_rounds(
    start: Callable[[str], Team],
    codecs: Sequence[str],
    plan: Callable[[float], Plan],
    report: Callable[[str], None],
) -> dict[str, Course]:
    """Trains with several codecs. The workers of all codecs run until the end of the last round.

    Args:
        start: a function that takes the name of a codec, and starts its workers.
        codecs: the names of the codecs.
        plan: a function that takes the time of a step in seconds, and returns the plan. It is
            called for the first codec that does not fail.
        report: a function that prints progress messages.

    Returns:
        The measurements by codec.
    """
    courses = {codec: Course() for codec in codecs}
    made: Plan | None = None
    with ending() as teams:
        for codec, course in courses.items():
            report(f"{codec}: starting")
            teams[codec] = start(codec)
            with noting(course, teams[codec]):
                teams[codec].steps(1)  # Compiles.
                course.warm_up = teams[codec].steps(WARM_UP_STEPS - 1)
                made = made or plan(course.warm_up.seconds / (WARM_UP_STEPS - 1))
        for turn in range(made.rounds if made else 0):
            # Every other round has the reverse order, because a codec may affect the next one.
            for codec in list(courses)[:: -1 if turn % 2 else 1]:
                with noting(courses[codec], teams[codec]):
                    if not courses[codec].missing:
                        courses[codec].turns.append(teams[codec].steps(made.steps))
            report(_describe(f"round {turn + 1} of {made.rounds}", courses, made.steps))
    return courses


@contextlib.contextmanager
def ending() -> Iterator[dict[str, Team]]:
    """Yields an empty dictionary, and at the end stops all teams that the caller has added to it.

    The teams are also stopped after an error.
    """
    teams: dict[str, Team] = {}
    try:
        yield teams
    finally:
        with undisturbed():
            for team in teams.values():
                team.stop()


@contextlib.contextmanager
def noting(course: Course, team: Team) -> Iterator[None]:
    """Catches the failure of a codec, records the reason, and stops the codec's workers."""
    try:
        yield
    except TeamError as error:
        course.missing = str(error)
        team.stop()


def _describe(title: str, courses: Mapping[str, Course], steps: int) -> str:
    times = [
        f"{codec} {1e3 * course.turns[-1].seconds / steps:.1f}"
        for codec, course in courses.items()
        if not course.missing
    ]
    return f"{title}, ms: {'  '.join(times)}"
