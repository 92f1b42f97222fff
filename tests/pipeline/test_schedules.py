"""Every schedule against its paper: time, bubble and activations, for many sizes.

A pass F, I or W takes a rank one second for a microbatch, a whole backward pass two; p are the
ranks, m the microbatches, v the stages of a rank; F, B, BI for I and BW for W are these seconds.
"""

from __future__ import annotations

import pytest

from tests.harness.tiers import exhaustive, some
from tfdist._src.pipeline.plan.schedule import Costs, Schedule
from tfdist._src.pipeline.plan.validation import peak_activations
from tfdist._src.pipeline.schedules import make_schedule
from tfdist._src.pipeline.simulation import simulate

F = BI = BW = 1
B = BI + BW
# Ranks, where the simulation of more takes long.
MAX_RANKS = some([4, 8], always=[4])


def sizes(most: int = 8) -> list[tuple[int, int]]:
    """Ranks and microbatches: all up to 2 ranks, and what differs beyond."""
    every = [(p, m) for p in range(1, 3) for m in range(1, 33)]
    some = [
        (p, m)
        for p in range(3, most + 1)
        for m in sorted({1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p - 1, 32})
    ]
    return every + some


def idle(schedule: Schedule) -> float:
    """The seconds beyond the work of a rank; the bubble's share follows from them."""
    timeline = simulate(schedule)
    work = schedule.microbatches * (F + B)
    assert timeline.bubble == pytest.approx(1 - work / timeline.makespan)
    return timeline.makespan - work


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_on_each_rank(name):
    # GPipe, section 2.3; PipeDream-Flush: (p - 1)(F + B) for any m.
    for p, m in sizes():
        schedule = make_schedule(name, p, m)
        assert idle(schedule) == (p - 1) * (F + B)
        kept = [m] * p if name == "gpipe" else [min(m, p - rank) for rank in range(p)]
        assert list(peak_activations(schedule)) == kept


@exhaustive
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
def test_virtual_stages_divide_the_bubble(name, v):
    # Megatron-LM, section 2.2.2, and breadth-first, section 3: (p - 1)(F + B) / v, where m >= p.
    # With fewer the first rank waits for p - m more microbatches whenever the model goes round.
    for p, m in sizes(most=8 if v == 2 else 5):
        schedule = make_schedule(name, p, m, v)
        waits = max(0, p - m) * (v - 1)
        assert idle(schedule) == pytest.approx((p - 1 + waits) * (F + B) / v)
        peak = peak_activations(schedule)
        if name == "looped_bfs":
            assert peak == (m * v,) * p
            continue
        groups = max(1, m // p)
        largest = -(-m // groups)
        ahead = 2 if v > 1 else 1
        assert list(peak) == [
            min(m * v, (v - 1) * largest + ahead * (p - 1 - rank) + 1) for rank in range(p)
        ]


@exhaustive
def test_zb_h1_has_the_bubble_and_memory_of_its_paper():
    # Zero bubble, table 2: (p - 1)(F + I - W) where m >= p, with the memory of 1F1B.
    for p, m in sizes():
        schedule = make_schedule("zb_h1", p, m)
        assert idle(schedule) == (p - 1) * (F + BI - BW) + max(0, p - m)
        assert max(peak_activations(schedule)) <= max(peak_activations(make_schedule("1f1b", p, m)))


def test_zb_h1_where_passes_differ():
    # The same formula holds where I takes no less than W.
    for i, w in ((1.1, 0.9), (1.4, 0.6), (2, 0.5), (2, 1)):
        costs = Costs(1, i, w)
        for p, m in ((2, 8), (4, 8), (5, 13), (8, 16)):
            timeline = simulate(make_schedule("zb_h1", p, m, costs=costs), costs)
            assert timeline.makespan - m * (1 + i + w) <= (p - 1) * (1 + i - w) + 1e-9


@exhaustive
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_zb_divides_the_bubble_of_zb_h1(v):
    # As zb_h1, with a v-th of the fill; with the memory of interleaved 1F1B.
    for p, m in sizes(most=8 if v == 2 else 4):
        schedule, whole = (
            make_schedule("interleaved_zb", p, m, v),
            make_schedule("interleaved", p, m, v),
        )
        if m >= p:
            assert idle(schedule) == pytest.approx((p - 1) * (F + BI - BW) / v)
        else:
            assert idle(schedule) <= idle(whole)
        assert max(peak_activations(schedule)) <= max(peak_activations(whole))


@pytest.mark.parametrize("most", MAX_RANKS)
def test_zbv_has_the_bubble_and_memory_of_its_paper(most):
    # Zero bubble, section 6: no bubble but the fill of (p - 1) stages, F / 2 each, and from
    # m = 2 p - 1 on no rank waits between; with 1F1B's memory, p microbatches of both stages.
    for p, m in sizes(most):
        schedule = make_schedule("zbv", p, m)
        assert set(peak_activations(schedule)) == {2 * min(m, p)}
        if m >= p:
            assert idle(schedule) == (p - 1) * F / 2
        else:
            assert idle(schedule) < idle(make_schedule("zb_h1", p, m))
        if m >= 2 * p - 1:
            for own in simulate(schedule).spans:
                assert own[-1].end - own[0].start == m * (F + BI + BW)


@pytest.mark.parametrize("most", MAX_RANKS)
def test_dualpipev_has_the_bubble_and_memory_of_its_readme(most):
    # DualPipe, the README's table: (p - 1)(F&B + B - 3 W) of one of two stages, and 2 p + 1
    # activations. F&B, a forward and a backward pass at once, takes F + B here, but the forward
    # pass has its output before the backward pass begins, which halves the bubble.
    for p, m in sizes(most):
        schedule = make_schedule("dualpipev", p, m)
        if m >= 2 * p:
            assert idle(schedule) == (p - 1) * (F + BI - BW) / 2
            assert idle(schedule) <= (p - 1) * (F + B + B - 3 * BW) / 2
        else:
            assert idle(schedule) <= idle(make_schedule("1f1b", p, m))
        assert max(peak_activations(schedule)) == min(2 * m, 2 * p + 1)
