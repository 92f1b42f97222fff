"""What a loss must know of the whole batch, computed before the microbatches run.

A masked loss is divided by the number of entries that the mask leaves in the batch, one with the
reduction "mean_with_sample_weight" by the sum of the weights; so the first microbatch needs the
masks and the weights of the last. They follow from the inputs and the targets by a few operations:
the loss is traced once behind the whole model, and these are cut out.
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
    """The numbers by which the loss of a whole batch is divided, of this replica's rows.

    Args:
        partition: of the model.
        wires: the forms of its values.
        targets: the forms of targets and sample weights, in their structure.
        compute_loss: of targets, predictions and sample weights.

    Attributes:
        specs: their forms, in the order in which the loss asks for them.

    Raises:
        UnsupportedError: one of them depends on the model's variables.
    """

    def __init__(
        self,
        partition: Partition,
        wires: ValueSpecs,
        targets: Any,
        compute_loss: Callable[[Any, Any, Any], Any],
    ) -> None:
        graph = partition.graph
        found = _Made()

        def forward(*tensors: tf.Tensor) -> Forward:
            given = iter(tensors)
            values: dict[Key, Any] = {key: next(given) for key in graph.inputs}
            y, sample_weight = keras.tree.map_structure(
                lambda form: None if form is None else next(given), targets
            )
            with _Placeholders(), _Rehearsal() as step:
                for stage in partition.stages:
                    values.update(stage(values, training=False, after=found.note))
                compute_loss(y, graph.pack_outputs(values), sample_weight)
            return Forward([], step.asked)

        forms = [leaf for leaf in keras.tree.flatten(targets) if leaf is not None]
        specs = [*(graph.specs[key].form for key in graph.inputs), *forms]
        traced = trace(forward, specs, [False] * len(specs), [], backward=False)
        self.specs = [tf.TensorSpec([], t.dtype) for t in traced.others]
        self._order = [t.name for t in traced.others]
        self._part = cut_before(traced, found.is_shape)
        given = {t.name: i for i, t in enumerate(traced.inputs)}
        self._feeds: list[Callable[[Sequence[tf.Tensor]], tf.Tensor]] = []
        for feed in self._part.feeds:
            if feed.name in given:
                self._feeds.append(operator.itemgetter(given[feed.name]))
            elif found.is_shape(feed.op):
                wire = wires.anywhere(found.key_of(feed.op))
                self._feeds.append(functools.partial(_of_shape, feed, wire))
            else:
                raise UnsupportedError(
                    "In a pipeline, what a loss is divided by must follow from the model's inputs, "
                    "the targets and the sample weights. Received: a mask or a weight that depends "
                    "on a variable of the model. Mask by sample weights instead."
                )
        self._run = make_function(traced, self._part, "totals", {})

    def __call__(self, inputs: Sequence[Any], targets: Any) -> list[tf.Tensor]:
        """Computes them.

        Args:
            inputs: the model's, flat, of this replica's rows.
            targets: targets and sample weights, likewise, in their structure.
        """
        if not self.specs:
            return []
        given = [*inputs, *(leaf for leaf in keras.tree.flatten(targets) if leaf is not None)]
        *made, _ = self._run([feed(given) for feed in self._feeds])
        by_name = dict(zip((t.name for t in self._part.fetches), made, strict=True))
        return [by_name[name] for name in self._order]


class _Rehearsal(MicrobatchStep):
    """The step in which a loss is traced to learn which totals it asks for."""

    def __init__(self) -> None:
        one = tf.constant(1)
        super().__init__(one, one, tf.constant(0))
        self.asked: list[tf.Tensor] = []

    def totals(self, values: list[tf.Tensor]) -> Any:
        self.asked += values
        return values

    def __enter__(self) -> _Rehearsal:
        super().__enter__()
        return self


class _Placeholders(keras.StatelessScope):  # type: ignore[misc]
    """Gives every variable a placeholder for its value."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None:
            value = tf.compat.v1.placeholder(variable.dtype, variable.shape)
            self.add_update((variable, value))
        return value


class _Made:
    """What a model's calls make, found again in the graph where something takes its shape alone.

    A mask may need the shape of a value that depends on variables, but not what is in it.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}

    def note(self, call: Call, made: dict[Key, Any]) -> dict[Key, Any]:
        """Notes what a call has made, each as a tensor of its own."""
        noted = {key: copy(value) for key, value in made.items()}
        self._keys.update((value.name, key) for key, value in noted.items())
        return noted

    def is_shape(self, op: tf.Operation) -> bool:
        """Whether an operation takes nothing but the shape of such a value."""
        return op.type in _OF_SHAPES and self._find(op) is not None

    def key_of(self, op: tf.Operation) -> Key:
        """The value whose shape an operation takes."""
        key = self._find(op)
        assert key is not None
        return key

    def _find(self, op: tf.Operation) -> Key | None:
        tensor = op.inputs[0]
        while tensor.name not in self._keys and tensor.op.type in ("Identity", "Cast"):
            tensor = tensor.op.inputs[0]
        return self._keys.get(tensor.name)


# What they make of a shape and a type.
_OF_SHAPES: dict[str, Callable[[tf.Tensor, tf.DType], tf.Tensor]] = {
    "Shape": tf.cast,
    "OnesLike": tf.ones,
    "ZerosLike": tf.zeros,
}


def _of_shape(made: tf.Tensor, wire: ValueSpec, given: Sequence[tf.Tensor]) -> tf.Tensor:
    return _OF_SHAPES[made.op.type](wire.shape_for(tf.shape(given[0])[0]), made.dtype)
