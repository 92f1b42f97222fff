"""Cuts that a user names by the calls before them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from tfdist.errors import PartitionError
from tfdist.pipeline.partition.graph import Graph


def boundaries_after(graph: Graph, cuts: Sequence[str]) -> list[int]:
    """The boundaries after some calls.

    Args:
        graph: the model.
        cuts: names of calls: a layer's, or an operation's, such as `"block_4"`; in a nested model
            `"encoder/dense"`; of a layer's second call `"dense#2"`. The name of a nested model,
            `"encoder"`, means the last call in it. The stages end with these calls; all calls
            that the model makes after the last one of them are the last stage.

    Returns:
        What `cut` takes, in the order of the calls.

    Raises:
        PartitionError: there is no such call, two names mean the same, or nothing comes after it.
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
                f"`cuts` names the calls with which stages end. Received: {name!r}, which the "
                f"model does not call. Near it are {', '.join(map(repr, near))}."
            )
        if after[name] == len(graph.calls):
            raise PartitionError(
                f"`cuts` names the calls with which stages end but the last. Received: {name!r}, "
                "the last call of the model. Leave it out."
            )
    boundaries = sorted({after[name] for name in cuts})
    if len(boundaries) < len(cuts):
        raise PartitionError(
            f"`cuts` names each place to cut once. Received: {list(cuts)}, of which two mean the "
            "same place. Leave one out."
        )
    return boundaries
