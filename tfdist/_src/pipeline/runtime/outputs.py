"""Computes the loss and the metrics of a pipeline's model from its outputs, masks and targets.

The loss and the metrics have the same values as if the whole batch were processed together. If a
computation treats each row independently, it runs separately for each microbatch. A loss may also
need the outputs of all rows, such as the square root of a mean. Then it is computed after the
forward pass of the last microbatch, and all forward passes precede all backward passes. Metrics
that need the outputs of all rows are computed at the end of the step.

If the outputs have masks, the loss is divided by the number of unmasked entries in the batch. So
the loss of the first microbatch depends on the masks of all other microbatches. In most models,
these masks can be computed from the model's inputs by a few of the model's operations, before the
stages run. To find these operations, the full model is traced.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.data.shares import share_of_rows, take_share
from tfdist._src.global_view.layout import ZEROED_SUM, Layout, Symbol
from tfdist._src.global_view.partition import WorkerEmitter
from tfdist._src.global_view.resharding import Communication, RowShare
from tfdist._src.internals.keras import get_keras_mask, set_keras_mask
from tfdist._src.pipeline.partition.cut import Partition
from tfdist._src.pipeline.partition.graph import Call, Key, copy
from tfdist._src.pipeline.stages.output_program import OutputProgram
from tfdist._src.pipeline.stages.split_backward import make_function, results_part
from tfdist._src.pipeline.stages.stage_functions import Tensors
from tfdist._src.pipeline.stages.trace import Forward, trace_forward
from tfdist._src.pipeline.stages.value_specs import ValueSpec, ValueSpecs
from tfdist._src.strategy.step import GlobalStep


class OutputMasks:
    """Computes the masks of a model's outputs from the model's inputs.

    Args:
        partition: the model's partition into stages.
        value_specs: the specs of the model's values.

    Attributes:
        are_known: whether the masks can be computed from the inputs alone, without the values of
            the model's variables.
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
        part = results_part(traced, outputs.is_shape)
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
        """Computes the masks of all outputs that have a mask, without duplicates.

        Args:
            inputs: the model's inputs for this replica's rows, as a flat list.
        """
        if not self._order:
            return []
        *made, _ = self._run([feed(inputs) for feed in self._feeds])
        by_name = dict(zip((t.name for t in self._part.fetches), made, strict=True))
        return [by_name[name] for name in self._order]


class _PlaceholderScope(keras.StatelessScope):  # type: ignore[misc]
    """Replaces the value of every variable with a placeholder."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None:
            value = tf.compat.v1.placeholder(variable.dtype, variable.shape)
            self.add_update((variable, value))
        return value


class _CallOutputs:
    """Records the outputs of a model's calls, and finds operations that use only their shapes.

    A mask may depend on the shape of such an output, but not on its values. Then the mask can be
    computed without the model's variables, even if the output depends on variables.
    """

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}

    def record(self, call: Call, made: dict[Key, Any]) -> dict[Key, Any]:
        """Records the outputs of a call.

        Args:
            call: the call.
            made: the call's outputs, by key.

        Returns:
            Copies of the outputs, so that no two outputs are the same tensor.
        """
        copies = {key: copy(value) for key, value in made.items()}
        self._keys.update((value.name, key) for key, value in copies.items())
        return copies

    def is_shape(self, op: tf.Operation) -> bool:
        """Whether an operation uses a recorded output, and only its shape."""
        return op.type in _SHAPE_OPS and self._find(op) is not None

    def key_of(self, op: tf.Operation) -> Key:
        """Returns the key of the recorded output from which an operation uses the shape."""
        key = self._find(op)
        assert key is not None
        return key

    def _find(self, op: tf.Operation) -> Key | None:
        tensor = op.inputs[0]
        while tensor.name not in self._keys and tensor.op.type in ("Identity", "Cast"):
            tensor = tensor.op.inputs[0]
        return self._keys.get(tensor.name)


# Operations with a result that depends only on the shape of their input. For each of them, a
# function computes the result from the input's shape and the result's dtype.
_SHAPE_OPS: dict[str, Callable[[tf.Tensor, tf.DType], tf.Tensor]] = {
    "Shape": tf.cast,
    "OnesLike": tf.ones,
    "ZerosLike": tf.zeros,
}


def _apply_to_shape(
    made: tf.Tensor, value_spec: ValueSpec, given: Sequence[tf.Tensor]
) -> tf.Tensor:
    return _SHAPE_OPS[made.op.type](value_spec.shape_for(tf.shape(given[0])[0]), made.dtype)


class OutputPrograms:
    """The programs that compute the loss and the metrics, for targets with given specs.

    Args:
        partition: the model's partition into stages.
        value_specs: the specs of the model's values.
        masks: an object that computes the masks of the outputs.
        targets: the specs of the targets and sample weights, as a pair of nested structures.
        compute_loss: a function that returns the loss, given targets, predictions and sample
            weights. It returns None if the model has no compiled loss.
        update_metrics: a function of the same arguments that updates the metrics.
        differentiable: the keys of the values that may have a gradient; empty in evaluation.
        layouts_of_variables: a function that returns the layouts of variables over the workers,
            by the `id` of a variable's resource.
        jit: whether XLA compiles the programs.

    Attributes:
        loss: the program that computes the loss and its gradients; None if there is no loss.
        metrics: the program that updates the metrics.
        gradients: the keys of the outputs with a gradient.
        masked: the keys of the outputs with a mask.
        masks: an object that computes the masks of the outputs.
    """

    def __init__(
        self,
        partition: Partition,
        value_specs: ValueSpecs,
        masks: OutputMasks,
        targets: Any,
        compute_loss: Callable[[Any, Any, Any], Any],
        update_metrics: Callable[[Any, Any, Any], None],
        differentiable: frozenset[Key],
        layouts_of_variables: Callable[[], Mapping[int, Layout]],
        *,
        jit: bool = False,
    ) -> None:
        graph = partition.graph
        self.masks = masks
        self.keys = list(dict.fromkeys(graph.outputs))
        self.masked = [key for key in self.keys if value_specs.has_mask(key)]
        self.value_specs = {key: value_specs.of(key) for key in self.keys}
        self.gradients: list[Key] = []
        symbol = Symbol()
        layouts = {key: spec.value(symbol).layout for key, spec in self.value_specs.items()}
        # For each output, by key: the axis along which the rows are arranged, and the number of
        # elements along this axis for each row of the batch. None if the output cannot be divided
        # into rows.
        self.rows: dict[Key, tuple[int, int] | None] = {
            key: (at.axis, at.inner.value or 1) if at.kind == "rows" else None
            for key, at in layouts.items()
        }
        has_loss = [False]

        def arguments(outputs: list[Any], given_masks: list[Any], leaves: list[Any]) -> Any:
            values = dict(zip(self.keys, outputs, strict=True))
            for key, mask in zip(self.masked, given_masks, strict=True):
                set_keras_mask(values[key], mask)
            rest = iter(leaves)
            y, sample_weight = keras.tree.map_structure(
                lambda leaf: None if leaf is None else next(rest), targets
            )
            return y, graph.pack_outputs(values), sample_weight

        def loss(
            outputs: list[Any], given_masks: list[Any], leaves: list[Any], others: list[Any]
        ) -> list[Any]:
            (scale,) = others
            wanted = [i for i, key in enumerate(self.keys) if key in differentiable]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([outputs[i] for i in wanted])
                value = compute_loss(*arguments(outputs, given_masks, leaves))
                if value is None:
                    return []
                has_loss[0] = True
                scaled = value * tf.cast(scale, value.dtype)
            # If the loss is not reduced to a scalar, Keras computes the gradients of its sum, but
            # reports its mean.
            results = [(tf.reduce_mean(tf.cast(value, tf.float32)), ZEROED_SUM)]
            found = tape.gradient(scaled, [outputs[i] for i in wanted])
            for i, gradient in zip(wanted, found, strict=True):
                if gradient is not None:
                    key = self.keys[i]
                    self.gradients.append(key)
                    at = layouts[key]
                    results.append((gradient, at if at.kind == "rows" else ZEROED_SUM))
            return results

        def metrics(
            outputs: list[Any], given_masks: list[Any], leaves: list[Any], others: list[Any]
        ) -> list[Any]:
            update_metrics(*arguments(outputs, given_masks, leaves))
            return []

        specs = [self.value_specs[key] for key in self.keys]
        of_masks = [value_specs.mask_of(key) for key in self.masked]
        leaves = [leaf for leaf in keras.tree.flatten(targets) if leaf is not None]

        def program(name: str, function: Any, others: list[tf.TensorSpec]) -> OutputProgram:
            return OutputProgram(
                name,
                function,
                specs,
                of_masks,
                leaves,
                others,
                known_masks=masks.are_known,
                layouts_of_variables=layouts_of_variables,
                jit=jit,
            )

        made = program("loss", loss, [tf.TensorSpec([])])
        self.loss = made if has_loss[0] else None
        self.metrics = program("metrics", metrics, [])


class Outputs:
    """The outputs of a step's microbatches, on the rank that holds the last stage.

    Args:
        programs: the programs that compute the loss and the metrics from the outputs; None in
            prediction.
        microbatches: the number of microbatches.
        inputs: the model's inputs for this replica's rows, as a flat list.
        targets: the targets and sample weights for this replica's rows.
        share: the rows of the batch that this replica computes with.
        communication: performs the communication between the replicas.
        scale: the loss scale, by which the loss is multiplied before its gradients are computed.

    Attributes:
        values: the outputs of each microbatch, by the index of the microbatch. The outputs of a
            microbatch are removed when they are no longer needed.
        losses: this rank's contributions to the loss.
    """

    def __init__(
        self,
        programs: OutputPrograms | None,
        microbatches: int,
        inputs: Sequence[Any] = (),
        targets: Any = None,
        share: RowShare | None = None,
        communication: Communication | None = None,
        scale: Any = 1.0,
    ) -> None:
        self.values: dict[int, Tensors] = {}
        self.losses: list[tf.Tensor] = []
        self._programs, self._microbatches = programs, microbatches
        self._gradients: dict[int, Tensors] = {}
        self._is_done = False
        if programs is None:
            return
        assert share is not None
        assert communication is not None
        self._share, self._scale = share, tf.convert_to_tensor(scale)
        self._emitter = WorkerEmitter(share, communication)
        self._leaves = [leaf for leaf in keras.tree.flatten(targets) if leaf is not None]
        masks = programs.masks(inputs) if self._each or self._each_metrics else []
        # The programs of the microbatches share some values that depend on all rows, such as the
        # number of unmasked entries. They are computed here, before the first microbatch.
        if self._each is not None:
            self._early_loss = self._each.compute_early(
                self._emitter, masks, self._leaves, [self._scale]
            )
        if self._each_metrics is not None:
            self._early_metrics = self._each_metrics.compute_early(
                self._emitter, masks, self._leaves, []
            )

    @property
    def _each(self) -> OutputProgram | None:
        """The program of the loss, if it runs separately for each microbatch; otherwise None."""
        loss = None if self._programs is None else self._programs.loss
        return None if loss is None or loss.coupling_line else loss

    @property
    def _each_metrics(self) -> OutputProgram | None:
        """The program of the metrics, if it runs separately for each microbatch; otherwise None."""
        metrics = None if self._programs is None else self._programs.metrics
        return None if metrics is None or metrics.coupling_line else metrics

    def add(self, microbatch: int, values: Tensors) -> list[tf.Tensor]:
        """Adds the outputs of a microbatch, and runs the programs that need no other microbatch.

        Args:
            microbatch: the index of the microbatch.
            values: the model's outputs for the microbatch, by key.

        Returns:
            Tensors that become available when these programs have run.
        """
        self.values[microbatch] = values
        programs, done = self._programs, []
        if programs is None:
            return []
        outputs, masks = self._of_microbatch(microbatch)
        share = self._share_of(microbatch)
        leaves = take_share(self._leaves, microbatch, self._microbatches, self._microbatches)
        if self._each is not None:
            *results, ended = self._each.microbatch(
                share, self._early_loss, outputs, masks, leaves, [self._scale]
            )
            self.losses.append(results[0])
            self._gradients[microbatch] = dict(zip(programs.gradients, results[1:], strict=True))
            done.append(ended)
        if self._each_metrics is not None:
            *_, ended = self._each_metrics.microbatch(
                share, self._early_metrics, outputs, masks, leaves, []
            )
            done.append(ended)
        waits = programs.metrics.coupling_line or (
            programs.loss is not None and programs.loss.coupling_line
        )
        if not waits:
            del self.values[microbatch]
        return done

    def gradients(self, microbatch: int) -> Tensors:
        """Returns the gradients of the loss with respect to a microbatch's outputs."""
        if self._programs is None or self._programs.loss is None:
            return {}
        self._compute_loss()
        return self._gradients[microbatch]

    def finish(self) -> None:
        """Runs the programs that need the outputs of all microbatches."""
        self._compute_loss()
        programs = self._programs
        if programs is not None and programs.metrics.coupling_line:
            outputs, masks = self._of_all()
            programs.metrics.whole(self._emitter, outputs, masks, self._leaves, [])

    def _compute_loss(self) -> None:
        programs = self._programs
        if (
            programs is None
            or programs.loss is None
            or not programs.loss.coupling_line
            or self._is_done
        ):
            return
        self._is_done = True
        outputs, masks = self._of_all()
        loss, *gradients = programs.loss.whole(
            self._emitter, outputs, masks, self._leaves, [self._scale]
        )
        self.losses.append(loss)
        for m in range(self._microbatches):
            parts = {}
            for key, gradient in zip(programs.gradients, gradients, strict=True):
                place = programs.rows[key]
                if place is not None:
                    parts[key] = self._rows_of(gradient, m, *place)
                else:
                    parts[key] = gradient if m == 0 else tf.zeros_like(gradient)
            self._gradients[m] = parts

    def _of_microbatch(self, microbatch: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        assert self._programs is not None
        values = self.values[microbatch]
        outputs = [values[key] for key in self._programs.keys]
        return outputs, [get_keras_mask(values[key]) for key in self._programs.masked]

    def _of_all(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the outputs and masks, each concatenated over all microbatches."""
        programs = self._programs
        assert programs is not None
        outputs = []
        for key in programs.keys:
            parts = [self.values[m][key] for m in range(self._microbatches)]
            place = programs.rows[key]
            outputs.append(parts[0] if place is None else tf.concat(parts, axis=place[0]))
        masks = []
        for key in programs.masked:
            parts = [get_keras_mask(self.values[m][key]) for m in range(self._microbatches)]
            masks.append(tf.concat(parts, axis=0))
        return outputs, masks

    def _rows_of(self, value: tf.Tensor, microbatch: int, axis: int, per_row: int) -> tf.Tensor:
        start, stop = share_of_rows(self._share.rows, microbatch, self._microbatches)
        return value[(*(slice(None),) * axis, slice(start * per_row, stop * per_row))]

    def _share_of(self, microbatch: int) -> RowShare:
        whole = self._share
        start, stop = share_of_rows(whole.rows, microbatch, self._microbatches)
        first = tf.minimum(whole.first + start, whole.total - 1)
        leads = tf.equal(whole.first + start, 0) & whole.has_rows
        is_first = whole.is_first if microbatch == 0 else tf.constant(False)
        return RowShare(stop - start, whole.total, first, whole.has_rows, leads, is_first)
