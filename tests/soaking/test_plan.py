"""The plan of a soak: what no group could survive does not happen, all the rest does."""

from __future__ import annotations

from tests.harness.tiers import exhaustive
from tests.soaking.plan import KINDS, Event, Group, make_plan

MIN_WORKERS, MAX_WORKERS = 1, 4


def replay(events: list[Event], start: int) -> list[list[int]]:
    """The members, by numbers that are never used again, before each event and at the end."""
    members, newest, course = list(range(start)), start, [list(range(start))]
    for event in events:
        if event.kind == "join":
            members.append(newest)
            newest += 1
        else:
            members.pop(event.position)
        course.append(list(members))
    return course


@exhaustive
def test_plans_keep_their_limits_and_leave_a_group_that_may_go_on() -> None:
    kinds, together, eldest = set(), 0, 0
    for seed in range(300):
        events = make_plan(seed, steps=200, start=3, least=MIN_WORKERS, most=MAX_WORKERS)
        assert [event.step for event in events] == sorted(event.step for event in events)
        assert all(0 < event.step <= 200 for event in events)
        course = replay(events, 3)
        assert all(MIN_WORKERS <= len(members) <= MAX_WORKERS for members in course)
        # The group of each step at which something happens, against those of it who are left.
        for step in {event.step for event in events}:
            at = [i for i, event in enumerate(events) if event.step == step]
            group, after = course[at[0]], course[at[-1] + 1]
            left = [member for member in group if member in after]
            stopped = any(events[i].kind == "stop" for i in at)
            half = 2 * len(left) == len(group) and group[0] in left
            assert left, (seed, step)
            assert not stopped or 2 * len(left) > len(group) or half, (seed, step)
            together += len(at) > 1
        kinds |= {event.kind for event in events}
        eldest += any(event.position == 0 for event in events)
    assert kinds == set(KINDS)
    assert together > 50 and eldest > 50


@exhaustive
def test_a_seed_is_a_plan() -> None:
    plans = [make_plan(s, steps=100, start=2, least=1, most=3) for s in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    stops = [e for s in range(50) for e in make_plan(s, steps=100, start=2, least=1, most=3)]
    assert {event.wakes for event in stops if event.kind == "stop"} == {True, False}
    assert not any(event.wakes for event in stops if event.kind != "stop")


@exhaustive
def test_who_may_go_on() -> None:
    for group, expected in [
        (Group(0, 2, joining=1), False),
        (Group(1, 4), True),  # The other three are dead.
        (Group(2, 3, silent=1), True),
        (Group(1, 3, silent=1), False),
        (Group(2, 4, silent=2), True),
        (Group(2, 4, silent=2, oldest=False), False),
        (Group(1, 2, silent=1, oldest=False), False),
    ]:
        assert group.may_go_on() is expected, group
