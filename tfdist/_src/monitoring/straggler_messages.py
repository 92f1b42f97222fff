"""What is said of a worker that keeps the others waiting."""

from __future__ import annotations

from collections.abc import Callable

from tfdist._src.monitoring.stragglers import Cause, Straggler

_REMEDIES = {
    Cause.INPUT: "Look at how it reads and prepares its data: its disk, and `prefetch`, "
    "`cache` and `num_parallel_calls` of the dataset.",
    Cause.COMPUTE: "Look for other programs on its host, for throttled cores or clocks, and for "
    "callbacks that only it runs.",
    Cause.NETWORK: "Look at the network of its host.",
}
_BETWEEN = "Look at the network between them."


def describe(straggler: Straggler, name: Callable[[int], str]) -> str:
    """What a straggler does to the others, and where to look, in sentences.

    Args:
        straggler: what was found.
        name: what to call a worker, by rank.
    """
    if straggler.queues:
        return (
            f"{subject(straggler, name)} keep the others waiting: data queues there, and small "
            f"messages take {1e3 * straggler.own:.1f} ms, but {1e3 * straggler.others:.1f} ms the "
            f"other way. {_BETWEEN}"
        )
    usual = f"where the median of the others is {straggler.others / 1e6:.3g} MB/s"
    rates = f"{straggler.own / 1e6:.3g} MB/s while they send, {usual}"
    if straggler.peer is not None:
        return f"{subject(straggler, name)} keep the others waiting: they carry {rates}. {_BETWEEN}"
    if straggler.cause is Cause.NETWORK:
        what = f"its connections to other hosts carry {rates}"
    else:
        kind = "input" if straggler.cause is Cause.INPUT else "computation"
        what = (
            f"its {kind} takes {1e3 * straggler.own:.1f} ms of a step, where the median of the "
            f"others is {1e3 * straggler.others:.1f} ms"
        )
    remedy = _REMEDIES[straggler.cause]
    return f"{subject(straggler, name)} keeps the others waiting: {what}. {remedy}"


def describe_end(straggler: Straggler, name: Callable[[int], str]) -> str:
    """That a straggler is none any more, as a sentence."""
    keep = "keeps" if straggler.peer is None else "keep"
    return f"{subject(straggler, name)} no longer {keep} the others waiting."


def subject(straggler: Straggler, name: Callable[[int], str]) -> str:
    """The worker, or the connections between two of them."""
    if straggler.peer is None:
        return name(straggler.rank)
    return f"The connections from {name(straggler.rank)} to {name(straggler.peer)}"
