"""Where transfers are put, and how the ranks get through them."""

from __future__ import annotations

import pytest

from tfdist._src.pipeline.plan.lowering import Receive, Send, lower, walk
from tfdist._src.pipeline.plan.schedule import Action, Kind
from tfdist._src.pipeline.schedules import SCHEDULES, from_lists, make_schedule
from tfdist.errors import ScheduleError


def words(program):
    """Short forms: a for an activation, g for a gradient; sources and targets; the microbatch."""

    def word(step):
        if isinstance(step, Action):
            return str(step)
        sign = "!" if isinstance(step, Send) else "?"
        return f"{sign}{step.value_kind[0]}{step.source}{step.target}.{step.microbatch}"

    return [" ".join(map(word, steps)) for steps in program]


def test_gpipe_receives_before_the_passes_that_need_it():
    assert words(lower(make_schedule("gpipe", 2, 2))) == [
        "F0.0 !a01.0 ?g10.0 F0.1 !a01.1 ?g10.1 B0.0 B0.1",
        "?a01.0 ?a01.1 F1.0 F1.1 B1.0 !g10.0 B1.1 !g10.1",
    ]


def test_one_f_one_b():
    # A receive comes one action before the one that takes the value.
    assert words(lower(make_schedule("1f1b", 2, 3))) == [
        "F0.0 !a01.0 ?g10.0 F0.1 !a01.1 B0.0 ?g10.1 F0.2 !a01.2 ?g10.2 B0.1 B0.2",
        "?a01.0 F1.0 ?a01.1 B1.0 !g10.0 F1.1 ?a01.2 B1.1 !g10.1 F1.2 B1.2 !g10.2",
    ]


def test_nothing_is_sent_within_a_rank():
    program = lower(make_schedule("zbv", 1, 3))
    assert all(isinstance(step, Action) for step in program[0])
    # The bottom of the V: rank 1 has the stages 1 and 2.
    assert not any(
        "12" in word or "21" in word for word in words(lower(make_schedule("zbv", 2, 3)))
    )


def test_forward_passes_alone_need_no_gradients():
    assert words(lower(make_schedule("1f1b", 2, 2).forward_only())) == [
        "F0.0 !a01.0 F0.1 !a01.1",
        "?a01.0 ?a01.1 F1.0 F1.1",
    ]


def test_edges_that_skip_stages():
    program = lower(
        make_schedule("gpipe", 3, 1), edges=[(0, 1), (0, 2), (1, 2)], differentiable=[(0, 2)]
    )
    assert words(program) == [
        "?g20.0 F0.0 !a01.0 !a02.0 B0.0",
        "?a01.0 F1.0 !a12.0 B1.0",
        "?a02.0 ?a12.0 F2.0 B2.0 !g20.0",
    ]


def test_a_value_for_two_stages_of_a_rank_is_sent_twice():
    schedule = from_lists(
        "mine",
        [
            [("F", 0, 0), ("B", 0, 0)],
            [("F", 1, 0), ("F", 2, 0), ("B", 2, 0), ("B", 1, 0)],
        ],
    )
    first = words(lower(schedule, edges=[(0, 1), (0, 2)]))[0]
    assert first == "?g20.0 ?g10.0 F0.0 !a01.0 !a02.0 B0.0"


def test_the_value_names_the_action_that_takes_it():
    receive = Receive("gradient", source=2, target=1, microbatch=3, peer=0)
    assert receive.value == Action(Kind.BACKWARD, 1, 3).takes
    assert receive.value == Action(Kind.INPUT_GRADIENT, 1, 3).takes
    assert receive.value != Action(Kind.FORWARD, 1, 3).takes
    assert Action(Kind.WEIGHT_GRADIENT, 1, 3).takes is None
    assert str(receive) == "receive gradient 2>1.3 from 0"
    assert str(Send("activation", 1, 2, 3, peer=0)) == "send activation 1>2.3 to 0"


@pytest.mark.parametrize("name", SCHEDULES)
def test_most_receives_come_one_action_ahead(name):
    # Earlier ones keep buffers for longer.
    early = total = 0
    for own in lower(make_schedule(name, 4, 8)):
        actions = [step for step in own if isinstance(step, Action)]
        taken = {action.takes: index for index, action in enumerate(actions)}
        done = 0
        for step in own:
            done += isinstance(step, Action)
            if isinstance(step, Receive):
                total += 1
                early += done < max(0, taken[step.value] - 1)
    assert early <= total / 2


def test_sends_to_a_full_channel_wait():
    # Both send twice before they receive; room for two messages is enough.
    def steps(rank):
        peer = 1 - rank
        sends = [Send("activation", rank, peer, m, peer) for m in range(2)]
        receives = [Receive("activation", peer, rank, m, peer) for m in range(2)]
        return [Action(Kind.FORWARD, rank, 0), *sends, *receives, Action(Kind.FORWARD, rank, 1)]

    program = [steps(0), steps(1)]
    assert len(list(walk(program))) == len(list(walk(program, capacity=2))) == 12
    with pytest.raises(ScheduleError, match=r"rank 0 waits to send activation 0>1.1 to 1, rank 1"):
        list(walk(program, capacity=1))


def test_room_for_one_message_is_enough():
    # Rank 1 sends its first stage's activations long before rank 0 takes them.
    schedule = make_schedule("looped_bfs", 2, 12)
    assert len(list(walk(lower(schedule), capacity=1))) == sum(map(len, lower(schedule)))


def test_ranks_that_wait_for_one_another():
    schedule = from_lists(
        "mine",
        [
            [("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)],
            [("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1)],
        ],
    )
    with pytest.raises(
        ScheduleError, match=r"The ranks wait for one another: rank 0 waits at B0.0"
    ):
        lower(schedule)
