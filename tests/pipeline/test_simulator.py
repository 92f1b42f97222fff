"""The simulator's rules, by small cases that can be counted by hand."""

from __future__ import annotations

import pytest

from tfdist._src.pipeline.plan.schedule import Action, Costs, Kind
from tfdist._src.pipeline.schedules import from_lists, make_schedule
from tfdist._src.pipeline.simulation import Span, Timeline, simulate


def times(timeline):
    return [
        [f"{span.action} {span.start:g}-{span.end:g}" for span in own] for own in timeline.spans
    ]


def test_a_chain_of_two_stages_is_timed():
    timeline = simulate(make_schedule("gpipe", 2, 1), Costs(1, 2, 3, transfer=0.5))
    assert times(timeline) == [["F0.0 0-1", "B0.0 8-13"], ["F1.0 1.5-2.5", "B1.0 2.5-7.5"]]
    assert timeline.makespan == 13
    assert timeline.bubbles == (1 - 6 / 13, 1 - 6 / 13)
    assert timeline.bubble == pytest.approx(7 / 13)
    assert timeline.peak_activations == (1, 1)
    assert timeline.schedule == make_schedule("gpipe", 2, 1)


def test_transfers_run_beside_actions():
    # The second message leaves while rank 1 computes the first.
    timeline = simulate(make_schedule("gpipe", 2, 2).forward_only(), Costs(1, transfer=1))
    assert times(timeline) == [["F0.0 0-1", "F0.1 1-2"], ["F1.0 2-3", "F1.1 3-4"]]


def test_a_channel_moves_one_message_at_a_time():
    timeline = simulate(make_schedule("gpipe", 2, 3).forward_only(), Costs(1, transfer=3))
    assert times(timeline)[1] == ["F1.0 4-5", "F1.1 7-8", "F1.2 10-11"]


def test_a_transfer_begins_when_its_receive_is_ready():
    # F1.1 is received after F1.0, one action ahead of itself, though it is there at 2.
    schedule = from_lists(
        "mine",
        [
            [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)],
            [("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1)],
        ],
    )
    timeline = simulate(schedule, Costs([1, 5], 1, 1, transfer=3))
    assert times(timeline)[1] == ["F1.0 4-9", "B1.0 9-11", "F1.1 12-17", "B1.1 17-19"]


def test_costs_of_stages():
    seconds = Costs(1, [1, 2, 3, 4], 2).seconds(ranks=2, stages=4)
    assert seconds[Kind.FORWARD] == (0.5,) * 4
    assert seconds[Kind.INPUT_GRADIENT] == (1, 2, 3, 4)
    assert seconds[Kind.BACKWARD] == (2, 3, 4, 5)
    whole = Costs(backward=1.5).seconds(ranks=2, stages=2)
    assert whole[Kind.BACKWARD] == (1.5, 1.5)


@pytest.mark.parametrize(
    ("costs", "complaint"),
    [
        (Costs([1, 2]), "`forward` must be .* or 4 of them, one for each stage. Received: .1, 2."),
        (Costs(1, -1), "`input_gradient` .* Received: -1"),
        (Costs(1, 1, [1, 1, 1, float("nan")]), "`weight_gradient` .* Received"),
        (Costs(backward=[1] * 5), "`backward` .* Received"),
        (Costs(transfer=-1), "`transfer` .* Received: -1"),
    ],
)
def test_wrong_costs_are_refused(costs, complaint):
    with pytest.raises(ValueError, match=complaint):
        simulate(make_schedule("zbv", 2, 2), costs)


def test_a_timeline_without_time():
    timeline = simulate(make_schedule("gpipe", 2, 2), Costs(0, 0, 0))
    assert timeline.makespan == 0
    assert timeline.bubble == 0


def test_a_measured_timeline():
    span = Span(Action(Kind.FORWARD, 0, 0), 0.25, 0.75)
    timeline = Timeline("measured", ((span,), ()))
    assert timeline.makespan == 0.75
    assert timeline.bubbles == (pytest.approx(1 / 3), 1)
