"""What holds for every schedule, with random sizes, costs and edges."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.harness.tiers import some
from tfdist._src.pipeline.plan.lowering import Receive, Send, lower, walk
from tfdist._src.pipeline.plan.schedule import Action, Costs, Edge, Kind, Schedule
from tfdist._src.pipeline.plan.validation import check
from tfdist._src.pipeline.schedules import SCHEDULES, make_schedule
from tfdist._src.pipeline.simulation import simulate

VIRTUAL = ("interleaved", "looped_bfs", "interleaved_zb")


@dataclass
class Case:
    schedule: Schedule
    costs: Costs
    edges: list[Edge]
    differentiable: list[Edge]


def make_case(name: str, seed: int) -> Case:
    draw = random.Random(f"{name} {seed}")
    ranks, microbatches = draw.randint(1, 6), draw.randint(1, 14)
    virtual_stages = draw.randint(1, 3) if name in VIRTUAL else None
    stages = make_schedule(name, ranks, microbatches, virtual_stages).stages

    def passes() -> float | list[float]:
        many = [draw.choice([0.0, draw.random(), draw.random()]) for _ in range(stages)]
        return draw.choice([draw.random(), many])

    costs = Costs(passes(), passes(), passes(), transfer=draw.choice([0, draw.random()]))
    pairs = [(a, b) for b in range(stages) for a in range(b)]
    chain = [pair for pair in pairs if pair[1] - pair[0] == 1]
    edges = sorted({*chain, *draw.sample(pairs, draw.randint(0, len(pairs)))})
    differentiable = [edge for edge in edges if edge in chain or draw.random() < 0.7]
    return Case(
        make_schedule(name, ranks, microbatches, virtual_stages, costs),
        costs,
        edges,
        differentiable,
    )


CASES = [f"{name}-{seed}" for name in SCHEDULES for seed in range(8)]
# Of each schedule two random cases by default.
USUAL = [case for case in CASES if case[-1] in "01"]


@pytest.fixture(params=some(CASES, always=USUAL), scope="module")
def case(request) -> Case:
    name, seed = request.param.rsplit("-")
    return make_case(name, int(seed))


def messages(case: Case, kind: type) -> dict[tuple[int, int], list[tuple]]:
    """What each channel carries, in the order in which the sends or the receives have it."""
    found: dict[tuple[int, int], list[tuple]] = defaultdict(list)
    for rank, own in enumerate(lower(case.schedule, case.edges, case.differentiable)):
        for step in own:
            if isinstance(step, kind):
                channel = (rank, step.peer) if kind is Send else (step.peer, rank)
                found[channel].append((step.value_kind, step.source, step.target, step.microbatch))
    return found


def expected(case: Case) -> Iterator[tuple]:
    """The messages that the edges ask for."""
    rank_of = case.schedule.rank_of
    for a, b in case.edges:
        if rank_of(a) != rank_of(b):
            for m in range(case.schedule.microbatches):
                yield ("activation", a, b, m)
                if (a, b) in case.differentiable:
                    yield ("gradient", b, a, m)


def test_the_checker_passes(case):
    check(case.schedule, case.edges, case.differentiable)
    check(case.schedule)


def test_no_schedule_deadlocks_at_any_capacity(case):
    for program in (
        lower(case.schedule, case.edges, case.differentiable),
        lower(case.schedule.forward_only(), case.edges),
    ):
        for capacity in (1, 2, 5, None):
            walked = list(walk(program, capacity))
            for rank, own in enumerate(program):
                assert [step for walker, step in walked if walker == rank] == own


def test_sends_match_receives(case):
    sends, receives = messages(case, Send), messages(case, Receive)
    assert sends == receives
    carried = [message for channel in sends.values() for message in channel]
    assert sorted(carried) == sorted(expected(case))
    assert all(source != target for source, target in sends)


def test_transfers_are_in_their_places(case):
    program = lower(case.schedule, case.edges, case.differentiable)
    for own, actions in zip(program, case.schedule.actions, strict=True):
        assert tuple(step for step in own if isinstance(step, Action)) == actions
        place = {action.takes: index for index, action in enumerate(actions)}
        done, last = 0, None
        for step in own:
            if isinstance(step, Action):
                done, last = done + 1, step
            elif isinstance(step, Send):
                assert last is not None
                assert (last.kind.carries, last.stage) == (step.value_kind, step.source)
                assert last.microbatch == step.microbatch
            else:
                assert done <= max(0, place[step.value] - 1)
        for before, after in itertools.pairwise(own):
            assert not (isinstance(before, Receive) and isinstance(after, Send))


def test_time_is_no_shorter_than_it_can_be(case):
    schedule, costs = case.schedule, case.costs
    timeline = simulate(schedule, costs, case.edges, case.differentiable)
    seconds = costs.seconds(schedule.ranks, schedule.stages)
    for own, actions in zip(timeline.spans, schedule.actions, strict=True):
        assert tuple(span.action for span in own) == actions
        assert timeline.makespan >= sum(seconds[a.kind][a.stage] for a in actions) - 1e-9
        for before, after in itertools.pairwise(own):
            assert before.end <= after.start
    # One microbatch there and back.
    split = {(a.stage, a.microbatch): a.kind is Kind.INPUT_GRADIENT for a in all_actions(schedule)}
    back = Kind.INPUT_GRADIENT if all(split.values()) else Kind.BACKWARD
    hops = sum(
        schedule.rank_of(stage) != schedule.rank_of(stage + 1)
        for stage in range(schedule.stages - 1)
    )
    path = sum(seconds[Kind.FORWARD]) + 2 * hops * costs.transfer
    path += sum(map(min, seconds[back], seconds[Kind.INPUT_GRADIENT]))
    assert timeline.makespan >= path - 1e-9


def all_actions(schedule: Schedule) -> list[Action]:
    return [action for own in schedule.actions for action in own if action.takes]


def test_values_come_before_they_are_taken(case):
    schedule, costs = case.schedule, case.costs
    timeline = simulate(schedule, costs, case.edges, case.differentiable)
    spans = {span.action: span for own in timeline.spans for span in own}
    made = {action.takes: span.end for action, span in spans.items() if action.takes}
    if schedule.splits_backward:
        seconds = costs.seconds(schedule.ranks, schedule.stages)[Kind.INPUT_GRADIENT]
        for action, span in spans.items():
            if action.kind is Kind.BACKWARD:
                made[action.takes] = min(span.end, span.start + seconds[action.stage])
    for action, span in spans.items():
        if action.kind is Kind.WEIGHT_GRADIENT:
            whole = Action(Kind.INPUT_GRADIENT, action.stage, action.microbatch)
            assert span.start >= spans[whole].end
            continue
        value_kind, stage, microbatch = action.takes
        if value_kind == "gradient":
            assert span.start >= made["activation", stage, microbatch]
        edges = (
            case.edges if value_kind == "activation" else [(b, a) for a, b in case.differentiable]
        )
        for source, target in edges:
            if target == stage:
                apart = schedule.rank_of(source) != schedule.rank_of(target)
                arrival = made[value_kind, source, microbatch] + costs.transfer * apart
                assert span.start >= arrival - 1e-9
