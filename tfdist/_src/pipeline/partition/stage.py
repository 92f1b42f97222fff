"""One stage of a pipeline: consecutive calls of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras

from tfdist._src.internals.keras import get_keras_mask, own_losses
from tfdist._src.pipeline.partition.graph import Call, Graph, Key, copy

After: TypeAlias = Callable[[Call, dict[Key, Any]], dict[Key, Any]]


class Stage:
    """Consecutive calls of a model, run as one.

    Args:
        graph: the model's graph.
        index: the stage's index, from 0.
        calls: its calls.
        inputs: the values that it consumes, in order of their keys: model inputs, and outputs of
            earlier stages.
        outputs: the values that it returns: those that later stages consume, and model outputs.
            The last stage returns all model outputs, including those of earlier stages.
        owned: the variables whose regularizers it applies.

    Attributes:
        index, calls, inputs, outputs: as above.
        layers: the layers that it calls, each once, in order.
        steps: the values computed by the last run's calls, kept for as long as a trace needs them.
    """

    def __init__(
        self,
        graph: Graph,
        index: int,
        calls: Sequence[Call],
        inputs: Sequence[Key],
        outputs: Sequence[Key],
        owned: Sequence[keras.Variable],
    ) -> None:
        self.index = index
        self.calls = tuple(calls)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        layers = {id(call.layer): call.layer for call in calls if call.layer is not None}
        self.layers: tuple[keras.layers.Layer, ...] = tuple(layers.values())
        self.steps: list[Any] = []
        self._owned = {id(v) for v in owned}
        self._body = _Body(self._run, self.layers, f"stage_{index}", graph.model.dtype_policy)

    def __repr__(self) -> str:
        return f"<Stage {self.index}: {self.calls[0].name} to {self.calls[-1].name}>"

    @property
    def variables(self) -> list[keras.Variable]:
        """Each variable that the stage uses, once: weights, and states such as those of seeds."""
        return unique(v for call in self.calls for v in call.variables)

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """Those of `variables` that are trained, by the current state of the layers."""
        layers = unique(v for layer in self.layers for v in layer.trainable_variables)
        read = (v for call in self.calls for v in call.reads if v.trainable)
        return unique((*layers, *read))

    def __call__(
        self, values: Mapping[Key, Any], training: bool | None = None, after: After | None = None
    ) -> dict[Key, Any]:
        """Runs the stage, in eager mode or inside a trace.

        Args:
            values: at least the stage's `inputs`. Tensors carry Keras masks as in a model; neither
                they nor their masks are modified.
            training: as for the model's call.
            after: called with each call and its outputs; returns the outputs to use instead.

        Returns:
            The stage's `outputs`, with their masks.
        """
        # Attention removes the masks from its inputs.
        inputs = {
            key: values[key] if get_keras_mask(values[key]) is None else copy(values[key])
            for key in self.inputs
        }
        outputs: dict[Key, Any] = self._body(inputs, training=training, after=after)
        return outputs

    def losses(self) -> list[Any]:
        """The losses of the latest call, besides the compiled one.

        They are those of `add_loss` and of activity regularizers in the stage's layers, and of the
        regularizers of the variables that the stage owns. Over all stages, they are the model's
        `losses`, each once.
        """
        regularized = [
            v for v in self.trainable_variables if v.regularizer and id(v) in self._owned
        ]
        return own_losses(self.layers) + [v.regularizer(v) for v in regularized]

    def _run(
        self, values: dict[Key, Any], training: bool | None, after: After | None
    ) -> dict[Key, Any]:
        values = dict(values)
        for call in self.calls:
            outputs = call(values, training)
            values.update(outputs if after is None else after(call, outputs))
        self.steps = [value for key, value in values.items() if key not in self.inputs]
        return {key: values[key] for key in self.outputs}


class _Body(keras.layers.Layer):  # type: ignore[misc]
    """Wraps the calls as the model does.

    It provides Keras's call context and mixed-precision types, and the layers whose losses Keras
    clears when a call begins.
    """

    def __init__(
        self,
        run: Callable[[dict[Key, Any], bool | None, After | None], dict[Key, Any]],
        layers: Sequence[keras.layers.Layer],
        name: str,
        dtype: Any,
    ) -> None:
        # Inputs are not cast: the model itself converts no values between its calls.
        super().__init__(name=name, dtype=dtype, autocast=False)
        self.supports_masking = True
        self.run = run
        self.tracked = list(layers)
        self.built = True

    def call(
        self, values: dict[Key, Any], training: bool | None = None, after: After | None = None
    ) -> dict[Key, Any]:
        """Runs the calls."""
        return self.run(values, training, after)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Masks pass from inputs to outputs only through the calls."""


def unique(variables: Any) -> list[Any]:
    """The distinct variables, in order."""
    return list({id(v): v for v in variables}.values())
