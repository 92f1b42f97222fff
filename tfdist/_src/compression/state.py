"""The state that codecs keep for an optimizer from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.compression.transport import Kept
from tfdist._src.internals.tensorflow import ResourceVariable

First = Callable[[str, tuple[int, ...]], tf.Tensor]


class State(tf.Module):  # type: ignore[misc]
    """The variables that a worker's codec keeps for an optimizer.

    They differ between workers: with error feedback, they hold what compression has lost so far.
    A `tf.train.Checkpoint` of the optimizer includes them. Attributes of this object, with names
    such as `error`, are dicts from the gradients' and the worker's numbers to float32 variables.

    Args:
        owner: the worker; a checkpoint of a different owner is not read.
    """

    def __init__(self, owner: str = "") -> None:
        super().__init__(name="compression_state")
        self._owner = owner
        self._names: list[str] = []
        self._loaded = _Untracked({})

    def make(
        self, name: str, number: int, shape: tuple[int, ...], first: First, device: str
    ) -> None:
        """Creates a variable, unless one of this shape exists on the device.

        One that exists on another device is moved.

        Args:
            name: the name of the state.
            number: the number of its gradient.
            shape: the variable's shape.
            first: returns its initial value, unless one was loaded.
            device: the variable's device.
        """
        if name not in self._names:
            self._names.append(name)
            setattr(self, name, {})
        variables, key = getattr(self, name), self._key(number)
        existing = variables.get(key)
        if existing is not None and tuple(existing.shape) == shape:
            if existing.device.endswith(device):
                return
            with tf.init_scope():
                loaded = existing.numpy()
        else:
            loaded = self._loaded.value.pop(f"{name}/{number}", None)
        fits = loaded is not None and loaded.shape == shape
        # Not mirrored by a strategy in scope.
        with tf.init_scope(), tf.device(device):
            value = tf.constant(loaded, tf.float32) if fits else first(name, shape)
            variables[key] = ResourceVariable(
                value, trainable=False, name=f"compression_{name}_{number}"
            )

    def move(self, owner: str) -> None:
        """Says which worker this is from now on; the values stay."""
        if owner == self._owner:
            return
        self._owner = owner
        for name in self._names:
            variables = getattr(self, name)
            moved = {self._key(int(key.split()[0])): v for key, v in variables.items()}
            setattr(self, name, moved)

    def of(self, number: int) -> Kept:
        """The variables of a gradient, by name."""
        found = {name: getattr(self, name).get(self._key(number)) for name in self._names}
        return {name: variable for name, variable in found.items() if variable is not None}

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """All values, by name and gradient number, such as `error/0`."""
        return {
            f"{name}/{key.split()[0]}": variable.numpy()
            for name in self._names
            for key, variable in getattr(self, name).items()
        }

    def load(self, values: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Sets variables to the values from `values`, including variables created later."""
        self._loaded.value = dict(values)
        for name in self._names:
            for key, variable in getattr(self, name).items():
                value = self._loaded.value.pop(f"{name}/{key.split()[0]}", None)
                if value is not None and value.shape == tuple(variable.shape):
                    variable.assign(value)

    def _key(self, number: int) -> str:
        return f"{number} on {self._owner}" if self._owner else str(number)


class _Untracked:
    """Excludes a value from checkpoints."""

    def __init__(self, value: dict[str, np.ndarray[Any, Any]]) -> None:
        self.value = value
