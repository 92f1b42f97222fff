"""What the checker refuses, and what it says."""

from __future__ import annotations

import random
import re

import pytest

from tfdist._src.pipeline.plan.schedule import Action, Kind, Schedule
from tfdist._src.pipeline.plan.validation import check, peak_activations
from tfdist._src.pipeline.schedules import SCHEDULES, from_lists, make_schedule
from tfdist.errors import ScheduleError


def read(*lines: str) -> Schedule:
    """A schedule from lines like "F0.0 B0.0", one for each rank."""
    return from_lists(
        "mine",
        [
            [(word[0], *(int(n) for n in word[1:].split("."))) for word in line.split()]
            for line in lines
        ],
    )


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["F0.0 B0.0", ""], "Rank 1 runs nothing"),
        (["F0.0 B0.0 F0.-1"], "Rank 0 runs F0.-1; .* numbered from 0"),
        (["F0.0 B0.0 F2.0 B2.0"], "No rank runs stage 1;"),
        (["F0.0 B0.0", "F1.0 B0.0 B1.0"], "Rank 1 runs B0.0 and rank 0 runs F0.0;"),
        (["F0.0 F0.0 B0.0"], "Rank 0 runs F0.0 2 times"),
        (["B0.0"], "Rank 0 never runs F0.0"),
        (["F0.0"], "Rank 0 never runs B0.0"),
        (["F0.0 B0.0 F0.2 B0.2"], "Rank 0 never runs F0.1"),
        (["F0.0 I0.0"], "Rank 0 never runs W0.0"),
        (["F0.0 W0.0"], "Rank 0 never runs I0.0"),
        (["F0.0 B0.0 W0.0"], "Rank 0 runs B0.0 and W0.0; .* whole"),
        (["F0.0 I0.0 W0.0 B0.0"], "Rank 0 runs B0.0 and I0.0; .* whole"),
        (["F0.1 F0.0 B0.0 B0.1"], "Rank 0 runs F0.1 before F0.0"),
        (["B0.0 F0.0"], "Rank 0 runs B0.0 before F0.0"),
        (["F0.0 W0.0 I0.0"], "Rank 0 runs W0.0 before I0.0"),
        (["F1.0 F0.0 B1.0 B0.0"], "Rank 0 runs F1.0 before F0.0"),
        (["F0.0 F1.0 B0.0 I1.0 W1.0"], "Rank 0 runs B0.0 before I1.0"),
        (
            ["F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"],
            "rank 0 waits at B0.0 to receive gradient 1>0.0 from 1, "
            "rank 1 waits at F1.1 to receive activation 0>1.1 from 0",
        ),
    ],
)
def test_what_is_wrong_is_named(lines, complaint):
    with pytest.raises(ScheduleError) as raised:
        check(read(*lines))
    assert re.search(complaint, str(raised.value))
    assert "\n" not in str(raised.value)


def test_a_schedule_without_ranks_is_refused():
    with pytest.raises(ScheduleError, match="no ranks"):
        check(Schedule("empty", ()))


def refused(schedule: Schedule, lists: list[list[Action]], *named: Action) -> None:
    with pytest.raises(ScheduleError) as raised:
        check(Schedule(schedule.name, tuple(map(tuple, lists))))
    said = re.findall(r"[FBIW]\d+\.\d+", str(raised.value))
    assert set(map(str, named)) & set(said), f"{raised.value} does not name {named}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_changed_schedules_are_refused(name):
    draw = random.Random(name)
    schedule = make_schedule(name, ranks=3, microbatches=5)
    for _ in range(20):
        rank = draw.randrange(3)
        lists = [list(own) for own in schedule.actions]
        place = draw.randrange(len(lists[rank]))
        action = lists[rank].pop(place)
        refused(schedule, lists, action)
        lists[rank].insert(place, action)
        lists[rank].insert(draw.randrange(len(lists[rank])), action)
        refused(schedule, lists, action)
        lists[rank].remove(action)
        lists[(rank + draw.choice([1, 2])) % 3].append(action)
        refused(schedule, lists, action)


@pytest.mark.parametrize("name", SCHEDULES)
def test_mixed_backward_passes(name):
    schedule = make_schedule(name, ranks=2, microbatches=4)
    for rank, own in enumerate(schedule.actions):
        for action in own:
            if action.kind is Kind.FORWARD:
                continue
            whole = action.kind is Kind.BACKWARD
            added = Action(
                Kind.WEIGHT_GRADIENT if whole else Kind.BACKWARD, action.stage, action.microbatch
            )
            lists = [list(each) for each in schedule.actions]
            lists[rank].append(added)
            refused(schedule, lists, added)


@pytest.mark.parametrize("name", SCHEDULES)
def test_exchanged_actions_are_refused(name):
    # Two actions of one microbatch, or forward passes of one stage, need their order.
    schedule = make_schedule(name, ranks=3, microbatches=4)
    for rank, own in enumerate(schedule.actions):
        for first in range(len(own)):
            for second in range(first + 1, len(own)):
                a, b = own[first], own[second]
                forwards = a.kind is b.kind is Kind.FORWARD and a.stage == b.stage
                if not forwards and (a.stage, a.microbatch) != (b.stage, b.microbatch):
                    continue
                lists = [list(each) for each in schedule.actions]
                lists[rank][first], lists[rank][second] = b, a
                refused(schedule, lists, a, b)


def test_edges_that_skip_stages_count():
    # Without the chain, stage 1 of rank 0 needs nothing of stage 0.
    schedule = read("F1.0 F0.0 B1.0 B0.0", "F2.0 B2.0")
    check(schedule, edges=iter([[0, 2], [1, 2]]))
    with pytest.raises(ScheduleError, match=r"Rank 0 runs F1.0 before F0.0"):
        check(schedule, edges=[(0, 1), (0, 2), (1, 2)])


def test_an_edge_without_gradient_orders_no_backward_passes():
    schedule = read("F0.0 F1.0 B0.0 B1.0")
    check(schedule, edges=[(0, 1)], differentiable=[])
    with pytest.raises(ScheduleError, match=r"Rank 0 runs B0.0 before B1.0"):
        check(schedule, edges=[(0, 1)])


@pytest.mark.parametrize(
    ("edges", "differentiable", "complaint"),
    [
        ([(1, 0)], None, r"from one of the 2 stages to a later one. Received: \(1, 0\)"),
        ([(0, 0)], None, r"Received: \(0, 0\)"),
        ([(0, 2)], None, r"Received: \(0, 2\)"),
        ([(0, 1)], [(0, 2)], r"one of the edges. Received: \(0, 2\)"),
    ],
)
def test_edges_that_are_none(edges, differentiable, complaint):
    with pytest.raises(ValueError, match=complaint):
        check(make_schedule("gpipe", 2, 2), edges, differentiable)


def test_peak_activations_count_what_is_not_freed():
    schedule = read("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1 F0.2 B0.2")
    assert peak_activations(schedule) == (2,)
    schedule = read("F0.0 F0.1 I0.0 F0.2 I0.1 F0.3 I0.2 I0.3 W0.0 W0.1 W0.2 W0.3")
    assert peak_activations(schedule) == (4,)
    assert peak_activations(schedule, freed_by_input_gradient=0.5) == (3.0,)
    assert peak_activations(schedule, freed_by_input_gradient=1) == (2,)
