"""What compressing an optimizer's gradients keeps from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.compression.gradient import Kept
from tfdist.internals.tensorflow import ResourceVariable

First = Callable[[str, tuple[int, ...]], tf.Tensor]


class State(tf.Module):  # type: ignore[misc]
    """The variables that a worker's codec keeps for an optimizer.

    Each worker has its own: for a codec with error feedback, what compression has lost so far. A
    `tf.train.Checkpoint` of the optimizer holds them. By names such as `error`, attributes of this
    object, there are dicts from gradients' numbers, and the worker's, to float32 variables.

    Args:
        owner: whose they are; a checkpoint of another one's is not read.
    """

    def __init__(self, owner: str = "") -> None:
        super().__init__(name="compression_state")
        self._owner = owner
        self._names: list[str] = []
        self._loaded = _Untracked({})

    def make(
        self, name: str, number: int, shape: tuple[int, ...], first: First, device: str
    ) -> None:
        """Makes a variable, unless there is one of this shape already.

        Args:
            name: what it is.
            number: of the gradient that it belongs to.
            shape: of the variable.
            first: gives it its first value, unless one was loaded.
            device: that it is on.
        """
        if name not in self._names:
            self._names.append(name)
            setattr(self, name, {})
        variables, key = getattr(self, name), self._key(number)
        if key in variables and tuple(variables[key].shape) == shape:
            return
        loaded = self._loaded.value.pop(f"{name}/{number}", None)
        fits = loaded is not None and loaded.shape == shape
        # Not mirrored by a strategy in scope.
        with tf.init_scope(), tf.device(device):
            value = tf.constant(loaded, tf.float32) if fits else first(name, shape)
            variables[key] = ResourceVariable(
                value, trainable=False, name=f"compression_{name}_{number}"
            )

    def of(self, number: int) -> Kept:
        """The variables of a gradient, by what they are."""
        found = {name: getattr(self, name).get(self._key(number)) for name in self._names}
        return {name: variable for name, variable in found.items() if variable is not None}

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """All values, by what they are and the gradients' numbers: `error/0`."""
        return {
            f"{name}/{key.split()[0]}": variable.numpy()
            for name in self._names
            for key, variable in getattr(self, name).items()
        }

    def load(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Sets variables to what `values` gave, those too that are made later."""
        self._loaded.value = dict(values)
        for name in self._names:
            for key, variable in getattr(self, name).items():
                value = self._loaded.value.pop(f"{name}/{key.split()[0]}", None)
                if value is not None and value.shape == tuple(variable.shape):
                    variable.assign(value)

    def _key(self, number: int) -> str:
        return f"{number} on {self._owner}" if self._owner else str(number)


class _Untracked:
    """Keeps something out of checkpoints."""

    def __init__(self, value: dict[str, np.ndarray[Any, Any]]) -> None:
        self.value = value
