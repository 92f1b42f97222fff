"""TensorFlow's engine of mirrored strategies: what tfdist reads of it, by public names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals.tensorflow import MirroredExtended, distribute_lib


class LocalExtended(MirroredExtended):  # type: ignore[misc]
    """Mirrored replicas on devices of this process, without collectives of TensorFlow's own.

    Args:
        container: the strategy that this is the engine of.
        devices: one replica each.
    """

    def __init__(self, container: tf.distribute.Strategy, devices: Sequence[str]) -> None:
        # Not the parent's constructor, which reads TF_CONFIG and makes collectives of its own.
        distribute_lib.StrategyExtendedV1.__init__(self, container)
        self._initialize_single_worker(list(devices))
        self._communication_options = tf.distribute.experimental.CommunicationOptions()
        self._use_var_policy = False
        self.experimental_enable_get_next_as_optional = True

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy that this is the engine of."""
        return self._container_strategy()

    @property
    def replica_count(self) -> int:
        """The number of replicas of all workers."""
        return int(self._num_replicas_in_sync)

    @property
    def first_replica(self) -> int:
        """The number, among those of all workers, of the replica on this worker's first device."""
        return int(self._get_replica_id_in_sync_group(0))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster; it is where TensorFlow's strategies look for it."""
        return self._cluster_resolver

    @cluster_resolver.setter
    def cluster_resolver(self, resolver: Any) -> None:
        self._cluster_resolver = resolver

    def input_workers(self, options: Any) -> Any:
        """The devices that distributed data is for, by a `tf.distribute.InputOptions`."""
        return self._input_workers_with_options(options)


def devices_of(variable: Any) -> tuple[str, ...]:
    """Where the copies of a distributed variable are."""
    return tuple(variable._devices)


def copy_here(variable: Any) -> Any:
    """The copy of a distributed variable on the current device, or its first one."""
    return variable._get_on_device_or_primary()


def first_spec(spec: Any) -> Any:
    """The specification of the first replica's part of a value that each replica has its own of."""
    return spec._value_specs[0]


def set_batches(distributed: Any, count: int, *, ends_together: bool) -> None:
    """Sets how a distributed dataset ends.

    Args:
        distributed: a distributed dataset.
        count: its number of batches, or `tf.data`'s numbers for an unknown one and for no end.
        ends_together: whether all workers have as many, and need not agree on it before each.
    """
    distributed._cardinality = count
    distributed._enable_get_next_as_optional = not ends_together
