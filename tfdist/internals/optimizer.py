"""Keras optimizers' private names: which of their variables belong to which of a model's."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals.keras import Variable, deferred_variables


def blank_copy(optimizer: Any, variables: Sequence[Any] | None) -> tuple[Any, list[int | None]]:
    """An optimizer with the same settings, whose variables have no values.

    Args:
        optimizer: the original.
        variables: what the copy is built for, of which it takes no more than shapes, types and
            paths; None leaves it unbuilt.

    Returns:
        The copy, and for each of its variables the number of the one of `variables` whose slot it
        is; None for those of the whole optimizer, such as the number of iterations.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # What the script has made and not registered.
    parts = (optimizer, inner, inner._learning_rate)
    makers = [part if inspect.isfunction(part) else type(part) for part in parts]
    named = {maker.__name__: maker for maker in makers}
    with deferred_variables() as made, keras.saving.custom_object_scope(named):
        copy = type(optimizer).from_config(optimizer.get_config())
        copies = (copy, getattr(copy, "inner_optimizer", copy))
        for part in copies:
            part._distribution_strategy = Anywhere()
            # Slots that begin as copies of the variables stay blank as well.
            part.assign = lambda variable, value: None
        asked: dict[int, int] = {}
        if variables is not None:
            copy.build([_StandIn(v, n, made, asked) for n, v in enumerate(variables)])
        for part in copies:
            part._distribution_strategy = optimizer._distribution_strategy
    after = {id(v): asked.get(i) for i, v in enumerate(made)}
    return copy, [_owner(v.name, after[id(v)]) for v in copy.variables]


def numbered(owners: Iterable[int | None]) -> list[tuple[int | None, int]]:
    """For each of an optimizer's variables whose it is, and the how manieth of those it is."""
    seen: Counter[int | None] = Counter()
    keys = []
    for owner in owners:
        keys.append((owner, seen[owner]))
        seen[owner] += 1
    return keys


def forms(variables: Iterable[Any]) -> list[Any]:
    """The shapes and types of variables."""
    return [(tuple(v.shape), v.dtype) for v in variables]


def _owner(name: str, asked: int | None) -> int | None:
    # Optimizers name a slot after the variable that it belongs to; until Keras 3.9 some did not,
    # but took its shape just before.
    match = re.search(r"tfdist-(\d+)_", name)
    return int(match[1]) if match else asked


class _StandIn(Variable):  # type: ignore[misc]
    """Stands for a variable of the model where slots are made, and tells them its number.

    Args:
        variable: the model's.
        number: its number.
        made: grows with each slot.
        asked: takes for a number of slots the one of the variable whose shape was read last.
    """

    def __init__(self, variable: Any, number: int, made: list[Any], asked: dict[int, int]) -> None:
        super().__init__("zeros", tuple(variable.shape), variable.dtype, name="stand_in")
        self._number, self._made, self._asked = number, made, asked
        self._unique_id = f"tfdist-{number}"
        self._name = f"tfdist-{number}_{variable.name}"
        # Muon chooses by the path.
        self._path = f"tfdist-{number}/{variable.path}"
        self.overwrite_with_gradient = getattr(variable, "overwrite_with_gradient", False)

    @property
    def shape(self) -> Any:
        """The variable's."""
        if hasattr(self, "_asked"):
            self._asked[len(self._made)] = self._number
        return super().shape

    @property
    def value(self) -> Any:
        """Itself, as Keras asks it for its key and its place."""
        return self

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.zeros(self._shape, self._dtype)


def accumulators(optimizer: Any) -> list[Any]:
    """The variables in which an optimizer adds up gradients until it updates, if it does."""
    return list(getattr(optimizer, "_accumulated_gradients", None) or [])


def batches_of(optimizer: Any) -> Any:
    """The variable that counts the batches, of which several may make one of its iterations."""
    return optimizer._iterations


class Anywhere:
    """A strategy under which slots are made without a place beside other variables."""

    @property
    def extended(self) -> Any:
        return self

    def colocate_vars_with(self, variable: Any) -> Any:
        return contextlib.nullcontext()
