"""Determines the shape, dtype and mask of each value that passes between stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.comm.native_ops import TYPES
from tfdist._src.global_view.decision import Value
from tfdist._src.global_view.layout import WHOLE, Dim, Symbol, rows
from tfdist._src.internals.keras import get_keras_mask
from tfdist._src.pipeline.partition.cut import Edge, Partition
from tfdist._src.pipeline.partition.graph import Call, Key
from tfdist.errors import UnsupportedError

# To find out how shapes depend on the number of rows, shapes are inferred for this number of rows.
# It is so large that a dimension close to a multiple of it must depend on the number of rows.
_ROWS = 1_000_003


@dataclass(frozen=True)
class ValueSpec:
    """The spec of a tensor with a number of rows that becomes known at run time.

    Attributes:
        shape: for each dimension, a pair of integers `(size, per_row)`. With n rows, the dimension
            is size + per_row * n.
        dtype: the dtype of the tensor.
    """

    shape: tuple[tuple[int, int], ...]
    dtype: tf.DType

    @property
    def spec(self) -> tf.TensorSpec:
        """The spec as a `tf.TensorSpec`, which leaves the number of rows open."""
        return tf.TensorSpec(
            [None if per_row else size for size, per_row in self.shape], self.dtype
        )

    def shape_for(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the shape for a given number of rows."""
        rows = tf.cast(rows, tf.int64)
        return tf.stack([size + per_row * rows for size, per_row in self.shape])

    def value(self, batch: Symbol) -> Value:
        """Returns the layout and the symbolic dimensions of a tensor with this spec.

        Args:
            batch: the symbol for the number of rows of the batch.
        """
        axes = [axis for axis, (_, per_row) in enumerate(self.shape) if per_row]
        of_rows = len(axes) == 1 and not self.shape[axes[0]][0]
        dims = [Dim(size) for size, _ in self.shape]
        for axis in axes:
            per_row = self.shape[axis][1]
            dims[axis] = Dim(per_row, (batch,)) if of_rows else Dim(1, (Symbol(self, axis),))
        layout = rows(axes[0], inner=Dim(self.shape[axes[0]][1])) if of_rows else WHOLE
        return Value(layout, tuple(dims))


class ValueSpecs:
    """The specs of all values that pass between the stages of a model.

    To determine the specs, the forward pass of the full model is traced with symbolic tensors. This
    does not need the values of the model's variables, so every rank can do it.

    Args:
        partition: the model's partition into stages.

    Raises:
        UnsupportedError: the shape of such a value depends on the data, or the value is neither
            numeric nor boolean.
    """

    def __init__(self, partition: Partition) -> None:
        self._tensors: dict[Key, ValueSpec] = {}
        self._masks: dict[Key, ValueSpec] = {}
        self._made: dict[Key, tf.TensorSpec] = {}
        self._specs = partition.graph.specs
        graph = partition.graph

        def note(call: Call, made: dict[Key, Any]) -> dict[Key, Any]:
            specs = {key: tf.TensorSpec(v.shape, v.dtype, call.name) for key, v in made.items()}
            self._made.update(specs)
            return made

        def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
            values: dict[Key, Any] = dict(zip(graph.inputs, inputs, strict=True))
            with keras.StatelessScope(initialize_variables=False):
                for stage in partition.stages:
                    values.update(stage(values, training=False, after=note))
            crossing = {key for edge in partition.edges for key in edge.keys}
            for key in sorted({*crossing, *graph.inputs, *graph.outputs}):
                self._tensors[key] = _value_spec(values[key], graph.specs[key].shape)
            masked = {key for edge in partition.edges for key in edge.masked}
            masked.update(key for key in graph.outputs if get_keras_mask(values[key]) is not None)
            for key in masked:
                self._masks[key] = _value_spec(get_keras_mask(values[key]))
            return []

        specs = [graph.specs[key].with_rows(_ROWS).form for key in graph.inputs]
        tf.function(forward, autograph=False).get_concrete_function(*specs)
        for key in [key for key, _ in self._tensors.items() if key in graph.inputs]:
            spec = graph.specs[key]
            self._tensors[key] = _value_spec(spec.with_rows(_ROWS).form, spec.shape)
        for edge in partition.edges:
            _check_numeric(edge, self.of_edge(edge))

    def of(self, key: Key) -> ValueSpec:
        """Returns the spec of an input or output of the model, or of a value between stages."""
        return self._tensors[key]

    def anywhere(self, key: Key) -> ValueSpec:
        """Returns the spec of the output of any call, even if it is used only within its stage.

        Raises:
            UnsupportedError: the shape of the value depends on the data.
        """
        return _value_spec(self._made[key], self._specs[key].shape)

    def has_mask(self, key: Key) -> bool:
        """Whether an output of the model, or a value between stages, has a mask."""
        return key in self._masks

    def mask_of(self, key: Key) -> ValueSpec:
        """Returns the spec of a value's mask."""
        return self._masks[key]

    def of_edge(self, edge: Edge) -> list[ValueSpec]:
        """Returns the specs of the values and masks that `partition.pack` returns for an edge."""
        return [*map(self.of, edge.keys), *map(self.mask_of, edge.masked)]


def _value_spec(tensor: Any, known: Sequence[int | None] = ()) -> ValueSpec:
    if tensor.shape.rank is None or None in tensor.shape.as_list():
        raise UnsupportedError(
            f"The shape of {tensor.name!r} depends on the data: {tensor.shape}. Between stages, "
            "all dimensions but the rows must be known. Give the model's inputs fixed shapes, or "
            "cut the model elsewhere with `cuts`."
        )
    sizes = tensor.shape.as_list()
    # `known` comes from Keras's symbolic shapes. They may be wrong if a custom layer has a wrong
    # `compute_output_shape`.
    known = known if len(known) == len(sizes) else [None] * len(sizes)
    dimensions = [_dimension(*each) for each in zip(sizes, known, strict=True)]
    return ValueSpec(tuple(dimensions), tensor.dtype)


def _check_numeric(edge: Edge, specs: Sequence[ValueSpec]) -> None:
    wrong = sorted({spec.dtype.name for spec in specs if spec.dtype not in TYPES})
    if wrong:
        raise UnsupportedError(
            f"A value of type {wrong[0]} cannot cross from stage {edge.source} to stage "
            f"{edge.target}. Cast it to a number or a bool, or cut the model elsewhere with `cuts`."
        )


def _dimension(size: int, known: int | None) -> tuple[int, int]:
    if known == size:
        return size, 0
    per_row = round(size / _ROWS)
    rest = size - per_row * _ROWS
    return (rest, per_row) if abs(rest) < _ROWS // 4 and per_row else (size, 0)
