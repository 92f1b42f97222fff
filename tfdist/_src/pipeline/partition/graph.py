"""A model as a list of calls, with their inputs, outputs and effects on Keras masks."""

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
    """The static shape and type of a value.

    Attributes:
        shape: with None for unknown dimensions, such as the number of rows.
        dtype: Keras's name of the type.
    """

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> Spec:
        """Makes the spec of a tensor, symbolic or not."""
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
        """Returns the spec with this number of rows, if it was unknown."""
        if self.shape[:1] != (None,):
            return self
        return dataclasses.replace(self, shape=(rows, *self.shape[1:]))


@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A placeholder for a value among the arguments of a call."""

    key: Key


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer or operation.

    Attributes:
        operation: the operation that is called.
        name: the operation's name, prefixed by the nested models that contain it, as in
            `"encoder/dense"`; the second call of a layer is `"encoder/dense#2"`.
        args, kwargs: the call's arguments, with a `Placeholder` in place of each tensor.
        inputs: the values among the arguments, each once.
        outputs: the call's outputs, flattened.
        training: the `training` argument of the enclosing nested model; None if not given.
        masks: the Keras masks on the outputs and inputs after the call, if the call may have
            changed them; attention layers remove the masks of their inputs. None means no mask.
        reads: the model's variables that the call uses but its layer does not own.
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
        """The called layer; None for an operation such as `keras.ops.add`."""
        return self.operation if isinstance(self.operation, keras.layers.Layer) else None

    @property
    def variables(self) -> list[keras.Variable]:
        """Each variable that the call uses, once: weights and seed states."""
        owned = [] if self.layer is None else self.layer.variables
        return list({id(v): v for v in (*owned, *self.reads)}.values())

    def __call__(self, values: Mapping[Key, Any], training: bool | None) -> dict[Key, Any]:
        """Runs the call.

        Args:
            values: the call's inputs, among other values.
            training: as for the model's call.

        Returns:
            The call's outputs. No output is the same tensor as an input: a tensor that a layer
            returns unchanged is copied, so that input and output have separate masks.
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
    """A model as calls, in Keras's execution order.

    Attributes:
        model: the model.
        calls: the calls; nested models are inlined.
        inputs: the model's inputs, in the order of `keras.tree.flatten`.
        outputs: the model's outputs, in the same order; an output may occur twice, or be an input.
        specs: the spec of each value.
        functional: Keras's graph of the model, for the structure of its inputs and outputs.
    """

    model: keras.Model
    calls: tuple[Call, ...]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    specs: Mapping[Key, Spec]
    functional: Functional = dataclasses.field(repr=False)

    def unpack_inputs(self, inputs: Any) -> dict[Key, Any]:
        """Returns the user's inputs by key, converted and checked as by the model."""
        flat = standardize_inputs(self.functional, inputs)
        return dict(zip(self.inputs, flat, strict=True))

    def pack_outputs(self, values: Mapping[Key, Any]) -> Any:
        """Packs the model's outputs into the structure that its call returns."""
        flat = [values[key] for key in self.outputs]
        packed = keras.tree.pack_sequence_as(self.functional.output, flat)
        singleton = isinstance(packed, (list, tuple)) and len(packed) == 1
        return packed[0] if singleton else packed

    def mask_before(self, key: Key, position: int) -> Spec | None:
        """Returns the Keras mask on a value just before a call; None for no mask.

        Args:
            key: the value.
            position: the index of the call; the number of calls means the end.
        """
        for call in reversed(self.calls[:position]):
            if key in call.masks:
                return call.masks[key]
        return None


def copy(value: Any) -> Any:
    """Copies a tensor with its mask, so that the mask of either tensor can be removed alone."""
    if value is None:
        return None
    result, mask = tf.identity(value), get_keras_mask(value)
    if mask is not None:
        set_keras_mask(result, mask)
    return result


def mask_of(value: Any) -> Spec | None:
    """Returns the spec of the Keras mask on a tensor, symbolic or not; None for no mask."""
    mask = get_keras_mask(value)
    return None if mask is None else Spec.of(mask)


def keys_in(arguments: Any) -> tuple[Key, ...]:
    """Returns the keys of the values among arguments, each once, in order."""
    flat: Sequence[Any] = keras.tree.flatten(arguments)
    return tuple(dict.fromkeys(leaf.key for leaf in flat if isinstance(leaf, Placeholder)))
