"""Cuts given by the names of the calls before them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from tfdist._src.pipeline.partition.graph import Graph
from tfdist.errors import PartitionError


def boundaries_after(graph: Graph, cuts: Sequence[str]) -> list[int]:
    """The boundaries after the named calls.

    Args:
        graph: the model.
        cuts: names of calls: of a layer or operation, such as `"block_4"`; in a nested model,
            `"encoder/dense"`; for a layer's second call, `"dense#2"`. The name of a nested model,
            `"encoder"`, means its last call. Stages end with these calls; all calls after the last
            of them form the last stage.

    Returns:
        The boundaries for `cut`, in the order of the calls.

    Raises:
        PartitionError: a call does not exist or is the last one, or two names mean the same call.
    """
    after: dict[str, int] = {}
    for number, call in enumerate(graph.calls):
        after[call.name] = number + 1
        parts = call.name.split("/")
        for depth in range(1, len(parts)):
            after["/".join(parts[:depth])] = number + 1
    for name in cuts:
        if name not in after:
            near = difflib.get_close_matches(name, after, n=3, cutoff=0.4) or list(after)[:3]
            raise PartitionError(
                f"`cuts` must name calls of the model, after which to cut. Received: {name!r}, "
                f"which is not one. Similar names are {', '.join(map(repr, near))}."
            )
        if after[name] == len(graph.calls):
            raise PartitionError(
                f"`cuts` must name the last call of every stage but the last. Received: {name!r}, "
                "the last call of the model. Remove it."
            )
    boundaries = sorted({after[name] for name in cuts})
    if len(boundaries) < len(cuts):
        raise PartitionError(
            f"`cuts` must name each cut once. Received: {list(cuts)}, of which two mean the same "
            "cut. Remove one."
        )
    return boundaries
