"""A summary of a model's stages."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist._src.pipeline.partition.cut import Partition, Stage, unique
from tfdist._src.pipeline.partition.profiler import bytes_of, count

_TITLES = ("stage", "calls", "share of cost", "parameters", "sends to later stages")


def summary(
    partition: Partition, seconds: Sequence[float] | None = None, rows: int = 1
) -> list[str]:
    """A table of the stages.

    Args:
        partition: the stages.
        seconds: the time of each call, if known.
        rows: the rows of a microbatch, for the bytes.

    Returns:
        The lines: a header, then one per stage with its first and last call, its share of the
        cost, its parameters, and the bytes that it sends to later stages per microbatch.
    """
    table = [_TITLES]
    for stage in partition.stages:
        table.append(
            (
                str(stage.index),
                _calls(stage),
                _share(partition, stage, seconds),
                f"{_parameters(stage):,}",
                f"{_sent(partition, stage, rows) / 1e6:.3f} MB",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]


def _calls(stage: Stage) -> str:
    first, last = stage.calls[0].name, stage.calls[-1].name
    return first if len(stage.calls) == 1 else f"{first} ... {last}"


def _share(partition: Partition, stage: Stage, seconds: Sequence[float] | None) -> str:
    if seconds is None or not sum(seconds):
        return "-"
    begin = (0, *partition.boundaries)[stage.index]
    return f"{sum(seconds[begin : begin + len(stage.calls)]) / sum(seconds):.1%}"


def _parameters(stage: Stage) -> int:
    weights = (w for layer in stage.layers for w in layer.weights)
    return count(unique((*weights, *(v for call in stage.calls for v in call.reads))))


def _sent(partition: Partition, stage: Stage, rows: int) -> int:
    graph = partition.graph
    keys = [key for edge in partition.edges if edge.source == stage.index for key in edge.keys]
    return sum(bytes_of(graph.specs[key], rows) for key in keys)
