"""Zero-bubble schedules: weight gradients fill a rank's idle gaps."""

import heapq
from collections import deque
from collections.abc import Sequence

from tfdist._src.pipeline.plan.schedule import Action, Costs, Kind, Schedule
from tfdist._src.pipeline.plan.validation import peak_activations
from tfdist._src.pipeline.schedules.one_f_one_b import BI, BW, B, F, Pass, interleave, number

# The thresholds that `fill` tries. A rank idles instead of running a W if its next F or I will be
# ready within this many quarters of the duration of a W.
_WAITS = (0, 1, 2, 4)
# Costs are rounded to 1/_TICKS of the largest, so that rounding errors never decide the order.
_TICKS = 1000


def fill(frame: Schedule, costs: Costs | None = None) -> Schedule:
    """Inserts the weight gradients into a schedule of F and I only.

    Nothing waits for a W. A rank runs a W when its next F or I cannot run yet, or when the next F
    would exceed the limit of activations. The limit is the largest peak of any rank if each W
    directly followed its I. Time is simulated with the costs. A W may start shortly before the next
    F or I is ready; several thresholds for this are tried, and the shortest schedule is returned.

    The result depends only on the arguments, so all ranks compute the same schedule.

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
        """Returns the actions that have run."""
        return Schedule(self._frame.name, tuple(map(tuple, self._done)))

    def _choose(self, rank: int, now: int) -> Action | None:
        """Returns the action that a free rank begins now; None to wait."""
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
        """Returns when an F or I can run; None if not yet known."""
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
    """1F1B with split backward passes; the second parts fill gaps.

    Each rank runs F and I in the order of 1F1B, and W when it would otherwise wait, or when it
    cannot keep the activations of another F.

    With F, I and W seconds for a microbatch on a rank, p ranks and m >= p microbatches: each rank
    idles (p - 1)(F + I - W) seconds if F, I and W are about equal; peak activations are min(m,
    p), as on the first rank of 1F1B.

    Args:
        ranks: the number of ranks, each with one stage.
        microbatches: the number of microbatches.
        costs: the costs of the passes, which determine the gaps; by default, all are equal.

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
    """Interleaved 1F1B with split backward passes; the second parts fill gaps.

    Each rank runs F and I in the order of `interleaved`, and W when it would otherwise wait, or
    when it cannot keep the activations of another F.

    With F, I and W seconds for a microbatch on a rank, p ranks, v stages on each and m >= p
    microbatches: each rank idles (p - 1)(F + I - W) / v seconds if F, I and W are about equal;
    peak activations are as on the first rank of `interleaved`.

    Args:
        ranks: the number of ranks.
        microbatches: the number of microbatches.
        virtual_stages: the stages per rank; rank r holds r, r + ranks, r + 2 ranks, ...
        costs: the costs of the passes, which determine the gaps; by default, all are equal.

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
    """Two stages per rank, down the ranks and back up, with split backward passes.

    The first rank holds the first and the last stage, so a microbatch's backward pass begins where
    its forward pass began. All ranks keep the same number of activations.

    With F, I and W seconds for a microbatch on a rank, p ranks and m >= p microbatches: if F, I and
    W are equal, each rank idles (p - 1) F / 2 seconds. If m >= 2 p - 1 as well, a rank idles only
    before its first and after its last microbatch. Peak activations are min(2 m, 2 p), each of one
    stage; 2 p of them take as much memory as the p activations on the first rank of 1F1B.

    Args:
        ranks: the number of ranks; rank r holds stages r and 2 ranks - 1 - r.
        microbatches: the number of microbatches.
        costs: the costs of the passes, which determine the gaps; by default, all are equal.

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
    after = ranks - rank  # The ranks from this one to the bottom of the V.
    # The steady phase is long enough for all ranks to reach it.
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
    """Alternates forward passes of one stage and backward passes of the other, two per rank in a V.

    The first rank holds the first and the last stage. Most backward passes are whole; they are
    split only while the pipeline fills and drains. The schedule was designed for ranks that overlap
    a forward and a backward pass to hide transfers; here these passes run one after the other.

    With F, I and W seconds for a microbatch on a rank, p ranks and m >= 2 p microbatches: each rank
    idles (p - 1)(F + I - W) / 2 seconds if F, I and W are equal, more with fewer microbatches;
    peak activations are min(2 m, 2 p + 1), each of one stage.

    Args:
        ranks: the number of ranks; rank r holds stages r and 2 ranks - 1 - r.
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
    after = ranks - 1 - rank  # The ranks further down the V.
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
