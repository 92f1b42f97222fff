"""Trains with codecs in turns: in each round, each takes some steps while the others sleep."""

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
    """The training with one codec.

    Attributes:
        warm_up: the first steps, except for the very first one, which is slow.
        turns: the following steps, for each round.
        missing: the reason if the codec failed; else "".
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
    """Trains with several codecs; the workers of all codecs are alive until the end.

    Args:
        start: starts the workers of a codec.
        codecs: the codecs' names; the first codec that runs determines the plan.
        plan: called with the seconds of a step of this codec.
        report: called with lines about the progress.

    Returns:
        The trainings by codec.
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
            # Every other round is reversed, so that no codec always follows the same codec.
            for codec in list(courses)[:: -1 if turn % 2 else 1]:
                with noting(courses[codec], teams[codec]):
                    if not courses[codec].missing:
                        courses[codec].turns.append(teams[codec].steps(made.steps))
            report(_describe(f"round {turn + 1} of {made.rounds}", courses, made.steps))
    return courses


@contextlib.contextmanager
def ending() -> Iterator[dict[str, Team]]:
    """Yields a dictionary for teams, and stops these teams at the end, even after an error."""
    teams: dict[str, Team] = {}
    try:
        yield teams
    finally:
        with undisturbed():
            for team in teams.values():
                team.stop()


@contextlib.contextmanager
def noting(course: Course, team: Team) -> Iterator[None]:
    """Records why a codec fails, and stops its remaining workers."""
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
