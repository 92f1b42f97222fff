"""Zero-bubble schedules, which compute weight gradients while a rank would otherwise be idle."""

import heapq
from collections import deque
from collections.abc import Sequence

from tfdist._src.pipeline.plan.schedule import Action, Costs, Kind, Schedule
from tfdist._src.pipeline.plan.validation import peak_activations
from tfdist._src.pipeline.schedules.one_f_one_b import BI, BW, B, F, Pass, interleave, number

# The thresholds that `fill` tries, in quarters of the duration of a W. If a rank's next F or I will
# be ready within this time, the rank waits for it and does not start a W.
_WAITS = (0, 1, 2, 4)
# Durations are rounded to multiples of 1/_TICKS of the longest duration. Otherwise, rounding errors
# in floating-point sums could change the order of the actions.
_TICKS = 1000


def fill(frame: Schedule, costs: Costs | None = None) -> Schedule:
    """Inserts weight gradients (W) into a schedule that consists of F and I only.

    No other pass depends on a W, so a rank can run it at any time after the corresponding I. The
    function simulates the schedule with the given costs. A rank runs a W when its next F or I is
    not ready yet, or when the next F would exceed the limit on the number of activations. This
    limit is the same for all ranks: the largest number of activations that any rank would keep if
    every W directly followed its I.

    If the next F or I will be ready soon, it may be better to wait than to start a W. The function
    tries several thresholds for this decision, and returns the shortest of the resulting schedules.
    The result depends only on the arguments, so all ranks compute the same schedule.

    Args:
        frame: a schedule with the order of F and I on each rank.
        costs: the durations of passes and transfers in seconds. By default, each pass takes 1 and
            a transfer takes 0.
    """
    room = max(peak_activations(frame, freed_by_input_gradient=1))
    ticks = _Ticks(costs or Costs(), frame)
    candidates = [_Simulation(frame, ticks, room, wait) for wait in _WAITS]
    return min(candidates, key=lambda candidate: candidate.run()).schedule()


class _Ticks:
    """The durations of passes and transfers as integers."""

    def __init__(self, costs: Costs, frame: Schedule) -> None:
        seconds = costs.seconds(frame.ranks, frame.stages)
        longest = max(costs.transfer, *(max(each) for each in seconds.values()))
        scale = _TICKS / longest if longest else 0.0
        self.of = {k: [round(s * scale) for s in each] for k, each in seconds.items()}
        self.transfer = round(costs.transfer * scale)


class _Simulation:
    """Simulates the schedule with one of the thresholds."""

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
        """Simulates all actions, and returns the time at which the last action ends."""
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
        """Returns the schedule with all actions that have run."""
        return Schedule(self._frame.name, tuple(map(tuple, self._done)))

    def _choose(self, rank: int, now: int) -> Action | None:
        """Returns the action that a free rank begins at the time `now`, or None if it waits."""
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
        """Returns the time at which an F or I can run, or None if that is not known yet."""
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


def zb_h1(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Runs 1F1B with split backward passes (ZB-H1).

    Each rank runs F and I in the order of 1F1B. A rank runs a W when it would otherwise wait, or
    when it cannot keep the activations of another F.

    Suppose that on each of p ranks, a microbatch takes F, I and W seconds for the three passes, and
    that these times are about equal. With m >= p microbatches, each rank idles for
    (p - 1)(F + I - W) seconds and keeps at most min(m, p) activations (its peak activations), as
    many as the first rank of 1F1B.

    Args:
        ranks: the number of ranks, each with one stage.
        microbatches: the number of microbatches.
        costs: the durations of the passes and transfers, which determine when a rank would wait.
            By default, all passes take the same time.

    Example:
        >>> print(*zb_h1(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 I0.0 W0.0 I0.1 W0.1

    Source: Qi et al., "Zero bubble pipeline parallelism", 2023, arXiv:2401.10241.
    """

    def pattern(rank: int) -> Sequence[Pass]:
        return [(F, rank)] * (ranks - 1 - rank) + [(F, rank), (BI, rank)] * microbatches

    return fill(number("zb_h1", ranks, microbatches, pattern), costs)


def interleaved_zb(
    ranks: int, microbatches: int, virtual_stages: int = 2, costs: Costs | None = None
) -> Schedule:
    """Runs interleaved 1F1B with split backward passes.

    Each rank runs F and I in the order of `interleaved`. A rank runs a W when it would otherwise
    wait, or when it cannot keep the activations of another F.

    Suppose that on each of p ranks, a microbatch takes F, I and W seconds in all v stages of the
    rank together, and that these times are about equal. With m >= p microbatches, each rank idles
    for (p - 1)(F + I - W) / v seconds. The peak activations of each rank are the same as on the
    first rank of `interleaved`.

    Args:
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        virtual_stages: the number of stages per rank. Rank r holds the stages r, r + ranks,
            r + 2 ranks, and so on.
        costs: the durations of the passes and transfers, which determine when a rank would wait.
            By default, all passes take the same time.

    Example:
        >>> print(*interleaved_zb(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 F2.0 F2.1 I2.0 W2.0 I2.1 I0.0 I0.1 W2.1 W0.0 W0.1

    Source: Narayanan et al., 2021, arXiv:2104.04473, for the order; Qi et al., "Zero bubble
    pipeline parallelism", 2023, arXiv:2401.10241, for the two parts.
    """
    frame = number(
        "interleaved_zb",
        ranks,
        microbatches,
        lambda rank: interleave(ranks, rank, microbatches, virtual_stages, BI),
    )
    return fill(frame, costs)


def zbv(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """Runs two stages per rank, arranged in a V, with split backward passes (ZB-V).

    The first half of the stages is placed on the ranks in order, from the first rank to the last.
    The second half is placed in reverse order, from the last rank to the first. So the first rank
    holds both the first and the last stage, and the backward pass of a microbatch begins on the
    rank where its forward pass began. All ranks keep the same number of activations.

    Suppose that on each of p ranks, a microbatch takes F, I and W seconds in both stages of the
    rank together, and that these times are equal. With m >= p microbatches, each rank idles for
    (p - 1) F / 2 seconds. With m >= 2 p - 1, the ranks never idle between their first and last
    actions. Each rank keeps at most min(2 m, 2 p) activations (its peak activations), each of a
    single stage. Together, 2 p such activations take as much memory as the p activations on the
    first rank of 1F1B.

    Args:
        ranks: the number of ranks. Rank r holds the stages r and 2 ranks - 1 - r.
        microbatches: the number of microbatches.
        costs: the durations of the passes and transfers, which determine when a rank would wait.
            By default, all passes take the same time.

    Example:
        >>> print(*zbv(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1

    Source: Qi et al., "Zero bubble pipeline parallelism", 2023, arXiv:2401.10241, section 6, and
    "Pipeline parallelism with controllable memory", 2024, arXiv:2405.15362.
    """
    frame = number("zbv", ranks, microbatches, lambda rank: _zbv_pattern(ranks, rank, microbatches))
    return fill(frame, costs)


def _zbv_pattern(ranks: int, rank: int, microbatches: int) -> list[Pass]:
    down, up = rank, 2 * ranks - 1 - rank
    # The number of ranks from this rank to the last rank, at the bottom of the V.
    after = ranks - rank
    # With few microbatches, the pattern is made for 2 ranks - 1 microbatches, so that all ranks
    # reach the steady phase. `number` then drops the passes of the additional microbatches.
    steady = max(microbatches, 2 * ranks - 1) - ranks
    return [
        *[(F, down)] * (2 * after - 1),
        *[(F, up), (F, down)] * rank,
        *[(F, up), (BI, up)] * after,
        *[(F, down), (BI, down), (F, up), (BI, up)] * steady,
        *[(BI, down), (BI, up)] * rank,
        *[(BI, down)] * after,
    ]


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Runs two stages per rank, arranged in a V, with mostly whole backward passes (DualPipeV).

    As in `zbv`, the first rank holds both the first and the last stage. A rank alternates between
    forward passes through one of its stages and backward passes through the other. Backward passes
    are split only while the pipeline fills and drains. The schedule was designed for ranks that run
    a forward and a backward pass at the same time to hide the transfers. In tfdist, these passes
    run one after the other.

    Suppose that on each of p ranks, a microbatch takes F, I and W seconds in both stages of the
    rank together, and that these times are equal. With m >= 2 p microbatches, each rank idles for
    (p - 1)(F + I - W) / 2 seconds. With fewer microbatches, the ranks idle longer. Each rank keeps
    at most min(2 m, 2 p + 1) activations (its peak activations), each of a single stage.

    Args:
        ranks: the number of ranks. Rank r holds the stages r and 2 ranks - 1 - r.
        microbatches: the number of microbatches.

    Example:
        >>> print(*dualpipev(ranks=2, microbatches=2).actions[0])
        F0.0 F0.1 F3.0 I3.0 W3.0 F3.1 B3.1 B0.0 B0.1

    Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, arXiv:2412.19437, and DualPipeV in
    https://github.com/deepseek-ai/DualPipe, after "cut-in-half" of Sea AI Lab.
    """
    return number(
        "dualpipev", ranks, microbatches, lambda rank: _dualpipev_pattern(ranks, rank, microbatches)
    )


def _dualpipev_pattern(ranks: int, rank: int, microbatches: int) -> list[Pass]:
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - 1 - rank  # The number of ranks after this rank, further down the V.
    steady = max(microbatches - 2 * ranks, 0) + rank + 1
    both: list[Pass] = [(F, up), (B, down)]
    return [
        *[(F, down)] * 2 * after,
        *[(F, down), (F, up)] * (rank + 1),
        *[(BI, up), (BW, None), (F, up)] * after,
        *[(F, down), (B, up), *both] * steady,
        *[(B, up), *both] * after,
        *zip([B] * (rank + 1) + [BI] * (rank + 1), [up, down] * (rank + 1), strict=True),
        *[(BW, None), (BI, down)] * after,
        *[(BW, None)] * (rank + 1),
    ]
