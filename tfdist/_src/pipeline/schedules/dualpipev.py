"""DualPipe cut in half: two stages per rank, arranged in a V."""

from __future__ import annotations

from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules.pattern import BI, BW, B, F, Pass, number


def dualpipev(ranks: int, microbatches: int) -> Schedule:
    """Alternates forward passes of one stage and backward passes of the other, two per rank in a V.

    The first rank holds the first and the last stage. Most backward passes are whole; they are
    split only while the pipeline fills and drains. It was designed for ranks that overlap a forward
    and a backward pass to hide transfers; here they run one after the other.

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
        "dualpipev", ranks, microbatches, lambda rank: _pattern(ranks, rank, microbatches)
    )


def _pattern(ranks: int, rank: int, microbatches: int) -> list[Pass]:
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
