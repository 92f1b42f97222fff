"""Private APIs of Keras optimizers, to access their parts and to build them again.

The variables of an optimizer are slots, such as a momentum, which belong to one model variable, and
others, such as the iteration count, which belong to the whole optimizer. A Keras optimizer may wrap
other optimizers, which update the variables: `LossScaleOptimizer` wraps one optimizer, and
`MultiOptimizer` wraps several.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.internals.keras import BaseOptimizer, LossScaleOptimizer, Variable
from tfdist._src.internals.variables import deferred_variables

# The classes of Keras optimizers that wrap other optimizers, and call their `apply`.
_OUTER = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)
)


def scales_losses(optimizer: Any) -> bool:
    """Whether an optimizer scales the loss, and wraps another optimizer."""
    return isinstance(optimizer, LossScaleOptimizer)


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside all loss scalers.

    Returns the optimizer itself if it does not scale the loss.
    """
    while scales_losses(optimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def updating_optimizers(optimizer: Any) -> list[Any]:
    """Returns the optimizers that update variables.

    These are the innermost wrapped optimizers, or the optimizer itself if it wraps no others.
    """
    if not isinstance(optimizer, _OUTER):
        return [optimizer]
    return [one for inner in _nested(optimizer) for one in updating_optimizers(inner)]


def wrappers(optimizer: Any) -> list[Any]:
    """Returns all optimizers that wrap others, starting with `optimizer` itself.

    The list is empty if the optimizer wraps no others.
    """
    if not isinstance(optimizer, _OUTER):
        return []
    return [optimizer, *(one for inner in _nested(optimizer) for one in wrappers(inner))]


def _nested(optimizer: Any) -> list[Any]:
    return [optimizer.inner_optimizer] if scales_losses(optimizer) else list(optimizer.optimizers)


def overrides(optimizer: Any, name: str) -> bool:
    """Whether the class of an optimizer overrides a method of Keras's base class."""
    owner = next(kind for kind in type(optimizer).__mro__ if name in vars(kind))
    return owner is not BaseOptimizer and owner not in _OUTER


def strategy_of(optimizer: Any, default: Any = None) -> Any:
    """Returns the `tf.distribute` strategy under which an optimizer was created.

    Returns `default` if the optimizer has not recorded it.
    """
    return getattr(optimizer, "_distribution_strategy", default)


@contextlib.contextmanager
def under_strategy(optimizer: Any, strategy: Any) -> Iterator[None]:
    """Within this context, an optimizer behaves as if it was created under another strategy."""
    before = optimizer._distribution_strategy
    optimizer._distribution_strategy = strategy
    try:
        yield
    finally:
        optimizer._distribution_strategy = before


def trainable_variables_of(optimizer: Any) -> list[Any]:
    """Returns the model variables for which an optimizer was built."""
    return list(optimizer._trainable_variables)


def variables_written_by(optimizer: Any) -> list[Any]:
    """Returns all variables that `apply` may write, except model variables.

    The variables of wrapped optimizers and the state of codecs are included.
    """
    parts = [*wrappers(optimizer), *updating_optimizers(optimizer)]
    # Keras's optimizers only read the learning rate, and metrics often log it, so it is excluded.
    fixed = [getattr(p, "_learning_rate", None) for p in parts if _is_kerass(p)]
    written = [v for v in optimizer.variables if not any(v is f for f in fixed)]
    for part in updating_optimizers(optimizer):
        state = getattr(part, "compression_state", None)
        written += [] if state is None else list(state.variables)
    return written


def _is_kerass(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("keras.")


def key_of(optimizer: Any, variable: Any) -> Any:
    """Returns the key by which an optimizer identifies a model variable."""
    return optimizer._var_key(variable)


def check_known(optimizer: Any, variables: Any) -> None:
    """Raises a ValueError unless an optimizer was built for these variables."""
    optimizer._check_variables_are_known(variables)


def without_empty(optimizer: Any, grads: Any, variables: Any) -> tuple[list[Any], list[Any]]:
    """Removes variables without a gradient from the lists, and issues Keras's warning."""
    return optimizer._filter_empty_gradients(grads, variables)  # type: ignore[no-any-return]


def update(optimizer: Any, grads: Any, variables: Any) -> None:
    """Applies gradients like `apply`, but does not increment the iteration count."""
    optimizer._backend_apply_gradients(grads, variables)


def averages_of(optimizer: Any) -> list[Any]:
    """Returns the moving averages that an optimizer keeps of the model variables."""
    return list(optimizer._model_variables_moving_average)


def apply_scaled(optimizer: Any, grads: Any, variables: Any) -> None:
    """Unscales and applies the gradients of a scaled loss, if they are finite on this replica."""
    optimizer._common_apply(grads, variables)


def is_overwritten(variable: Any) -> bool:
    """Whether an optimizer overwrites a variable with its gradient, as in float8 layers."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def blank_copy(optimizer: Any, variables: Sequence[Any] | None) -> tuple[Any, list[int | None]]:
    """Creates an optimizer with the same settings, but with variables that have no values.

    Args:
        optimizer: the original optimizer.
        variables: the model variables for which to build the copy. Only their shapes, types and
            paths are used. If None, the copy is not built.

    Returns:
        The copy, and a list with the owner of each of its variables. The owner of a slot is the
        index in `variables` of the model variable to which the slot belongs. The owner is None for
        variables of the whole optimizer.
    """
    inner = inner_optimizer(optimizer)
    # Keras must find custom classes, which the script may not have registered.
    parts = (*wrappers(optimizer), inner, inner._learning_rate)
    makers = [part if inspect.isfunction(part) else type(part) for part in parts]
    named = {maker.__name__: maker for maker in makers}
    with deferred_variables() as made, keras.saving.custom_object_scope(named):
        copy = type(optimizer).from_config(optimizer.get_config())
        copies = (*wrappers(copy), inner_optimizer(copy))
        for part in copies:
            part._distribution_strategy = AnyDeviceStrategy()
            # Otherwise slots that start as copies of model variables would get values.
            part.assign = lambda variable, value: None
        shape_reads: dict[int, int] = {}
        if variables is not None:
            copy.build([_Placeholder(v, n, made, shape_reads) for n, v in enumerate(variables)])
        for part in copies:
            part._distribution_strategy = optimizer._distribution_strategy
    last_read = {id(v): shape_reads.get(i) for i, v in enumerate(made)}
    return copy, [_owner(v.name, last_read[id(v)]) for v in copy.variables]


def numbered(owners: Iterable[int | None]) -> list[tuple[int | None, int]]:
    """Returns a key for each variable of an optimizer.

    The key consists of the variable's owner, as returned by `blank_copy`, and an index among the
    variables of the same owner.

    Args:
        owners: for each variable, its owner. The owner of a slot is the index of a model variable,
            and the owner is None for variables of the whole optimizer.
    """
    seen: Counter[int | None] = Counter()
    keys = []
    for owner in owners:
        keys.append((owner, seen[owner]))
        seen[owner] += 1
    return keys


def forms(variables: Iterable[Any]) -> list[Any]:
    """Returns the shapes and types of variables."""
    return [(tuple(v.shape), v.dtype) for v in variables]


def _owner(name: str, last_read: int | None) -> int | None:
    # Optimizers name a slot after its model variable. In Keras 3.9 and older, some optimizers do
    # not. These read the shape of the model variable just before they create the slot.
    match = re.search(r"tfdist-(\d+)_", name)
    return int(match[1]) if match else last_read


class _Placeholder(Variable):  # type: ignore[misc]
    """Replaces a model variable while slots are created, so that their names contain its index.

    Args:
        variable: the model variable to replace.
        number: the index of the model variable.
        made: the list of slots created so far.
        shape_reads: a dict in which this object records reads of its shape. A key is the number of
            slots created before the read, and the value is the index of the model variable.
    """

    def __init__(
        self, variable: Any, number: int, made: list[Any], shape_reads: dict[int, int]
    ) -> None:
        super().__init__("zeros", tuple(variable.shape), variable.dtype, name="placeholder")
        self._number, self._made, self._shape_reads = number, made, shape_reads
        self._unique_id = f"tfdist-{number}"
        self._name = f"tfdist-{number}_{variable.name}"
        # The optimizer Muon selects variables by path, so the path contains the original one.
        self._path = f"tfdist-{number}/{variable.path}"
        self.overwrite_with_gradient = is_overwritten(variable)

    @property
    def shape(self) -> Any:
        """The variable's shape."""
        if hasattr(self, "_shape_reads"):
            self._shape_reads[len(self._made)] = self._number
        return super().shape

    @property
    def value(self) -> Any:
        """This object itself, because Keras reads attributes of a variable's value."""
        return self

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.zeros(self._shape, self._dtype)


def accumulators(optimizer: Any) -> list[Any]:
    """Returns the variables in which an optimizer accumulates gradients, if any."""
    return list(getattr(optimizer, "_accumulated_gradients", None) or [])


def batches_of(optimizer: Any) -> Any:
    """Returns the variable that counts batches.

    If gradients are accumulated, one iteration of the optimizer consists of several batches.
    """
    return optimizer._iterations


@contextlib.contextmanager
def scaled_learning_rate(optimizer: Any, factor: Callable[[], Any]) -> Iterator[None]:
    """Multiplies the learning rate of an optimizer by a factor within this context.

    The product is used only in updates. All other code that reads, sets or saves the learning rate
    or the schedule sees the original one. If training is interrupted before it leaves this context,
    the context ends when the next one for the same optimizer begins.

    Args:
        optimizer: an optimizer that updates variables.
        factor: a function that returns the factor, a scalar. It is called when an update reads the
            learning rate.
    """
    updates = 0

    def counted(update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal updates
            updates += 1
            try:
                return update(*args, **kwargs)
            finally:
                updates -= 1

        return count

    def learning_rate() -> Any:
        rate = type(optimizer)._get_current_learning_rate(optimizer)
        if not updates:
            return rate
        rate = tf.convert_to_tensor(rate)
        return rate * tf.cast(factor(), rate.dtype)

    _end_scaling(optimizer)
    # The optimizer may already have its own versions of these methods as attributes.
    before = {name: vars(optimizer).get(name) for name in ("apply", "apply_gradients")}
    scaled = {name: counted(getattr(optimizer, name)) for name in before}
    vars(optimizer)[_UNSCALED] = unscaled = before | {"_get_current_learning_rate": None}
    vars(optimizer).update(scaled, _get_current_learning_rate=learning_rate)
    try:
        yield
    finally:
        if vars(optimizer).get(_UNSCALED) is unscaled:
            _end_scaling(optimizer)


_UNSCALED = "_tfdist_unscaled"


def _end_scaling(optimizer: Any) -> None:
    own = vars(optimizer)
    for name, method in own.pop(_UNSCALED, {}).items():
        own.pop(name)
        if method is not None:
            own[name] = method


class AnyDeviceStrategy:
    """A strategy that lets Keras create slots on any device, instead of colocating them."""

    @property
    def extended(self) -> Any:
        return self

    def colocate_vars_with(self, variable: Any) -> Any:
        return contextlib.nullcontext()


# The oldest supported Keras does not have this class.
_MULTI = getattr(keras.optimizers, "MultiOptimizer", ())


def is_multi(optimizer: Any) -> bool:
    """Whether an optimizer is a `MultiOptimizer`, which selects an optimizer for each variable."""
    return isinstance(optimizer, _MULTI)


def has_updated(optimizer: Any) -> bool:
    """Whether the iteration count of an optimizer is positive.

    The updates may also have happened in an earlier run, if the optimizer was restored.
    """
    return bool(int(optimizer._iterations.value) > 0)


def build_again(optimizer: Any, variables: Sequence[Any], unbuilt: Sequence[Any]) -> None:
    """Builds an optimizer again, with new slots for other model variables.

    Variables of the whole optimizer keep their values.

    Args:
        optimizer: an optimizer that updates variables.
        variables: the model variables for which to build the optimizer.
        unbuilt: the variables that the optimizer had before it was built for the first time.
    """
    with _made_anew(optimizer, unbuilt):
        optimizer.build(variables)


def build_multi_again(optimizer: Any, variables: Sequence[Any], unbuilt: Unbuilt) -> None:
    """Builds a `MultiOptimizer` again, like `build_again`.

    Args:
        optimizer: the `MultiOptimizer`.
        variables: the model variables for which to build the optimizer.
        unbuilt: the state of the optimizer before it was built for the first time.
    """
    optimizer._inner_optimizers[:] = unbuilt.inner
    optimizer.built = False
    with contextlib.ExitStack() as made:
        for one, own in unbuilt.variables:
            made.enter_context(_made_anew(one, own))
        optimizer.build(list(variables))


@dataclass
class Unbuilt:
    """The state of an optimizer before it was built for the first time.

    Attributes:
        inner: the wrapped optimizers of a `MultiOptimizer` before it was built, because building
            may add others; empty for any other optimizer.
        variables: pairs of an optimizer and the variables that it had before it was built. For a
            `MultiOptimizer`, there is a pair for each wrapped optimizer that was built together
            with it. For any other optimizer, there is only one pair.
    """

    inner: list[Any] = field(default_factory=list)
    variables: list[tuple[Any, list[Any]]] = field(default_factory=list)


@contextlib.contextmanager
def noting_unbuilt(optimizer: Any) -> Iterator[Unbuilt]:
    """Records the state of an optimizer. Build the optimizer within this context."""
    if not is_multi(optimizer):
        yield Unbuilt(variables=[(optimizer, list(optimizer.variables))])
        return
    noted = Unbuilt(inner=list(optimizer.optimizers))
    choose = optimizer._optimizer_map

    def choose_noted(variable: Any) -> Any:
        one = choose(variable)
        if not one.built and all(one is not other for other, _ in noted.variables):
            noted.variables.append((one, list(one.variables)))
        return one

    # Writing to this dict avoids Keras's tracking.
    vars(optimizer)["_optimizer_map"] = choose_noted
    try:
        yield noted
    finally:
        vars(optimizer)["_optimizer_map"] = choose


@contextlib.contextmanager
def _made_anew(optimizer: Any, unbuilt: Sequence[Any]) -> Iterator[None]:
    """Marks an optimizer as not built, so that it can be built again within this context.

    At the end of the context, variables of the whole optimizer get their previous values.
    """
    single = {name: v for name, v in vars(optimizer).items() if isinstance(v, Variable)}
    tracked, kept = ({id(v) for v in some} for some in (optimizer.variables, unbuilt))
    for variable in optimizer.variables:
        if id(variable) not in kept:
            optimizer._tracker.untrack(variable)
    optimizer._trainable_variables_indices.clear()
    optimizer.built = False
    yield
    for name, old in single.items():
        new = vars(optimizer)[name]
        if new is not old:
            new.assign(old)
            if id(old) not in tracked:  # True for variables that a loss scaler tracks
                optimizer._tracker.untrack(new)
