"""The strategy for many workers: every one holds a copy of the model, gradients are summed."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tfdist import cluster
from tfdist.cluster import ClusterResolver
from tfdist.cluster.net.wait_messages import say
from tfdist.compression.registry import CompressionLike
from tfdist.compression.registry import read as compression_policy
from tfdist.errors import UnsupportedError
from tfdist.strategies.communication import (
    COMMUNICATIONS,
    choose,
    local_devices,
    make_compressor,
    replica_communicators,
    worker_communicator,
)
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.group import Group, join, share_randomness


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Synchronous data parallelism over the workers of a cluster, for `model.fit` unchanged.

    Each worker has a replica of the model on each of its GPUs, or on its CPU. A global batch is
    shared out among all replicas; the result is the one that a single process gives.

    Args:
        cluster_resolver: any `tf.distribute.cluster_resolver.ClusterResolver`; without one,
            `TF_CONFIG` is read, and without that the process trains alone.
        communication_options: a `tf.distribute.experimental.CommunicationOptions`. The native
            collectives take its `bytes_per_pack` and `timeout_seconds`.
        communication: `"native"` for tfdist's collectives (shared memory and TCP),
            `"tensorflow"` for TensorFlow's (RING on CPUs, NCCL on GPUs); `"auto"` takes the
            native ones for workers without GPUs, if they can be had on all of them.
        compression: how to make the gradients smaller that cross from host to host: a name such as
            `"int8"`, a codec of `tfdist.compression`, or a `tfdist.compression.Policy`. None sends
            them as they are.
        shard_optimizer: whether each worker keeps the state of the optimizer, and updates the
            weights, for a share of the elements alone, of equal size on all workers.

    Raises:
        ClusterError: the cluster's description is wrong.
        RendezvousError: not all workers came within `TFDIST_START_TIMEOUT` seconds.
        NativeUnavailableError: `communication="native"`, and they cannot be compiled or loaded.
        UnsupportedError: TensorFlow's collectives are to be used, and TensorFlow ran an operation
            before the strategy was made; or these workers' gradients cannot be compressed, or
            their optimizers not be shared out.
        ProgramMismatchError: the workers are to compress in different ways, or differ elsewhere.

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
        cluster_resolver: ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        *,
        communication: Literal["auto", "native", "tensorflow"] = "auto",
        compression: CompressionLike = None,
        shard_optimizer: bool = False,
    ) -> None:
        if communication not in COMMUNICATIONS:
            raise ValueError(
                f"`communication` must be one of {', '.join(map(repr, COMMUNICATIONS))}. "
                f"Received: {communication!r}."
            )
        topology, resolver = read_cluster(cluster_resolver)
        policy = compression_policy(compression)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        group = join(topology)
        group.agree("shard_optimizer", str(bool(shard_optimizer)))
        share_randomness(group)
        native = choose(group, communication) == "native"
        if native:
            _tell_of_implementation(group, options)
        else:
            group.serve_tensorflow()
        devices = local_devices(group)
        if shard_optimizer and len(devices) > 1:
            raise cannot_shard(devices)
        workers = worker_communicator(group, options, native=native)
        replicas = replica_communicators(group, devices, workers, options)
        extended = ReplicatedExtended(self, devices, replicas, workers, group)
        extended.cluster_resolver = resolver
        extended.shards_optimizers = bool(shard_optimizer) and topology.size > 1
        extended.compressor = make_compressor(group, policy, devices, workers, options)
        tf.distribute.Strategy.__init__(self, extended)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster, as TensorFlow's strategy has it."""
        return self.extended.cluster_resolver


def _tell_of_implementation(group: Group, options: Any) -> None:
    chosen = options.implementation
    automatic = tf.distribute.experimental.CommunicationImplementation.AUTO
    if chosen != automatic and group.topology.is_chief:
        say(
            f"`implementation` of `communication_options` is for TensorFlow's collectives. "
            f"Received: {chosen.name}, and the native ones are used, which choose by size and "
            'hosts. Leave it out, or pass communication="tensorflow"; TFDIST_ALGORITHM sets the '
            "native ones."
        )


def cannot_shard(devices: list[str]) -> UnsupportedError:
    """What to raise where a worker with several devices is to share out its optimizer."""
    return UnsupportedError(
        f"shard_optimizer=True needs workers with one device each. Received: {len(devices)} in "
        "this process. Start a worker for each device, with CUDA_VISIBLE_DEVICES or "
        "`tfdist run --gpus-per-worker`, or leave `shard_optimizer` out."
    )


def read_cluster(cluster_resolver: Any) -> tuple[cluster.Topology, Any]:
    """The cluster of a resolver, or of `TF_CONFIG` without one; and the resolver.

    Raises:
        ClusterError: the cluster's description is wrong.
    """
    if cluster_resolver is not None:
        return cluster.from_resolver(cluster_resolver), cluster_resolver
    topology = cluster.from_environment()
    return topology, tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(topology.jobs),
        task_type=topology.task_type,
        task_id=topology.task_index,
    )
