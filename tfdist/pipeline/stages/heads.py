"""What follows a stage's calls: nothing, the loss and the metrics, or the predictions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.pipeline.partition.graph import Graph, Key
from tfdist.strategies.step import Step


class MicrobatchStep(Step):
    """A replica's step for one of several microbatches.

    The totals of the full batch are known before the first microbatch, in `known_totals`.

    Args:
        rows: the rows of the microbatch.
        total: the rows of the global batch.
        first_row: the rows of the same microbatch in the replicas before this one.
    """

    knows_all_rows = False

    def __init__(self, rows: tf.Tensor, total: tf.Tensor, first_row: tf.Tensor) -> None:
        super().__init__(rows, total, first_row)
        self.known_totals: Iterator[tf.Tensor] = iter(())

    def totals(self, values: list[tf.Tensor]) -> Any:
        return list(itertools.islice(self.known_totals, len(values)))


class Head:
    """The end of a stage that is not the last one.

    Attributes:
        extra: the specs of its additional inputs for each microbatch.
        has_loss: whether the stage contributes to the loss.
    """

    def __init__(self, *, has_loss: bool) -> None:
        self.has_loss = has_loss
        scalar = tf.TensorSpec([], tf.int32)
        # The rows of the microbatch and of the global batch, and the index of the first row.
        self.extra: list[tf.TensorSpec] = [scalar] * 3

    def step(self, extra: Sequence[tf.Tensor]) -> MicrobatchStep:
        """The step in which the stage's calls run."""
        return MicrobatchStep(*extra[:3])

    def finish(
        self, values: Mapping[Key, Any], extra: Sequence[tf.Tensor]
    ) -> tuple[Any, list[tf.Tensor]]:
        """The stage's contribution to the loss, or None; and any other results.

        Args:
            values: the stage's outputs.
            extra: the additional inputs.
        """
        return None, []


class PredictionHead(Head):
    """The end of the last stage in prediction: the model's outputs.

    Args:
        graph: the model's graph.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(has_loss=False)
        self._graph = graph

    def finish(
        self, values: Mapping[Key, Any], extra: Sequence[tf.Tensor]
    ) -> tuple[Any, list[tf.Tensor]]:
        return None, [values[key] for key in self._graph.outputs]


class LossHead(Head):
    """The end of the last stage in training and evaluation: the loss, and the metrics' updates.

    Args:
        graph: the model's graph.
        totals: the specs of the totals that the loss requests, in order.
        targets: the specs of targets and sample weights, in their structure.
        compute_loss: a function of targets, predictions and sample weights; may return None.
        update_metrics: a function of the same.
    """

    def __init__(
        self,
        graph: Graph,
        totals: Sequence[tf.TensorSpec],
        targets: Any,
        compute_loss: Callable[[Any, Any, Any], Any],
        update_metrics: Callable[[Any, Any, Any], None],
    ) -> None:
        super().__init__(has_loss=True)
        self._graph = graph
        self._totals = len(totals)
        self._targets = targets
        self._compute_loss = compute_loss
        self._update_metrics = update_metrics
        self.extra += totals
        self.extra += [leaf for leaf in keras.tree.flatten(targets) if leaf is not None]
        self._step: MicrobatchStep | None = None

    def step(self, extra: Sequence[tf.Tensor]) -> MicrobatchStep:
        self._step = super().step(extra)
        return self._step

    def finish(
        self, values: Mapping[Key, Any], extra: Sequence[tf.Tensor]
    ) -> tuple[Any, list[tf.Tensor]]:
        assert self._step is not None
        rest = iter(extra[3:])
        self._step.known_totals = iter(list(itertools.islice(rest, self._totals)))
        y, sample_weight = keras.tree.map_structure(
            lambda leaf: None if leaf is None else next(rest), self._targets
        )
        predictions = self._graph.pack_outputs(values)
        loss = self._compute_loss(y, predictions, sample_weight)
        self._update_metrics(y, predictions, sample_weight)
        return loss, []
