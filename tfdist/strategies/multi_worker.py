"""The strategy for many workers: every one holds a copy of the model, gradients are summed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist import cluster
from tfdist.collective.communicator import Alone, Communicator
from tfdist.collective.tensorflow_collectives import TensorFlowCommunicator
from tfdist.errors import UnsupportedError
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.group import Group, join, share_randomness

COMMUNICATIONS = ("auto", "tensorflow", "native")


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Synchronous data parallelism over the workers of a cluster, for `model.fit` unchanged.

    Each worker has a replica of the model on each of its GPUs, or on its CPU. A global batch is
    shared out among all replicas; the result is the one that a single process gives.

    Args:
        cluster_resolver: any `tf.distribute.cluster_resolver.ClusterResolver`; without one,
            `TF_CONFIG` is read, and without that the process trains alone.
        communication_options: a `tf.distribute.experimental.CommunicationOptions`.
        communication: `"tensorflow"` for TensorFlow's collectives (RING on CPUs, NCCL on GPUs);
            `"auto"` chooses.

    Raises:
        ClusterError: the cluster's description is wrong.
        RendezvousError: not all workers came within `TFDIST_START_TIMEOUT` seconds.
        UnsupportedError: TensorFlow was used before the strategy was made.

    Example:
        ```python
        strategy = tfdist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(dataset, epochs=10)
        ```
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        communication: str = "auto",
    ) -> None:
        if communication not in COMMUNICATIONS:
            raise ValueError(
                f"`communication` must be one of {', '.join(map(repr, COMMUNICATIONS))}. "
                f"Received: {communication!r}."
            )
        if communication == "native":
            raise UnsupportedError(
                "The native collectives are not part of this version. "
                'Use communication="tensorflow" or "auto".'
            )
        if cluster_resolver is None:
            topology = cluster.from_environment()
            cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(topology.jobs),
                task_type=topology.task_type,
                task_id=topology.task_index,
            )
        else:
            topology = cluster.from_resolver(cluster_resolver)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        group = join(topology)
        share_randomness(group)
        devices = local_devices(group)
        workers = worker_communicator(group, options)
        replicas = replica_communicators(group, devices, workers, options)
        extended = ReplicatedExtended(self, devices, replicas, workers, group)
        extended._cluster_resolver = cluster_resolver
        tf.distribute.Strategy.__init__(self, extended)
        extended._retrace_functions_for_each_device = len(devices) > 1

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster, as TensorFlow's strategy has it."""
        return self.extended._cluster_resolver


def local_devices(group: Group) -> list[str]:
    """This process's replicas' devices: its GPUs, else its logical CPU devices."""
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    names = [device.name for device in tf.config.list_logical_devices(kind)]
    group.agree("number of devices", f"{len(names)} {kind}")
    return names


# TensorFlow names a group of devices by a number, the same on all of them.
_WORKERS_KEY = 0x7FD0001
_REPLICAS_KEY = 0x7FD0002
_DEFAULT_BUCKET_BYTES = 4 << 20


def worker_communicator(group: Group, options: Any) -> Communicator:
    """A communicator with one participant per worker, for values on the host."""
    if group.topology.size == 1:
        return Alone()
    return TensorFlowCommunicator(
        tf.config.list_logical_devices("CPU")[0].name,
        rank=group.topology.rank,
        size=group.topology.size,
        group_key=_WORKERS_KEY,
        implementation="RING",
        timeout=options.timeout_seconds or group.options.collective_timeout,
        bucket_bytes=options.bytes_per_pack or _DEFAULT_BUCKET_BYTES,
    )


def replica_communicators(
    group: Group, devices: list[str], workers: Communicator, options: Any
) -> list[Communicator]:
    """For each device a communicator over the replicas of all workers."""
    size = len(devices) * group.topology.size
    if size == 1:
        return [Alone()]
    if len(devices) == 1 and "CPU" in devices[0]:
        return [workers]
    local_key = hash(tuple(devices)) % 2**30
    return [
        TensorFlowCommunicator(
            device,
            rank=group.topology.rank * len(devices) + i,
            size=size,
            group_key=_REPLICAS_KEY if group.topology.size > 1 else local_key,
            implementation=options.implementation.value,
            timeout=options.timeout_seconds or group.options.collective_timeout,
            bucket_bytes=options.bytes_per_pack or _DEFAULT_BUCKET_BYTES,
        )
        for i, device in enumerate(devices)
    ]
