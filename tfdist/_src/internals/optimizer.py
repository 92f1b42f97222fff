"""Private APIs of Keras optimizers: access to their parts, and rebuilding an optimizer."""

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

# Keras optimizers with an `apply` that calls the `apply` of other optimizers.
_OUTER = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)
)


def scales_losses(optimizer: Any) -> bool:
    """Whether an optimizer is a loss scaler around another optimizer."""
    return isinstance(optimizer, LossScaleOptimizer)


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that updates variables: the one inside all loss scalers, or itself."""
    while scales_losses(optimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def updating_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers that update variables: the innermost ones in this optimizer, or itself."""
    if not isinstance(optimizer, _OUTER):
        return [optimizer]
    return [one for inner in _nested(optimizer) for one in updating_optimizers(inner)]


def wrappers(optimizer: Any) -> list[Any]:
    """The optimizers that wrap the updating ones, outermost first."""
    if not isinstance(optimizer, _OUTER):
        return []
    return [optimizer, *(one for inner in _nested(optimizer) for one in wrappers(inner))]


def _nested(optimizer: Any) -> list[Any]:
    return [optimizer.inner_optimizer] if scales_losses(optimizer) else list(optimizer.optimizers)


def overrides(optimizer: Any, name: str) -> bool:
    """Whether an optimizer's class overrides one of Keras's methods."""
    owner = next(kind for kind in type(optimizer).__mro__ if name in vars(kind))
    return owner is not BaseOptimizer and owner not in _OUTER


def strategy_of(optimizer: Any, default: Any = None) -> Any:
    """The `tf.distribute` strategy that an optimizer was created under, if recorded."""
    return getattr(optimizer, "_distribution_strategy", default)


@contextlib.contextmanager
def under_strategy(optimizer: Any, strategy: Any) -> Iterator[None]:
    """Temporarily treats an optimizer as created under another strategy."""
    before = optimizer._distribution_strategy
    optimizer._distribution_strategy = strategy
    try:
        yield
    finally:
        optimizer._distribution_strategy = before


def trainable_variables_of(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def variables_written_by(optimizer: Any) -> list[Any]:
    """The variables that an optimizer's `apply` may write, including those of nested optimizers."""
    parts = [*wrappers(optimizer), *updating_optimizers(optimizer)]
    # Metrics often log the learning rate, which Keras's optimizers only read.
    fixed = [getattr(p, "_learning_rate", None) for p in parts if _is_kerass(p)]
    written = [v for v in optimizer.variables if not any(v is f for f in fixed)]
    for part in updating_optimizers(optimizer):
        state = getattr(part, "compression_state", None)
        written += [] if state is None else list(state.variables)
    return written


def _is_kerass(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("keras.")


def key_of(optimizer: Any, variable: Any) -> Any:
    """The key under which an optimizer stores a variable."""
    return optimizer._var_key(variable)


def check_known(optimizer: Any, variables: Any) -> None:
    """Checks that an optimizer was built for these variables; otherwise raises ValueError."""
    optimizer._check_variables_are_known(variables)


def without_empty(optimizer: Any, grads: Any, variables: Any) -> tuple[list[Any], list[Any]]:
    """Drops the variables that have no gradient, with Keras's warning."""
    return optimizer._filter_empty_gradients(grads, variables)  # type: ignore[no-any-return]


def update(optimizer: Any, grads: Any, variables: Any) -> None:
    """Applies gradients as `apply` does, without counting an iteration."""
    optimizer._backend_apply_gradients(grads, variables)


def averages_of(optimizer: Any) -> list[Any]:
    """The moving averages of the variables that an optimizer was built for."""
    return list(optimizer._model_variables_moving_average)


def apply_scaled(optimizer: Any, grads: Any, variables: Any) -> None:
    """Applies scaled gradients if they are finite on this replica."""
    optimizer._common_apply(grads, variables)


def is_overwritten(variable: Any) -> bool:
    """Whether a variable is overwritten with its gradient, as in float8 layers."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def blank_copy(optimizer: Any, variables: Sequence[Any] | None) -> tuple[Any, list[int | None]]:
    """Returns an optimizer with the same settings, and with variables that have no values.

    Args:
        optimizer: the original.
        variables: the variables to build the copy for; only their shapes, types and paths are used.
            If None, the copy is not built.

    Returns:
        The copy, and an index for each of its variables. For a slot, this is the index in
        `variables` of the variable to which the slot belongs; for a variable of the whole
        optimizer, such as the iteration count, it is None.
    """
    inner = inner_optimizer(optimizer)
    # Pass custom classes that the script may not have registered.
    parts = (*wrappers(optimizer), inner, inner._learning_rate)
    makers = [part if inspect.isfunction(part) else type(part) for part in parts]
    named = {maker.__name__: maker for maker in makers}
    with deferred_variables() as made, keras.saving.custom_object_scope(named):
        copy = type(optimizer).from_config(optimizer.get_config())
        copies = (*wrappers(copy), inner_optimizer(copy))
        for part in copies:
            part._distribution_strategy = AnyDeviceStrategy()
            # Slots that are initialized as copies of variables also stay without values.
            part.assign = lambda variable, value: None
        shape_reads: dict[int, int] = {}
        if variables is not None:
            copy.build([_Placeholder(v, n, made, shape_reads) for n, v in enumerate(variables)])
        for part in copies:
            part._distribution_strategy = optimizer._distribution_strategy
    last_read = {id(v): shape_reads.get(i) for i, v in enumerate(made)}
    return copy, [_owner(v.name, last_read[id(v)]) for v in copy.variables]


def numbered(owners: Iterable[int | None]) -> list[tuple[int | None, int]]:
    """Returns the keys of an optimizer's variables: the owner, and an index among its variables.

    Args:
        owners: for a slot, the number of the model variable to which it belongs; for a variable of
            the whole optimizer, None.
    """
    seen: Counter[int | None] = Counter()
    keys = []
    for owner in owners:
        keys.append((owner, seen[owner]))
        seen[owner] += 1
    return keys


def forms(variables: Iterable[Any]) -> list[Any]:
    """The shapes and types of variables."""
    return [(tuple(v.shape), v.dtype) for v in variables]


def _owner(name: str, last_read: int | None) -> int | None:
    # Optimizers name a slot after its model variable. Up to Keras 3.9 some did not, but read the
    # variable's shape just before they created the slot.
    match = re.search(r"tfdist-(\d+)_", name)
    return int(match[1]) if match else last_read


class _Placeholder(Variable):  # type: ignore[misc]
    """Replaces a model variable while slots are created, and labels them with its number.

    Args:
        variable: the model variable.
        number: its number.
        made: the slots created so far.
        shape_reads: maps the number of slots created so far to the number of the variable that has
            last had its shape read.
    """

    def __init__(
        self, variable: Any, number: int, made: list[Any], shape_reads: dict[int, int]
    ) -> None:
        super().__init__("zeros", tuple(variable.shape), variable.dtype, name="placeholder")
        self._number, self._made, self._shape_reads = number, made, shape_reads
        self._unique_id = f"tfdist-{number}"
        self._name = f"tfdist-{number}_{variable.name}"
        # Muon selects variables by path.
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
        """This object; Keras reads its key and its device."""
        return self

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        return tf.zeros(self._shape, self._dtype)


def accumulators(optimizer: Any) -> list[Any]:
    """The gradient accumulators of an optimizer, if it has any."""
    return list(getattr(optimizer, "_accumulated_gradients", None) or [])


def batches_of(optimizer: Any) -> Any:
    """The variable that counts batches; one iteration may take several batches."""
    return optimizer._iterations


@contextlib.contextmanager
def scaled_learning_rate(optimizer: Any, factor: Callable[[], Any]) -> Iterator[None]:
    """Within this context, an optimizer updates with its learning rate times a factor.

    Only its updates see the product: the learning rate or schedule stays unchanged for other code
    that reads, sets or saves it. If training was interrupted and has not left an earlier context of
    this optimizer, that context ends when the next one begins.

    Args:
        optimizer: an optimizer that updates variables.
        factor: returns the factor, a scalar; called when an update reads the learning rate.
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
    # The instance may already override the methods of its class.
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
    """A strategy under which slots are not colocated with other variables."""

    @property
    def extended(self) -> Any:
        return self

    def colocate_vars_with(self, variable: Any) -> Any:
        return contextlib.nullcontext()


_MULTI = getattr(keras.optimizers, "MultiOptimizer", ())  # Not in the oldest Keras.


def is_multi(optimizer: Any) -> bool:
    """Whether an optimizer delegates each variable to another one."""
    return isinstance(optimizer, _MULTI)


def has_updated(optimizer: Any) -> bool:
    """Whether an optimizer has counted an update, possibly before it was restored."""
    return bool(int(optimizer._iterations.value) > 0)


def build_again(optimizer: Any, variables: Sequence[Any], unbuilt: Sequence[Any]) -> None:
    """Builds an optimizer again, with new slots; its other variables keep their values.

    Args:
        optimizer: an optimizer that updates variables.
        variables: the variables to build it for.
        unbuilt: the variables that it had before it was first built.
    """
    with _made_anew(optimizer, unbuilt):
        optimizer.build(variables)


def build_multi_again(optimizer: Any, variables: Sequence[Any], unbuilt: Unbuilt) -> None:
    """Like `build_again`, for an optimizer that delegates each variable to another one.

    Args:
        optimizer: an optimizer that satisfies `is_multi`.
        variables: the variables to build it for.
        unbuilt: its state before it was first built.
    """
    optimizer._inner_optimizers[:] = unbuilt.inner
    optimizer.built = False
    with contextlib.ExitStack() as made:
        for one, own in unbuilt.variables:
            made.enter_context(_made_anew(one, own))
        optimizer.build(list(variables))


@dataclass
class Unbuilt:
    """The state of an optimizer before it is built.

    Attributes:
        inner: the optimizers that it delegates variables to; building may add others.
        variables: the optimizer itself or, if it delegates, the optimizers that are built together
            with it; each with the variables that it had before.
    """

    inner: list[Any] = field(default_factory=list)
    variables: list[tuple[Any, list[Any]]] = field(default_factory=list)


@contextlib.contextmanager
def noting_unbuilt(optimizer: Any) -> Iterator[Unbuilt]:
    """Records the state of an optimizer before it is built within this context."""
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

    vars(optimizer)["_optimizer_map"] = choose_noted  # Set without Keras's tracking.
    try:
        yield noted
    finally:
        vars(optimizer)["_optimizer_map"] = choose


@contextlib.contextmanager
def _made_anew(optimizer: Any, unbuilt: Sequence[Any]) -> Iterator[None]:
    """Marks an optimizer as unbuilt, to be built again within this context."""
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
            if id(old) not in tracked:  # inside an optimizer that scales the loss
                optimizer._tracker.untrack(new)
