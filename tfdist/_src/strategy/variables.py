"""Variables with a copy on every replica; the copies are equal, or are summed when read."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist._src.comm.communicator_interface import Alone, Communicator
from tfdist._src.internals.extended import copy_here, devices_of
from tfdist._src.internals.tensorflow import (
    CheckpointInitialValue,
    DistributedValues,
    MirroredVariable,
    SyncOnReadVariable,
    default_variable_creator,
    distribute_utils,
)
from tfdist._src.strategy import step
from tfdist.errors import RendezvousError


class _Variable:
    """Adds conversions and a clear error to TensorFlow's two classes of distributed variables."""

    name: str
    read_value: Any
    _get: Any
    _update: Any

    @property
    def handle(self) -> Any:
        """The resource handle of the calling replica's copy.

        Raises:
            ValueError: the caller is not a replica.
        """
        try:
            return super().handle  # type: ignore[misc]
        except ValueError as error:
            raise ValueError(
                f"The variable {self.name!r} has a copy on each replica, so a custom step that "
                "differentiates or updates it must run inside `strategy.run`. Received: use "
                "outside of it. Call `strategy.run(step, args=(batch,))` with batches from "
                "`strategy.experimental_distribute_dataset`, or `model.fit`."
            ) from error

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Reads elements, as `tf.Variable.gather_nd` does."""
        return self._get().gather_nd(indices, name)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Reads rows, as `tf.Variable.sparse_read` does."""
        return self._get().sparse_read(indices, name)

    def batch_scatter_update(
        self, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Sets elements, as `tf.Variable.batch_scatter_update` does."""
        return self._update(lambda copy, delta: copy.batch_scatter_update(delta), sparse_delta)

    def __int__(self) -> int:
        return int(self.read_value().numpy())

    def __float__(self) -> float:
        return float(self.read_value().numpy())


def _on_copies(method: str) -> Any:
    """Returns a method that calls the named method of `tf.Variable` on each copy."""

    def apply(variable: Any, updates: Any, *, indices: Any) -> Any:
        return getattr(variable, method)(indices, updates)

    def update(self: Any, indices: Any, updates: Any, name: str | None = None) -> Any:
        return self._update(apply, updates, indices=indices)

    return update


for _kind in ("add", "sub", "update", "max", "min"):
    setattr(_Variable, f"scatter_nd_{_kind}", _on_copies(f"scatter_nd_{_kind}"))


# Maps `id()`s to variables that code outside of replicas has assigned since `take_assigned`.
_assigned: dict[int, weakref.ref[Any]] = {}
_assignments = 0


def assignments() -> int:
    """Returns how often variables have been assigned outside of replicas so far."""
    return _assignments


def take_assigned(strategy: Any) -> list[Any]:
    """Returns the variables that code outside of replicas has assigned since the last call.

    Args:
        strategy: the strategy that created the variables.
    """
    variables = [reference() for reference in _assigned.values()]
    mine = [v for v in variables if v is not None and v.distribute_strategy is strategy]
    for variable in mine:
        del _assigned[id(variable)]
    return mine


class ReplicatedMirroredVariable(_Variable, MirroredVariable):  # type: ignore[misc]
    """A mirrored variable that can be assigned inside `tf.cond`.

    A replica's assignment to a variable without aggregation changes that replica's copy only, as in
    TensorFlow. With ONLY_FIRST_REPLICA each replica uses its local value, since replicas run the
    same program.
    """

    def _update_cross_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            global _assignments
            _assignments += 1
            _assigned[id(self)] = weakref.ref(self)
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        is_own = self.aggregation in (
            tf.VariableAggregation.NONE,
            tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        if is_own or step.in_global_step():
            return update_fn(copy_here(self), value, **kwargs)
        return super()._update_replica(update_fn, value, **kwargs)


class SummedVariable(_Variable, SyncOnReadVariable):  # type: ignore[misc]
    """A variable that each replica changes separately; the value of the variable is the sum.

    The totals of metrics are such variables. Reading the value is a collective that all workers
    must join. A step of `fit` sums the metrics anyway and stores the total here, so that a single
    worker can read the total.
    """

    _total: tf.Tensor | None = None
    _changed_elsewhere = False

    def know_total(self, total: tf.Tensor) -> None:
        """Stores the sum until the variable changes."""
        self._total = None if self._changed_elsewhere else total

    def forget_total(self) -> None:
        """Discards the stored sum, since a replica's copy was assigned."""
        self._total = None

    def _get_cross_replica(self) -> Any:
        if self._total is not None and tf.executing_eagerly():
            return self._total
        return super()._get_cross_replica()

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if step.current_step() is None:
            # A user-defined `tf.function` may change the variable each time it runs, without
            # calling this method again.
            self._changed_elsewhere = True
        self._total = None
        return super()._update_replica(update_fn, value, **kwargs)

    def __array__(self, dtype: Any = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        self._total = None
        if not _outside_of_replicas() or self.aggregation != tf.VariableAggregation.SUM:
            return super().assign(value, *args, **kwargs)
        # The first replica gets the full value, since dividing it among replicas may be inexact.
        full = tf.convert_to_tensor(value, self.dtype)
        extended: step.PlacedExtended = self.distribute_strategy.extended
        first = extended.worker_rank == 0
        for i, copy in enumerate(self.values):
            with tf.device(copy.device):
                copy.assign(full if first and i == 0 else tf.zeros_like(full))
        return self


def _outside_of_replicas() -> bool:
    return tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()


VARIABLE_CLASSES = {
    tf.VariableSynchronization.ON_WRITE: ReplicatedMirroredVariable,
    tf.VariableSynchronization.ON_READ: SummedVariable,
}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Makes this thread create plain variables, even inside the strategy's scope.

    A single worker can then save a model, for example, without waiting for the other workers.
    """
    outer = step.this_thread.creates_local_variables
    step.this_thread.creates_local_variables = True
    try:
        yield
    finally:
        step.this_thread.creates_local_variables = outer


def is_alone() -> bool:
    """Whether this thread is inside the context of `alone`."""
    return step.this_thread.creates_local_variables


class Engine(Protocol):
    """The members of a strategy's engine that are needed to create variables."""

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """This worker's devices, one replica each."""

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that owns the engine."""

    @property
    def workers(self) -> Communicator:
        """The communicator with one participant per worker."""

    def agree_on_variable(self, description: str) -> None:
        """Checks that all workers create the same variable."""


def create_variable(extended: Engine, next_creator: Any, kwargs: dict[str, Any]) -> Any:
    """Creates a variable with a copy on each device; all copies get the chief's initial value.

    While a function is traced, the variable is lifted out of the function's graph, as with
    `tf.init_scope`, so that variables persist if a model creates them in its first step.

    Args:
        extended: the engine of the strategy.
        next_creator: a function that creates the variable for one copy.
        kwargs: the arguments of `tf.Variable`.
    """
    if is_alone():
        return next_creator(**{**kwargs, "distribute_strategy": None})
    if tf.executing_eagerly():
        return _create_mirrored(extended, next_creator, kwargs)
    kwargs["initial_value"] = _without_graph(kwargs.get("initial_value"))
    if tf.is_symbolic_tensor(kwargs["initial_value"]):
        return _create_mirrored(extended, next_creator, kwargs)
    with tf.init_scope():
        return _create_mirrored(extended, default_variable_creator, kwargs)


def _without_graph(initial_value: Any) -> Any:
    """Makes an initial value independent of the graph that computes it, if it is constant."""
    if not tf.is_symbolic_tensor(initial_value):
        return initial_value
    constant = tf.get_static_value(initial_value)
    return initial_value if constant is None else lambda: tf.constant(constant, initial_value.dtype)


def _create_mirrored(extended: Engine, next_creator: Any, kwargs: dict[str, Any]) -> Any:
    colocate_with = kwargs.pop("colocate_with", None)
    if isinstance(colocate_with, DistributedValues):
        devices = devices_of(colocate_with)
    elif isinstance(colocate_with, (tuple, list)):
        devices = tuple(colocate_with)
    elif colocate_with is None:
        devices = extended.worker_devices
    else:
        with tf.device(colocate_with.device):
            return next_creator(**kwargs)

    summed = (
        kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        and kwargs.get("aggregation") == tf.VariableAggregation.SUM
    )

    def create_copies(**kwargs: Any) -> list[Any]:
        copies: list[Any] = []
        for i, device in enumerate(devices):
            with tf.device(device):
                if copies:
                    first = copies[0]
                    copy = tf.zeros_like if summed else tf.identity
                    kwargs["initial_value"] = lambda first=first, copy=copy: copy(first.value())
                    # The trailing slash makes the name absolute.
                    kwargs["name"] = f"{first.name.split(':')[0]}/replica_{i}/"
                else:
                    kwargs["initial_value"] = _first_value(extended, summed, kwargs)
                copies.append(next_creator(**kwargs))
        return copies

    return distribute_utils.create_mirrored_variable(
        extended.strategy,
        create_copies,
        VARIABLE_CLASSES,
        distribute_utils.VARIABLE_POLICY_MAPPING,
        **kwargs,
    )


def _first_value(extended: Engine, summed: bool, kwargs: dict[str, Any]) -> Any:
    given = kwargs["initial_value"]
    workers = extended.workers
    if isinstance(workers, Alone) or given is None:
        return given
    name, dtype = kwargs.get("name") or "Variable", kwargs.get("dtype")

    def chiefs_value() -> tf.Tensor:
        value = given() if callable(given) else given
        if isinstance(value, CheckpointInitialValue):
            value = value.wrapped_value
        value = tf.convert_to_tensor(value, dtype=dtype)
        with _naming(name):
            extended.agree_on_variable(f"{name} {value.dtype.name}{value.shape}")
        if summed and workers.rank > 0:
            return tf.zeros_like(value)  # Only the chief's copy gets the initial value of the sum.
        if summed or not value.shape.num_elements():
            return value
        return workers.broadcast(value)

    return chiefs_value


@contextlib.contextmanager
def _naming(variable: str) -> Iterator[None]:
    try:
        yield
    except RendezvousError as error:
        raise RendezvousError(
            f"The variable {variable!r} was created inside `strategy.scope()`, but not on all "
            f"workers: {error} Create models and optimizers on all workers, or create those of a "
            "single worker outside the scope."
        ) from error
