"""Which stages consume the outputs of which, and along which edges gradients flow back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from tfdist._src.pipeline.plan.action import Action, What

Edge: TypeAlias = tuple[int, int]


class Edges:
    """The edges between the stages of a model.

    Args:
        stages: the number of stages.
        edges: pairs (source stage, target stage), the source before the target but not
            necessarily adjacent; by default, each stage feeds the next.
        differentiable: the edges along which gradients flow back; by default, all.

    Raises:
        ValueError: an edge goes backward or to a stage that does not exist.
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
                    f"An edge must go from one of the {stages} stages to a later one. Received: "
                    f"{(source, target)}. Number the stages in the order in which they run."
                )
        for edge in backward:
            if edge not in forward:
                raise ValueError(
                    f"A differentiable edge must be one of the edges. Received: {edge}. Add it to "
                    f"`edges`, or remove it from `differentiable`."
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
        """The stages that consume an action's output."""
        what = action.kind.carries
        return [] if what is None else self._targets[what].get(action.stage, [])

    def sources(self, action: Action) -> list[int]:
        """The stages whose output an action consumes."""
        what = action.kind.carries
        return [] if what is None else self._sources[what].get(action.stage, [])

    def _add(self, what: What, source: int, target: int) -> None:
        self._targets[what][source].append(target)
        self._sources[what][target].append(source)
