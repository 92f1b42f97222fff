"""Keras optimizers' private names: what they hold, and whose slots their variables are."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.internals.keras import BaseOptimizer, LossScaleOptimizer, Variable
from tfdist.internals.variables import deferred_variables

# Those of Keras that have an `apply` of their own, which calls that of other optimizers.
_OUTER = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)
)


def scales_losses(optimizer: Any) -> bool:
    """Whether an optimizer is one that scales losses for another one inside it."""
    return isinstance(optimizer, LossScaleOptimizer)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that updates variables: the one inside of one that scales losses, or itself."""
    return optimizer.inner_optimizer if scales_losses(optimizer) else optimizer


def updating_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that update variables: what is inside of others, however deep, or itself."""
    inner = inner_optimizer(optimizer)
    return list(inner.optimizers) if isinstance(inner, _OUTER) else [inner]


def overrides(optimizer: Any, name: str) -> bool:
    """Whether the class of an optimizer has a method of its own in the place of Keras's."""
    owner = next(kind for kind in type(optimizer).__mro__ if name in vars(kind))
    return owner is not BaseOptimizer and owner not in _OUTER


def strategy_of(optimizer: Any, default: Any = None) -> Any:
    """The `tf.distribute` strategy that an optimizer was made under, if it knows."""
    return getattr(optimizer, "_distribution_strategy", default)


@contextlib.contextmanager
def under_strategy(optimizer: Any, strategy: Any) -> Iterator[None]:
    """While it lasts an optimizer counts as made under another strategy."""
    before = optimizer._distribution_strategy
    optimizer._distribution_strategy = strategy
    try:
        yield
    finally:
        optimizer._distribution_strategy = before


def trainable_variables_of(optimizer: Any) -> list[Any]:
    """What an optimizer was built for."""
    return list(optimizer._trainable_variables)


def key_of(optimizer: Any, variable: Any) -> Any:
    """What an optimizer knows a variable by."""
    return optimizer._var_key(variable)


def check_known(optimizer: Any, variables: Any) -> None:
    """Checks that an optimizer was built for variables; Keras raises ValueError otherwise."""
    optimizer._check_variables_are_known(variables)


def without_empty(optimizer: Any, grads: Any, variables: Any) -> tuple[list[Any], list[Any]]:
    """Gradients and their variables without those that have none; Keras warns of these."""
    return optimizer._filter_empty_gradients(grads, variables)  # type: ignore[no-any-return]


def update(optimizer: Any, grads: Any, variables: Any) -> None:
    """What `apply` does with gradients, but for counting it."""
    optimizer._backend_apply_gradients(grads, variables)


def averages_of(optimizer: Any) -> list[Any]:
    """The moving averages of what an optimizer was built for."""
    return list(optimizer._model_variables_moving_average)


def apply_scaled(optimizer: Any, grads: Any, variables: Any) -> None:
    """Checks whether scaled gradients are finite, on this replica, and applies them if so."""
    optimizer._common_apply(grads, variables)


def is_overwritten(variable: Any) -> bool:
    """Whether a variable is replaced by its gradient, as those of float8 layers are."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


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
    inner = inner_optimizer(optimizer)
    # What the script has made and not registered.
    parts = (optimizer, inner, inner._learning_rate)
    makers = [part if inspect.isfunction(part) else type(part) for part in parts]
    named = {maker.__name__: maker for maker in makers}
    with deferred_variables() as made, keras.saving.custom_object_scope(named):
        copy = type(optimizer).from_config(optimizer.get_config())
        copies = (copy, inner_optimizer(copy))
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
        self.overwrite_with_gradient = is_overwritten(variable)

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
