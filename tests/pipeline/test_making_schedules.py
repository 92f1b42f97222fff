"""Schedules by name, and users' own."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest

from tfdist._src.pipeline.plan.schedule import Action, Costs, Kind, Schedule
from tfdist._src.pipeline.schedules import SCHEDULES, make_schedule
from tfdist._src.pipeline.simulation import simulate
from tfdist.errors import ScheduleError


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_made_by_its_name(name):
    schedule = make_schedule(name, ranks=3, microbatches=7)
    assert schedule.name == name
    assert (schedule.ranks, schedule.microbatches) == (3, 7)
    assert schedule.stages in (3, 6)
    assert [schedule.rank_of(stage) for stage in schedule.stages_of(1)] == [1] * (
        schedule.stages // 3
    )
    assert schedule.splits_backward == (name in ("zb_h1", "interleaved_zb", "zbv", "dualpipev"))
    document = " ".join(SCHEDULES[name].__doc__.split())
    assert "peak activations" in document and "Source:" in document


@pytest.mark.parametrize("name", SCHEDULES)
def test_evaluation_takes_the_forward_passes(name):
    schedule = make_schedule(name, ranks=3, microbatches=7)
    forward = schedule.forward_only()
    for own, all_of_it in zip(forward.actions, schedule.actions, strict=True):
        assert own == tuple(action for action in all_of_it if action.kind is Kind.FORWARD)
    timeline = simulate(forward)
    assert timeline.makespan >= 7
    assert (forward.ranks, forward.stages, forward.microbatches) == (3, schedule.stages, 7)


def test_all_processes_make_the_same():
    # Sets and hashes of strings come in another order in each process.
    program = (
        "from tfdist._src.pipeline.schedules import SCHEDULES, make_schedule\n"
        "from tfdist._src.pipeline.plan.schedule import Costs\n"
        "costs = Costs(0.1, 0.3, [0.1] * 8, transfer=0.2)\n"
        "for name in SCHEDULES:\n"
        "    ranks = 4 if make_schedule(name, 4, 9).stages == 8 else 8\n"
        "    actions = make_schedule(name, ranks, 9, costs=costs).actions\n"
        "    print([str(a) for own in actions for a in own])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize("name", ["zb_h1", "interleaved_zb", "zbv"])
def test_the_unit_of_costs_does_not_matter(name):
    first = make_schedule(name, 4, 8, costs=Costs(1, 1.5, 0.5, transfer=0.1))
    second = make_schedule(name, 4, 8, costs=Costs(1 / 3, 0.5, 0.5 / 3, transfer=0.1 / 3))
    assert first == second


def test_costs_make_better_orders():
    costs = Costs(1, 1.4, 0.6, transfer=0.3)
    for name in ("zb_h1", "interleaved_zb", "zbv"):
        blind, seeing = make_schedule(name, 4, 16), make_schedule(name, 4, 16, costs=costs)
        assert simulate(seeing, costs).makespan <= simulate(blind, costs).makespan


def test_two_ranks_come_near_the_ideal():
    # The first rank waits for the first gradient, and nothing else can be done by then.
    costs = Costs(1, 1.1, 0.9)
    assert simulate(make_schedule("zb_h1", 2, 8)).makespan == 8 * 3 + 1
    assert simulate(make_schedule("zb_h1", 2, 8, costs=costs), costs).makespan <= 8 * 3 + 1.2 + 1e-9


def alternate(ranks, microbatches):
    """Each microbatch there and back, one after the other."""
    return [
        [(kind, rank, m) for m in range(microbatches) for kind in "FB"] for rank in range(ranks)
    ]


def test_lists_of_ones_own():
    schedule = make_schedule(alternate, ranks=2, microbatches=3)
    assert schedule.name == "alternate"
    assert [str(a) for a in schedule.actions[1]] == ["F1.0", "B1.0", "F1.1", "B1.1", "F1.2", "B1.2"]
    assert simulate(schedule).makespan == 2 * 3 * 3


def test_actions_of_ones_own():
    def mine(ranks, microbatches):
        return [
            [Action(kind, 0, m) for kind in (Kind.FORWARD, Kind.BACKWARD)]
            for m in range(microbatches)
        ][:ranks]

    assert make_schedule(mine, ranks=1, microbatches=1).name == "mine"


def test_a_function_that_takes_more():
    def mine(ranks, microbatches, virtual_stages=1, costs=None):
        assert costs == Costs(2)
        return make_schedule("interleaved", ranks, microbatches, virtual_stages)

    assert make_schedule(mine, 2, 4, virtual_stages=3, costs=Costs(2)).stages == 6
    partial = functools.partial(SCHEDULES["zbv"], costs=Costs(2))
    assert make_schedule(partial, 2, 4) == make_schedule("zbv", 2, 4, costs=Costs(2))


def test_a_schedule_of_ones_own():
    made = make_schedule("1f1b", 2, 4)
    assert make_schedule(lambda ranks, microbatches: Schedule("x", made.actions), 2, 4).name == "x"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("fly", 2, 2), "one of gpipe, .* Received: 'fly'"),
        ((["gpipe"], 2, 2), "or a function"),
        (("gpipe", 0, 2), "`ranks` must be an integer >= 1. Received: 0"),
        (("gpipe", 2, 1.5), "`microbatches` must be an integer >= 1. Received: 1.5"),
        (("interleaved", 2, 2, 0), "`virtual_stages` must be an integer >= 1. Received: 0"),
        (("gpipe", 2, 2, 2), "gpipe has 2 stages on 2 ranks. Received: virtual_stages=2. Omit"),
        (("zbv", 2, 2, 1), "zbv has 4 stages on 2 ranks. Received: virtual_stages=1. Omit"),
        ((lambda p, m: alternate(p, m + 1), 2, 2), "2 ranks with 3 microbatches. Return .* with 2"),
        ((lambda p, m: alternate(3, m), 2, 2), "Received: 3 ranks with 2 microbatches"),
        ((lambda p, m: None, 2, 2), "a list of actions for each rank. Received: None"),
        ((lambda p, m: [[("X", 0, 0)]], 1, 1), r"Received: \('X', 0, 0\) on rank 0"),
        ((lambda p, m: [[("F", 0)]], 1, 1), r"Received: \('F', 0\) on rank 0"),
        ((lambda p, m: [[("F", 0, "0")]], 1, 1), r"Received: \('F', 0, '0'\) on rank 0"),
        ((lambda p, m: [[("F", 0, 0)]], 1, 1), "Rank 0 never runs B0.0"),
    ],
)
def test_what_cannot_be_made(arguments, complaint):
    with pytest.raises(ValueError) as raised:
        make_schedule(*arguments)
    assert re.search(complaint, str(raised.value))
    assert "\n" not in str(raised.value)


def test_mistakes_of_ones_own_are_schedule_errors():
    with pytest.raises(ScheduleError):
        make_schedule(lambda ranks, microbatches: [[("F", 0, 0)]], 1, 1)
