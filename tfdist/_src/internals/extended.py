"""Public names for the parts of TensorFlow's mirrored strategy engine that tfdist uses."""

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
        """The parts of TensorFlow's class that tfdist uses; the rest is unknown to mypy."""

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
    """Mirrored replicas on devices of this process, without TensorFlow's collectives.

    Args:
        container: the strategy that owns this engine.
        devices: the devices, one replica each.
    """

    def __init__(self, container: tf.distribute.Strategy, devices: Sequence[str]) -> None:
        # Skip the parent's constructor: it reads TF_CONFIG and creates TensorFlow's collectives.
        distribute_lib.StrategyExtendedV1.__init__(self, container)
        logger = tf.get_logger()
        level = logger.level
        logger.setLevel("WARNING")  # The engine would log that this is a MirroredStrategy.
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
        """The global index of the replica on this worker's first device."""
        return int(self._get_replica_id_in_sync_group(0))

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver, stored where TensorFlow's strategies expect it."""
        return self._cluster_resolver

    @cluster_resolver.setter
    def cluster_resolver(self, resolver: Any) -> None:
        self._cluster_resolver = resolver

    def input_workers(self, options: Any) -> Any:
        """The devices that receive distributed data, given a `tf.distribute.InputOptions`."""
        if options is plain_input():
            host = device_util.canonicalize("/device:CPU:0", self._devices[0])
            return InputWorkers([(host, tuple(self._devices))])
        return self._input_workers_with_options(options)


def await_other_replicas() -> None:
    """Pauses the trace of this replica until this process's other replicas make the same call.

    Operations with side effects, such as Python functions, run in the order in which they were
    traced. A collective needs all replicas. So no replica may trace operations after a collective
    while another replica has yet to trace operations before that collective: the two would wait for
    each other when the graph runs. In the branches of a conditional, this function has no effect.
    """
    if getattr(threading.current_thread(), "graph", None) is tf.compat.v1.get_default_graph():
        tf.distribute.get_replica_context().merge_call(lambda _: None)


def on_replica_id(callback: Callable[[Any], None]) -> None:
    """Registers a callback for reads of the number of a replica, `replica_id_in_sync_group`.

    Calling this again has no effect.

    Args:
        callback: receives the strategy.
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
    """The devices of a distributed variable's copies."""
    return tuple(variable._devices)


def copy_here(variable: Any) -> Any:
    """The copy of a distributed variable on the current device, if any, or else the first one."""
    return variable._get_on_device_or_primary()


def first_spec(spec: Any) -> Any:
    """The spec of the first replica's component of a per-replica value."""
    return spec._value_specs[0]


def set_batches(distributed: Any, count: int, *, ends_together: bool) -> None:
    """Sets a distributed dataset's number of batches, and how its end is detected.

    Args:
        distributed: a distributed dataset.
        count: its number of batches, or `tf.data`'s constants for unknown or infinite.
        ends_together: whether all workers have the same number of batches, so that they need not
            agree on the end before each batch.
    """
    distributed._cardinality = count
    distributed._enable_get_next_as_optional = not ends_together


def end_of(spec: Any) -> tuple[bool, bool]:
    """Returns how the end of a distributed dataset or iterator is detected in traced functions.

    Args:
        spec: the `TypeSpec` of the dataset or iterator.

    Returns:
        Whether the dataset has no end, and whether the workers agree on the end before each batch.
    """
    endless = spec._cardinality == tf.data.INFINITE_CARDINALITY
    return endless, bool(spec._enable_get_next_as_optional)
