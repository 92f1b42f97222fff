"""Access to the parts of TensorFlow's engine for mirrored strategies that tfdist uses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.distribute import device_util
from tensorflow.python.distribute.input_lib import InputWorkers

from tfdist._src.internals.datasets import plain_input
from tfdist._src.internals.tensorflow import distribute_lib

if TYPE_CHECKING:

    class MirroredExtended:
        """Declares the parts of TensorFlow's class that tfdist uses, for mypy."""

        experimental_enable_get_next_as_optional: bool
        _devices: tuple[str, ...]
        _use_var_policy: bool
        _communication_options: Any
        _cluster_resolver: Any

        @property
        def worker_devices(self) -> tuple[str, ...]: ...
        @property
        def _num_replicas_in_sync(self) -> int: ...
        def _container_strategy(self) -> tf.distribute.Strategy: ...
        def _initialize_single_worker(self, devices: Sequence[str]) -> None: ...
        def _get_replica_id_in_sync_group(self, replica_id: int) -> int: ...
        def _input_workers_with_options(self, options: Any) -> Any: ...
        def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any: ...
        def _replica_ctx_update(
            self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool
        ) -> Any: ...

else:
    from tfdist._src.internals.tensorflow import MirroredExtended


class LocalExtended(MirroredExtended):
    """The engine of a strategy with a replica on each of several devices of this process.

    Unlike TensorFlow's class, it does not create TensorFlow's collectives.

    Args:
        container: the strategy that owns this engine.
        devices: the devices, one for each replica.
    """

    def __init__(self, container: tf.distribute.Strategy, devices: Sequence[str]) -> None:
        # Do not call the parent's constructor, because it reads TF_CONFIG and creates TensorFlow's
        # collectives.
        distribute_lib.StrategyExtendedV1.__init__(self, container)
        logger = tf.get_logger()
        level = logger.level
        logger.setLevel("WARNING")  # Otherwise the engine would log that it is a MirroredStrategy.
        try:
            self._initialize_single_worker(list(devices))
        finally:
            logger.setLevel(level)
        self._communication_options = tf.distribute.experimental.CommunicationOptions()
        self._use_var_policy = False
        self.experimental_enable_get_next_as_optional = True

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that owns this engine."""
        return self._container_strategy()

    @property
    def replica_count(self) -> int:
        """The number of replicas on all workers."""
        return int(self._num_replicas_in_sync)

    @property
    def first_replica(self) -> int:
        """The index of this worker's first replica among the replicas of all workers."""
        return int(self._get_replica_id_in_sync_group(0))

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver, in the attribute in which TensorFlow's strategies look for it."""
        return self._cluster_resolver

    @cluster_resolver.setter
    def cluster_resolver(self, resolver: Any) -> None:
        self._cluster_resolver = resolver

    def input_workers(self, options: Any) -> Any:
        """Returns the devices that receive the elements of a distributed dataset.

        Args:
            options: a `tf.distribute.InputOptions` or None.
        """
        if options is plain_input():
            host = device_util.canonicalize("/device:CPU:0", self._devices[0])
            return InputWorkers([(host, tuple(self._devices))])
        return self._input_workers_with_options(options)


def await_other_replicas() -> None:
    """Pauses the tracing of this replica until all replicas of this process have called this.

    Operations with side effects, such as Python functions, run in the order in which the replicas
    have traced them. Suppose that one replica traces a collective and then a Python function,
    before another replica traces a Python function and then the same collective. When the graph
    runs, the second function must wait for the first one, which must wait for the collective. The
    collective must wait for the second function, so this is a deadlock. Call this function before
    the collective to avoid it.

    In the branches of a conditional, this function has no effect.
    """
    if getattr(threading.current_thread(), "graph", None) is tf.compat.v1.get_default_graph():
        tf.distribute.get_replica_context().merge_call(lambda _: None)


def on_replica_id(callback: Callable[[Any], None]) -> None:
    """Registers a callback that is called when code reads `replica_id_in_sync_group`.

    Only the first call of this function has an effect.

    Args:
        callback: a function that receives the strategy of the replica.
    """
    asked = distribute_lib.ReplicaContextBase.replica_id_in_sync_group
    if getattr(asked.fget, "calls_back", False):
        return

    def replica_id(self: Any) -> Any:
        callback(self.strategy)
        return asked.fget(self)

    replica_id.calls_back = True  # type: ignore[attr-defined]
    found = property(replica_id, doc=asked.__doc__)
    distribute_lib.ReplicaContextBase.replica_id_in_sync_group = found


def devices_of(variable: Any) -> tuple[str, ...]:
    """Returns the devices of the copies of a distributed variable."""
    return tuple(variable._devices)


def copy_here(variable: Any) -> Any:
    """Returns the copy of a distributed variable on the current device.

    If the current device has no copy, returns the first copy.
    """
    return variable._get_on_device_or_primary()


def first_spec(spec: Any) -> Any:
    """Returns the part of a per-replica spec that describes the value of the first replica."""
    return spec._value_specs[0]


def set_batches(distributed: Any, count: int, *, ends_together: bool) -> None:
    """Sets the number of batches of a distributed dataset, and how its end is detected.

    Args:
        distributed: a distributed dataset.
        count: the number of batches, or one of `tf.data.UNKNOWN_CARDINALITY` and
            `tf.data.INFINITE_CARDINALITY`.
        ends_together: whether all workers have the same number of batches. If not, the workers
            check together before each batch whether the data has ended.
    """
    distributed._cardinality = count
    distributed._enable_get_next_as_optional = not ends_together


def end_of(spec: Any) -> tuple[bool, bool]:
    """Returns how the end of a distributed dataset or iterator is detected in a `tf.function`.

    Args:
        spec: the `tf.TypeSpec` of the dataset or iterator.

    Returns:
        Whether the dataset is infinite, and whether the workers check together before each batch
        whether the data has ended.
    """
    endless = spec._cardinality == tf.data.INFINITE_CARDINALITY
    return endless, bool(spec._enable_get_next_as_optional)
