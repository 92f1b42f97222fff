"""Multi-worker data parallelism: every worker holds a copy of the model; gradients are summed."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

from tfdist._src import cluster
from tfdist._src.cluster import ClusterResolver, Found
from tfdist._src.cluster.net.wait_messages import say
from tfdist._src.compression.registry import CompressionLike
from tfdist._src.compression.registry import read as compression_policy
from tfdist._src.group.group import Group
from tfdist._src.group.joining import join, join_devices
from tfdist._src.strategy.batch_statistics import (
    BatchStatistics,
    agreed_batch_statistics,
    check_batch_statistics,
)
from tfdist._src.strategy.communication import (
    check_communication,
    choose,
    local_devices,
    replica_communicators,
    worker_communicator,
)
from tfdist._src.strategy.compressing import make_compressor
from tfdist._src.strategy.extended import ReplicatedExtended
from tfdist._src.strategy.random_state import share_randomness
from tfdist.errors import UnsupportedError


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Synchronous data parallelism over the workers of a cluster, with `model.fit` unchanged.

    Each worker has a replica of the model on each of its GPUs, or on its CPU. Each global batch is
    split among all replicas; the result is the same as in a single process.

    Args:
        cluster_resolver: any `tf.distribute.cluster_resolver.ClusterResolver`; by default
            the environment is read (`TF_CONFIG`, or what Slurm, mpirun and others set), and a
            process that finds nothing there trains alone.
        communication_options: a `tf.distribute.experimental.CommunicationOptions`. The native
            collectives use its `bytes_per_pack` and `timeout_seconds`.
        communication: `"native"` for tfdist's collectives (shared memory and TCP; on GPUs own
            kernels and NCCL), `"tensorflow"` for TensorFlow's (RING on CPUs, NCCL on GPUs), or
            `"auto"` for the native ones if they are available on all of several workers.
        compression: how to compress gradients sent between hosts: a name such as `"int8"`, a codec
            of `tfdist.compression`, or a `tfdist.compression.Policy`. None sends them exactly.
        shard_optimizer: whether to shard the optimizer state (ZeRO-1), so that each worker keeps
            the state, and updates the weights, of an equal share of the elements.
        batch_statistics: the rows by whose statistics `BatchNormalization` layers normalize in
            training: `"global"`, those of the whole batch as in one process, or `"replica"`, those
            of each replica, which communicate nothing; layers with `synchronized=True` always use
            the whole batch. By default `TFDIST_BATCH_STATISTICS`, or else `"global"`.

    Raises:
        ValueError: `communication` or `batch_statistics` is none of the above.
        ClusterError: the description of the cluster is invalid.
        RendezvousError: not all workers connected within `TFDIST_START_TIMEOUT` seconds.
        NativeUnavailableError: `communication="native"`, and the core cannot be compiled or
            loaded.
        UnsupportedError: TensorFlow's collectives are used, and TensorFlow ran an operation before
            the strategy was created; or these workers cannot compress gradients or shard
            optimizers.
        ProgramMismatchError: the workers differ in their compression or other arguments.

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
        batch_statistics: BatchStatistics | None = None,
    ) -> None:
        check_communication(communication)
        check_batch_statistics(batch_statistics)
        found = read_cluster(cluster_resolver)
        policy = compression_policy(compression)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        group = join(found)
        group.agree("shard_optimizer", str(bool(shard_optimizer)))
        statistics = agreed_batch_statistics(group, batch_statistics)
        share_randomness(group)
        native = choose(group, communication) == "native"
        if native:
            _warn_of_implementation(group, options)
        else:
            group.serve_tensorflow()
        devices = local_devices(group)
        if shard_optimizer and len(devices) > 1:
            raise cannot_shard(devices)
        if shard_optimizer and not native and group.topology.size > 1:
            raise UnsupportedError(
                "shard_optimizer=True needs the native collectives. Received: TensorFlow's. "
                "`tfdist doctor` says what the native ones need. Or omit `shard_optimizer`."
            )
        workers = worker_communicator(group, options, native=native)
        if communication == "native" and not native:  # A single worker may have several devices.
            group = join_devices(devices)
        native = communication == "native" or native
        replicas = replica_communicators(group, devices, workers, options, native=native)
        extended = ReplicatedExtended(self, devices, replicas, workers, group)
        extended.cluster_resolver = cluster_resolver or resolver_of(group, found)
        extended.shards_optimizers = bool(shard_optimizer) and extended.spans_workers
        extended.batch_statistics = statistics
        extended.compressor = make_compressor(group, policy, devices, workers, replicas, options)
        tf.distribute.Strategy.__init__(self, extended)

    def explain(self, model: Any, batch: Any) -> Any:
        """Prints what a training step communicates: each value, its bytes, and the line it is from.

        Args:
            model: a compiled Keras model, created in the scope of this strategy.
            batch: a global batch as `train_step` takes it, such as a pair of inputs and targets.

        Returns:
            A list of transfers, each with the attributes `kind` ("reduce" or "gather"),
            `operation`, `size` in bytes, `shape`, `where` and `reason`.

        Example:
            >>> strategy.explain(model, (x[:64], y[:64]))
            The step reduces 26.0 MiB and gathers 0 B: …
        """
        return self.extended.explain(model, batch)

    @property
    def generation(self) -> int:
        """How often the group of workers has changed since the job started.

        Workers come and go with `tfdist.callbacks.Elastic`; otherwise it stays 0.
        """
        return int(self.extended.group.generation)

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver, as in TensorFlow's strategy."""
        return self.extended.cluster_resolver


def _warn_of_implementation(group: Group, options: Any) -> None:
    chosen = options.implementation
    automatic = tf.distribute.experimental.CommunicationImplementation.AUTO
    if chosen != automatic and group.topology.is_chief:
        say(
            f"`implementation` of `communication_options` is for TensorFlow's collectives. "
            f"Received: {chosen.name}, but this strategy uses the native ones, which choose their "
            'algorithm by size and hosts. Omit it, or pass communication="tensorflow"; '
            "TFDIST_ALGORITHM sets the native algorithm."
        )


def cannot_shard(devices: list[str]) -> UnsupportedError:
    """The error for sharding the optimizer of a worker with several devices."""
    return UnsupportedError(
        f"shard_optimizer=True needs workers with one device each. Received: {len(devices)} in "
        "this process. Start one worker per device, with CUDA_VISIBLE_DEVICES or "
        "`tfdist run --gpus-per-worker`, or omit `shard_optimizer`."
    )


def read_cluster(cluster_resolver: Any) -> Found:
    """The job from a resolver, or by default from the environment.

    Raises:
        ClusterError: the description of the cluster is invalid.
    """
    if cluster_resolver is None:
        return cluster.find()
    return Found(type(cluster_resolver).__name__, cluster.from_resolver(cluster_resolver))


def resolver_of(group: Group, found: Found) -> Any:
    """TensorFlow's description of a job that was found in the environment."""
    # A process that waits to be admitted to a running job is alone for now.
    topology = found.topology if found.exchange is None else group.topology
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(topology.jobs),
        task_type=topology.task_type,
        task_id=topology.task_index,
    )
