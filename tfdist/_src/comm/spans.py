"""Spans of what a step does, recorded by operations of its graph while a timeline asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import marks


class GraphSpan:
    """A span between two places of the graph that is being traced; without effect elsewhere.

    Args:
        after: the tensors that exist where it begins.
    """

    def __init__(self, after: Sequence[Any]) -> None:
        self._begin = None
        if tf.executing_eagerly() or not native.has_ops():
            return
        self._graph = tf.compat.v1.get_default_graph()
        self._before = len(self._graph.get_operations())
        with tf.control_dependencies(self._of_this_graph(after)):
            self._begin = marks.span_begins()

    def end(self, lane: str, name: str, after: Sequence[Any] | None = None) -> None:
        """Adds the end.

        Args:
            lane: the group of spans that it is shown in.
            name: what it is called.
            after: the tensors that exist where it ends; by default it ends when all operations
                that have been added since the beginning, and may write variables, have run.
        """
        # Inside another function, such as a branch of a conditional, there is no end.
        if self._begin is None or tf.compat.v1.get_default_graph() is not self._graph:
            return
        if after is None:
            ends = [op for op in self._graph.get_operations()[self._before :] if _acts(op)]
        else:
            ends = self._of_this_graph(after)
        with tf.control_dependencies(ends):
            marks.span_ends(self._begin, lane, name)

    def _of_this_graph(self, tensors: Sequence[Any]) -> list[Any]:
        return [t for t in tensors if tf.is_tensor(t) and getattr(t, "graph", None) is self._graph]


def _acts(operation: Any) -> bool:
    """Whether an operation writes a variable, or may do so."""
    kind = operation.type
    return "Assign" in kind or kind.startswith("ResourceApply") or kind.endswith(("If", "While"))
