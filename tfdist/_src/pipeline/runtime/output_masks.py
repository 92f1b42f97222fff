"""The masks of a model's outputs for all rows, computed before the microbatches run.

A masked loss is divided by the number of unmasked entries in the batch, so the first microbatch
needs the masks of the last. A few operations compute them from the inputs: the full model is
traced, and those operations are cut out.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.internals.keras import get_keras_mask
from tfdist._src.pipeline.partition.cut import Partition
from tfdist._src.pipeline.partition.graph import Call, Key, copy
from tfdist._src.pipeline.stages.split_backward import cut_before
from tfdist._src.pipeline.stages.subgraph import make_function
from tfdist._src.pipeline.stages.trace import Forward, trace_forward
from tfdist._src.pipeline.stages.value_specs import ValueSpec, ValueSpecs
from tfdist._src.strategy.step import GlobalStep


class OutputMasks:
    """The masks of a model's outputs, from its inputs.

    Args:
        partition: the model's partition.
        value_specs: the specs of the model's values.

    Attributes:
        are_known: whether the inputs alone determine the masks, and not the model's variables.
    """

    def __init__(self, partition: Partition, value_specs: ValueSpecs) -> None:
        graph = partition.graph
        masked = [key for key in dict.fromkeys(graph.outputs) if value_specs.has_mask(key)]
        outputs = _CallOutputs()
        self.are_known = True
        self._feeds: list[Callable[[Sequence[tf.Tensor]], tf.Tensor]] = []
        self._order: list[str] = []
        if not masked:
            return

        def forward(*tensors: tf.Tensor) -> Forward:
            values: dict[Key, Any] = dict(zip(graph.inputs, tensors, strict=True))
            with _PlaceholderScope(), GlobalStep():
                for stage in partition.stages:
                    values.update(stage(values, training=False, after=outputs.record))
            return Forward([], [tf.identity(get_keras_mask(values[key])) for key in masked])

        specs = [graph.specs[key].form for key in graph.inputs]
        traced = trace_forward(forward, specs)
        part = cut_before(traced, outputs.is_shape)
        given = {t.name: i for i, t in enumerate(traced.inputs)}
        for feed in part.feeds:
            if feed.name in given:
                self._feeds.append(operator.itemgetter(given[feed.name]))
            elif outputs.is_shape(feed.op):
                value_spec = value_specs.anywhere(outputs.key_of(feed.op))
                self._feeds.append(functools.partial(_apply_to_shape, feed, value_spec))
            else:
                self.are_known = False
                return
        self._part = part
        self._order = [t.name for t in traced.others]
        self._run = make_function(traced, part, "masks", {})

    def __call__(self, inputs: Sequence[Any]) -> list[tf.Tensor]:
        """Computes the masks of the outputs that have one, each once.

        Args:
            inputs: the model's inputs for this replica's rows, flat.
        """
        if not self._order:
            return []
        *made, _ = self._run([feed(inputs) for feed in self._feeds])
        by_name = dict(zip((t.name for t in self._part.fetches), made, strict=True))
        return [by_name[name] for name in self._order]


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
