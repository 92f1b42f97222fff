"""Zero bubble: weight gradients fill the gaps in which a rank would idle."""

from __future__ import annotations

import heapq
from collections import deque

from tfdist._src.pipeline.plan.action import Action, Kind
from tfdist._src.pipeline.plan.costs import Costs
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.plan.validation import peak_activations

# A rank waits for its next F or I instead, if it is due within this many quarters of a W.
_WAITS = (0, 1, 2, 4)
# Costs are rounded to 1/_TICKS of the largest, so that no rounding error decides the order.
_TICKS = 1000


def fill(frame: Schedule, costs: Costs | None = None) -> Schedule:
    """Inserts the weight gradients into a schedule of F and I only.

    Nothing waits for W, so a rank runs it when its next F or I cannot run yet, or when an F would
    exceed the limit of activations: the peak of the fullest rank if each W directly followed its I.
    Time is simulated with the costs. Several thresholds for starting a W shortly before the next F
    or I is ready are tried, and the shortest schedule wins.

    The result depends only on the arguments, so all ranks compute the same.

    Args:
        frame: the order of F and I on each rank.
        costs: the seconds of the passes and transfers; by default, 1 for each pass and 0 for a
            transfer.
    """
    room = max(peak_activations(frame, freed_by_input_gradient=1))
    ticks = _Ticks(costs or Costs(), frame)
    candidates = [_Simulation(frame, ticks, room, wait) for wait in _WAITS]
    return min(candidates, key=lambda candidate: candidate.run()).schedule()


class _Ticks:
    """Costs as integers."""

    def __init__(self, costs: Costs, frame: Schedule) -> None:
        seconds = costs.seconds(frame.ranks, frame.stages)
        longest = max(costs.transfer, *(max(each) for each in seconds.values()))
        scale = _TICKS / longest if longest else 0.0
        self.of = {k: [round(s * scale) for s in each] for k, each in seconds.items()}
        self.transfer = round(costs.transfer * scale)


class _Simulation:
    """One simulated run of the schedule."""

    def __init__(self, frame: Schedule, ticks: _Ticks, room: float, wait: int) -> None:
        self._frame = frame
        self._ticks = ticks
        self._room = room
        self._wait = wait
        self._left = [deque(actions) for actions in frame.actions]
        self._due: list[deque[Action]] = [deque() for _ in frame.actions]
        self._kept = [0] * frame.ranks
        self._free = [0] * frame.ranks
        self._end: dict[Action, int] = {}
        self._done: list[list[Action]] = [[] for _ in frame.actions]

    def run(self) -> int:
        """Runs to the end and returns the end time."""
        times = [0]
        while times:
            now = heapq.heappop(times)
            for rank in range(self._frame.ranks):
                if self._free[rank] <= now and (action := self._choose(rank, now)):
                    end = self._begin(rank, action, now)
                    for time in {end, end + self._ticks.transfer}:
                        heapq.heappush(times, time)
        return max(self._free)

    def schedule(self) -> Schedule:
        """The actions that have run."""
        return Schedule(self._frame.name, tuple(map(tuple, self._done)))

    def _choose(self, rank: int, now: int) -> Action | None:
        left, due = self._left[rank], self._due[rank]
        if left and (left[0].kind is not Kind.FORWARD or self._kept[rank] < self._room):
            ready = self._ready(left[0])
            if ready is not None:
                if ready <= now:
                    return left.popleft()
                if due and 4 * (ready - now) < self._wait * self._ticks_of(due[0]):
                    return None
        return due.popleft() if due else None

    def _begin(self, rank: int, action: Action, now: int) -> int:
        end = now + self._ticks_of(action)
        self._free[rank] = self._end[action] = end
        self._done[rank].append(action)
        if action.kind is Kind.FORWARD:
            self._kept[rank] += 1
        elif action.kind is Kind.INPUT_GRADIENT:
            self._due[rank].append(Action(Kind.WEIGHT_GRADIENT, action.stage, action.microbatch))
        else:
            self._kept[rank] -= 1
        return end

    def _ready(self, action: Action) -> int | None:
        """When an F or I can run; None if not yet known."""
        stage = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        if not 0 <= stage < self._frame.stages:
            return 0
        end = self._end.get(Action(action.kind, stage, action.microbatch))
        if end is None:
            return None
        here = self._frame.rank_of(stage) == self._frame.rank_of(action.stage)
        return end if here else end + self._ticks.transfer

    def _ticks_of(self, action: Action) -> int:
        return self._ticks.of[action.kind][action.stage]
