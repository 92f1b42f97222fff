"""A model as a list of calls: what each takes, makes and does to Keras's masks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist.internals.keras import (
    Functional,
    call_with_training,
    get_keras_mask,
    set_keras_mask,
    standardize_inputs,
)

Key: TypeAlias = int
"""Names a value: the number of a model's input, or of what a call makes, in the model's order.

It follows from the model alone, so it is the same in all processes.
"""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known of a value before there are rows.

    Attributes:
        shape: with None for what is not known, such as the number of rows.
        dtype: Keras's name of the type.
    """

    shape: tuple[int | None, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> Spec:
        """The spec of a tensor, symbolic or not."""
        return cls(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))

    @property
    def is_floating(self) -> bool:
        """Whether the value is of floating-point numbers."""
        return bool(tf.as_dtype(self.dtype).is_floating)

    @property
    def form(self) -> tf.TensorSpec:
        """The same for TensorFlow."""
        return tf.TensorSpec(self.shape, self.dtype)

    def with_rows(self, rows: int | None) -> Spec:
        """The same with so many rows, where their number is what is not known."""
        if self.shape[:1] != (None,):
            return self
        return dataclasses.replace(self, shape=(rows, *self.shape[1:]))


@dataclasses.dataclass(frozen=True)
class Value:
    """Stands for a value among the arguments of a call."""

    key: Key


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of one layer or operation.

    Attributes:
        operation: what is called.
        name: the operation's name, behind those of the nested models that it is in, as in
            `"encoder/dense"`; the second call of a layer is `"encoder/dense#2"`.
        args, kwargs: its arguments, with a `Value` in the place of each tensor.
        inputs: the values among them, each once.
        outputs: what it makes, flat.
        training: what a nested model's call says for all inside it; None where it says nothing.
        masks: Keras's masks after the call, where it may have changed them: on what it made, and
            on its inputs, from which attention takes them away. None is no mask.
        reads: variables of the model that it uses but that are not its layer's own.
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
        """The layer that is called; None for an operation such as `keras.ops.add`."""
        return self.operation if isinstance(self.operation, keras.layers.Layer) else None

    @property
    def variables(self) -> list[keras.Variable]:
        """Each variable that the call uses, once: weights and the states of seeds."""
        own = [] if self.layer is None else self.layer.variables
        return list({id(v): v for v in (*own, *self.reads)}.values())

    def __call__(self, values: Mapping[Key, Any], training: bool | None) -> dict[Key, Any]:
        """Makes the call.

        Args:
            values: its inputs, among others.
            training: as of the model's call.

        Returns:
            Its outputs, none of which is an input: what a layer passes on as it is becomes
            another tensor, so that each keeps its own mask.
        """

        def fill(argument: Any) -> Any:
            return values[argument.key] if isinstance(argument, Value) else argument

        args, kwargs = keras.tree.map_structure(fill, (self.args, dict(self.kwargs)))
        call = call_with_training(self.operation, self.training if training is None else training)
        made = keras.tree.flatten(call(*args, **kwargs))
        taken = {id(values[key]) for key in self.inputs}
        made = [copy(value) if id(value) in taken else value for value in made]
        return dict(zip(self.outputs, made, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A model as calls in the order in which Keras makes them.

    Attributes:
        model: the model.
        calls: the calls; nested models are dissolved into theirs.
        inputs: the model's inputs, flat, in the order in which `keras.tree.flatten` has them.
        outputs: its outputs likewise; one may be there twice, or be an input.
        specs: of each value.
    """

    model: keras.Model
    calls: tuple[Call, ...]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    specs: Mapping[Key, Spec]
    functional: Functional = dataclasses.field(repr=False)

    def unpack_inputs(self, inputs: Any) -> dict[Key, Any]:
        """What a user passes to the model, converted and checked as the model does it, by key."""
        flat = standardize_inputs(self.functional, inputs)
        return dict(zip(self.inputs, flat, strict=True))

    def pack_outputs(self, values: Mapping[Key, Any]) -> Any:
        """The model's outputs in the structure that its call returns."""
        flat = [values[key] for key in self.outputs]
        packed = keras.tree.pack_sequence_as(self.functional.output, flat)
        singleton = isinstance(packed, (list, tuple)) and len(packed) == 1
        return packed[0] if singleton else packed

    def mask_before(self, key: Key, position: int) -> Spec | None:
        """Keras's mask on a value just before a call; None for none.

        Args:
            key: the value.
            position: the number of the call; that of all calls for the end.
        """
        for call in reversed(self.calls[:position]):
            if key in call.masks:
                return call.masks[key]
        return None


def copy(value: Any) -> Any:
    """The same value as another tensor, with a mask of its own."""
    if value is None:
        return None
    other, mask = tf.identity(value), get_keras_mask(value)
    if mask is not None:
        set_keras_mask(other, mask)
    return other


def mask_of(value: Any) -> Spec | None:
    """The spec of the mask on a tensor, symbolic or not."""
    mask = get_keras_mask(value)
    return None if mask is None else Spec.of(mask)


def keys_in(arguments: Any) -> tuple[Key, ...]:
    """The values among arguments, each once, in order."""
    flat: Sequence[Any] = keras.tree.flatten(arguments)
    return tuple(dict.fromkeys(leaf.key for leaf in flat if isinstance(leaf, Value)))
