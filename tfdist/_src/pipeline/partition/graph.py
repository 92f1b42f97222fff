"""Represents a model as a list of calls, each with its inputs, outputs and effects on masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist._src.internals.keras import (
    Functional,
    call_with_training,
    get_keras_mask,
    set_keras_mask,
    standardize_inputs,
)

Key: TypeAlias = int
"""Identifies a value: the index of a model input or of a call's output, in the model's order.

It depends on the model only, so it is the same in all processes.
"""


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static shape and dtype of a value.

    Attributes:
        shape: the shape, with None for dimensions that are not known in advance, such as the
            number of rows.
        dtype: the dtype as a Keras name, such as `"float32"`.
    """

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> Spec:
        """Makes the spec of a tensor, which may be symbolic."""
        return cls(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))

    @property
    def is_floating(self) -> bool:
        """Whether the value is floating-point."""
        return bool(tf.as_dtype(self.dtype).is_floating)

    @property
    def form(self) -> tf.TensorSpec:
        """The spec as a `tf.TensorSpec`."""
        return tf.TensorSpec(self.shape, self.dtype)

    def with_rows(self, rows: int | None) -> Spec:
        """Returns the spec with a given number of rows, unless the spec already fixes the number.

        Args:
            rows: the number of rows; None if it is not known.
        """
        if self.shape[:1] != (None,):
            return self
        return dataclasses.replace(self, shape=(rows, *self.shape[1:]))


@dataclasses.dataclass(frozen=True)
class Placeholder:
    """Stands for a value in the arguments of a `Call`."""

    key: Key


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer or operation.

    Attributes:
        operation: the layer or operation that is called.
        name: the name of the operation, prefixed with the names of the nested models that contain
            it, as in `"encoder/dense"`. The second call of the same layer is named
            `"encoder/dense#2"`.
        args: the positional arguments of the call, with a `Placeholder` in place of each tensor.
        kwargs: the keyword arguments of the call, with a `Placeholder` in place of each tensor.
        inputs: the keys of the tensors among the arguments, without duplicates.
        outputs: the keys of the call's outputs, as a flat tuple.
        training: the `training` argument that was passed to the nested model that contains the
            call; None if it was not passed.
        masks: the specs of the Keras masks of the inputs and outputs after the call, by key. A
            value without a mask has the spec None. The mapping is empty if the call cannot
            have changed any mask. A call may also change the masks of its inputs: attention layers
            remove them.
        reads: the variables of the model that the call uses although its layer does not own them.
    """

    operation: keras.Operation
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    training: bool | None = None
    masks: Mapping[Key, Spec | None] = dataclasses.field(default_factory=dict)
    reads: tuple[keras.Variable, ...] = ()

    @property
    def layer(self) -> keras.layers.Layer | None:
        """The layer that is called, or None for an operation such as `keras.ops.add`."""
        return self.operation if isinstance(self.operation, keras.layers.Layer) else None

    @property
    def variables(self) -> list[keras.Variable]:
        """The weights and seed states that the call uses, without duplicates."""
        owned = [] if self.layer is None else self.layer.variables
        return list({id(v): v for v in (*owned, *self.reads)}.values())

    def __call__(self, values: Mapping[Key, Any], training: bool | None) -> dict[Key, Any]:
        """Runs the call.

        Args:
            values: tensors by key, for at least the keys in the call's `inputs`.
            training: the `training` argument of the model's call.

        Returns:
            The call's outputs by key. If the layer returns an input unchanged, the output is a
            copy of the input, so that the input and the output have separate masks.
        """

        def fill(argument: Any) -> Any:
            return values[argument.key] if isinstance(argument, Placeholder) else argument

        args, kwargs = keras.tree.map_structure(fill, (self.args, dict(self.kwargs)))
        call = call_with_training(self.operation, self.training if training is None else training)
        outputs = keras.tree.flatten(call(*args, **kwargs))
        taken = {id(values[key]) for key in self.inputs}
        outputs = [copy(value) if id(value) in taken else value for value in outputs]
        return dict(zip(self.outputs, outputs, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The calls of a model, in the order in which Keras runs them.

    Attributes:
        model: the model.
        calls: the calls. A nested model is replaced by its own calls.
        inputs: the keys of the model's inputs, in the order of `keras.tree.flatten`.
        outputs: the keys of the model's outputs, in the order of `keras.tree.flatten`. The same
            key may occur twice, and an output may also be an input of the model.
        specs: the spec of each value, by key.
        functional: Keras's graph of the model. It defines the structure in which the model takes
            its inputs and returns its outputs.
    """

    model: keras.Model
    calls: tuple[Call, ...]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    specs: Mapping[Key, Spec]
    functional: Functional = dataclasses.field(repr=False)

    def unpack_inputs(self, inputs: Any) -> dict[Key, Any]:
        """Flattens the inputs that a user passes to the model, and returns them by key.

        The inputs are converted and checked as in a call of the model.
        """
        flat = standardize_inputs(self.functional, inputs)
        return dict(zip(self.inputs, flat, strict=True))

    def pack_outputs(self, values: Mapping[Key, Any]) -> Any:
        """Packs the model's outputs into the structure that a call of the model returns."""
        flat = [values[key] for key in self.outputs]
        packed = keras.tree.pack_sequence_as(self.functional.output, flat)
        singleton = isinstance(packed, (list, tuple)) and len(packed) == 1
        return packed[0] if singleton else packed

    def mask_before(self, key: Key, position: int) -> Spec | None:
        """Returns the spec of a value's Keras mask just before a call, or None without a mask.

        Args:
            key: the key of the value.
            position: the index of the call. If it equals the number of calls, the result is the
                mask after the last call.
        """
        for call in reversed(self.calls[:position]):
            if key in call.masks:
                return call.masks[key]
        return None


def copy(value: Any) -> Any:
    """Copies a tensor and its mask, so that a layer can remove one mask and keep the other."""
    if value is None:
        return None
    result, mask = tf.identity(value), get_keras_mask(value)
    if mask is not None:
        set_keras_mask(result, mask)
    return result


def mask_of(value: Any) -> Spec | None:
    """Returns the spec of a tensor's Keras mask, or None if the tensor has no mask."""
    mask = get_keras_mask(value)
    return None if mask is None else Spec.of(mask)


def keys_in(arguments: Any) -> tuple[Key, ...]:
    """Returns the keys of the placeholders in nested arguments, in order, without duplicates."""
    flat: Sequence[Any] = keras.tree.flatten(arguments)
    return tuple(dict.fromkeys(leaf.key for leaf in flat if isinstance(leaf, Placeholder)))
