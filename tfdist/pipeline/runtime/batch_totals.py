"""The totals over the whole batch that a loss needs, computed before the microbatches run.

A masked loss is divided by the number of unmasked entries in the batch, one with the reduction
"mean_with_sample_weight" by the sum of the weights, so the first microbatch needs the masks and
weights of the last. A few operations compute these totals from the inputs and targets: the loss is
traced once behind the full model, and those operations are cut out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.partition.graph import Call, Key, copy
from tfdist.pipeline.stages.heads import MicrobatchStep
from tfdist.pipeline.stages.split_backward import cut_before
from tfdist.pipeline.stages.subgraph import make_function
from tfdist.pipeline.stages.trace import Forward, trace
from tfdist.pipeline.stages.value_specs import ValueSpec, ValueSpecs


class BatchTotals:
    """This replica's terms of the denominators in the loss of a whole batch.

    Args:
        partition: the model's partition.
        value_specs: the specs of the model's values.
        targets: the specs of targets and sample weights, in their structure.
        compute_loss: computes the loss from targets, predictions and sample weights.

    Attributes:
        specs: the specs of the totals, in the order in which the loss requests them.

    Raises:
        UnsupportedError: a total depends on the model's variables.
    """

    def __init__(
        self,
        partition: Partition,
        value_specs: ValueSpecs,
        targets: Any,
        compute_loss: Callable[[Any, Any, Any], Any],
    ) -> None:
        graph = partition.graph
        outputs = _CallOutputs()

        def forward(*tensors: tf.Tensor) -> Forward:
            given = iter(tensors)
            values: dict[Key, Any] = {key: next(given) for key in graph.inputs}
            y, sample_weight = keras.tree.map_structure(
                lambda spec: None if spec is None else next(given), targets
            )
            with _PlaceholderScope(), _TracingStep() as step:
                for stage in partition.stages:
                    values.update(stage(values, training=False, after=outputs.record))
                compute_loss(y, graph.pack_outputs(values), sample_weight)
            return Forward([], step.requested)

        target_specs = [leaf for leaf in keras.tree.flatten(targets) if leaf is not None]
        specs = [*(graph.specs[key].form for key in graph.inputs), *target_specs]
        traced = trace(forward, specs, [False] * len(specs), [], backward=False)
        self.specs = [tf.TensorSpec([], t.dtype) for t in traced.others]
        self._order = [t.name for t in traced.others]
        self._part = cut_before(traced, outputs.is_shape)
        given = {t.name: i for i, t in enumerate(traced.inputs)}
        self._feeds: list[Callable[[Sequence[tf.Tensor]], tf.Tensor]] = []
        for feed in self._part.feeds:
            if feed.name in given:
                self._feeds.append(operator.itemgetter(given[feed.name]))
            elif outputs.is_shape(feed.op):
                value_spec = value_specs.anywhere(outputs.key_of(feed.op))
                self._feeds.append(functools.partial(_apply_to_shape, feed, value_spec))
            else:
                raise UnsupportedError(
                    "In a pipeline, the denominator of a loss must depend only on the model's "
                    "inputs, the targets and the sample weights. Received: a mask or a weight that "
                    "depends on a variable of the model. Mask with sample weights instead."
                )
        self._run = make_function(traced, self._part, "totals", {})

    def __call__(self, inputs: Sequence[Any], targets: Any) -> list[tf.Tensor]:
        """Computes the totals.

        Args:
            inputs: the model's inputs for this replica's rows, flat.
            targets: targets and sample weights of the same rows, in their structure.
        """
        if not self.specs:
            return []
        given = [*inputs, *(leaf for leaf in keras.tree.flatten(targets) if leaf is not None)]
        *made, _ = self._run([feed(given) for feed in self._feeds])
        by_name = dict(zip((t.name for t in self._part.fetches), made, strict=True))
        return [by_name[name] for name in self._order]


class _TracingStep(MicrobatchStep):
    """The step in which a loss is traced to record the totals that it requests."""

    def __init__(self) -> None:
        one = tf.constant(1)
        super().__init__(one, one, tf.constant(0))
        self.requested: list[tf.Tensor] = []

    def totals(self, values: list[tf.Tensor]) -> Any:
        self.requested += values
        return values

    def __enter__(self) -> _TracingStep:
        super().__enter__()
        return self


class _PlaceholderScope(keras.StatelessScope):  # type: ignore[misc]
    """Substitutes a placeholder for the value of every variable."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None:
            value = tf.compat.v1.placeholder(variable.dtype, variable.shape)
            self.add_update((variable, value))
        return value


class _CallOutputs:
    """The outputs of a model's calls, recognized in the graph where only their shape is used.

    A mask may need the shape of a value that depends on variables, but not its contents.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}

    def record(self, call: Call, made: dict[Key, Any]) -> dict[Key, Any]:
        """Records the outputs of a call; returns a separate tensor for each."""
        copies = {key: copy(value) for key, value in made.items()}
        self._keys.update((value.name, key) for key, value in copies.items())
        return copies

    def is_shape(self, op: tf.Operation) -> bool:
        """Whether an operation uses only the shape of a recorded value."""
        return op.type in _SHAPE_OPS and self._find(op) is not None

    def key_of(self, op: tf.Operation) -> Key:
        """The value whose shape an operation uses."""
        key = self._find(op)
        assert key is not None
        return key

    def _find(self, op: tf.Operation) -> Key | None:
        tensor = op.inputs[0]
        while tensor.name not in self._keys and tensor.op.type in ("Identity", "Cast"):
            tensor = tensor.op.inputs[0]
        return self._keys.get(tensor.name)


# Operations that depend only on the shape of their input, as functions of shape and dtype.
_SHAPE_OPS: dict[str, Callable[[tf.Tensor, tf.DType], tf.Tensor]] = {
    "Shape": tf.cast,
    "OnesLike": tf.ones,
    "ZerosLike": tf.zeros,
}


def _apply_to_shape(
    made: tf.Tensor, value_spec: ValueSpec, given: Sequence[tf.Tensor]
) -> tf.Tensor:
    return _SHAPE_OPS[made.op.type](value_spec.shape_for(tf.shape(given[0])[0]), made.dtype)
