"""Which stages take the outputs of which, and over which of these edges gradients go back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from tfdist.pipeline.plan.action import Action, What

Edge: TypeAlias = tuple[int, int]


class Edges:
    """The edges between the stages of a model.

    Args:
        stages: the number of stages.
        edges: pairs (source stage, target stage), the source below the target, at any distance;
            by default each stage's output goes to the next one.
        differentiable: those of the edges over which a gradient goes back; by default all.

    Raises:
        ValueError: an edge goes backwards or to a stage that there is not.
    """

    def __init__(
        self,
        stages: int,
        edges: Iterable[Edge] | None = None,
        differentiable: Iterable[Edge] | None = None,
    ) -> None:
        if edges is None:
            edges = [(stage, stage + 1) for stage in range(stages - 1)]
        forward = sorted({(source, target) for source, target in edges})
        backward = forward
        if differentiable is not None:
            backward = sorted({(source, target) for source, target in differentiable})
        for source, target in forward:
            if not 0 <= source < target < stages:
                raise ValueError(
                    f"An edge goes from a stage to a later one, of {stages}. Received: "
                    f"{(source, target)}. Number the stages in the order in which they run."
                )
        for edge in backward:
            if edge not in forward:
                raise ValueError(
                    f"A gradient goes back over one of the edges. Received: {edge}. Add it to "
                    f"`edges`, or take it out of `differentiable`."
                )
        self._targets: dict[What, dict[int, list[int]]] = {
            "activation": defaultdict(list),
            "gradient": defaultdict(list),
        }
        self._sources: dict[What, dict[int, list[int]]] = {
            "activation": defaultdict(list),
            "gradient": defaultdict(list),
        }
        for source, target in forward:
            self._add("activation", source, target)
        for source, target in backward:
            self._add("gradient", target, source)

    def targets(self, action: Action) -> list[int]:
        """The stages that take what an action makes."""
        what = action.kind.carries
        return [] if what is None else self._targets[what].get(action.stage, [])

    def sources(self, action: Action) -> list[int]:
        """The stages whose values an action takes."""
        what = action.kind.carries
        return [] if what is None else self._sources[what].get(action.stage, [])

    def _add(self, what: What, source: int, target: int) -> None:
        self._targets[what][source].append(target)
        self._sources[what][target].append(source)
