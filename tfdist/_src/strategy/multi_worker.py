"""Multi-worker data parallelism: every worker holds a copy of the model; gradients are summed."""

import functools
import json
import random
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from tfdist._src import cluster
from tfdist._src.cluster import ClusterResolver, ResolvedJob
from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.device_communicator import GPU_BUCKET_BYTES, GpuCommunicator
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.compression.compressor import Compressor
from tfdist._src.compression.policy import CompressionLike, Policy
from tfdist._src.compression.policy import read as compression_policy
from tfdist._src.compression.transport import Exchange, HostLeaders, OnGpus
from tfdist._src.group import Group, join, join_devices
from tfdist._src.internals.tensorflow import DEFAULT_SEED, global_seed, set_default_seed
from tfdist._src.log import logger
from tfdist._src.strategy import mirrored
from tfdist._src.strategy.communication import (
    check_communication,
    choose,
    local_devices,
    replica_communicators,
    sized,
    worker_communicator,
)
from tfdist._src.strategy.extended import ReplicatedExtended, extended_of
from tfdist.errors import UnsupportedError


def random_states() -> dict[str, Any]:
    """Returns the states of Python's and NumPy's global random generators, as data for JSON."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, internal, gauss],
        "numpy": [name, keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Sets Python's and NumPy's global random generators to states from `random_states`."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))


def share_randomness(group: Group) -> None:
    """Gives all workers the chief's random states, so that they shuffle in the same order.

    The states are those of Python's `random`, of NumPy's global generator, and TensorFlow's seed.
    They determine how arrays and datasets are shuffled. If all workers have set the same seed in
    TensorFlow, this seed is kept. If the chief has set none, operations with a seed of their own
    draw the same numbers as in one process.
    """
    if group.topology.size == 1:
        return
    states = {**random_states(), "tensorflow": random.SystemRandom().randrange(2**31)}
    own = json.dumps(states) if group.topology.is_chief else ""
    chief = json.loads(group.exchange("random state", own)[0])
    set_random_states(chief)
    seeds = group.exchange("seed", str(global_seed()))
    if len(set(seeds)) == 1 and seeds[0] != "None":
        return
    if seeds[0] in ("None", str(DEFAULT_SEED)):
        set_default_seed(chief["tensorflow"])
    else:
        tf.random.set_seed(int(seeds[0]))


def make_compressor(
    group: Group,
    policy: Policy | None,
    devices: list[str],
    workers: Communicator,
    replicas: list[Communicator],
    options: Any,
) -> Compressor | None:
    """Returns the gradient compressor; None for a single worker or TensorFlow's collectives.

    All workers must call this function.

    Args:
        group: the workers.
        policy: this worker's initial policy; None to compress nothing.
        devices: the devices of this worker's replicas.
        workers: the communicator with one participant per worker.
        replicas: the communicators from `replica_communicators`.
        options: a `tf.distribute.experimental.CommunicationOptions`.

    Raises:
        ProgramMismatchError: the workers have different policies.
        UnsupportedError: a policy is set, but these workers cannot compress.
    """
    if not isinstance(workers, CoreCommunicator):
        group.agree("compression", repr(policy))
        if policy is not None and group.topology.size > 1:
            raise cannot_compress("`compression`")
        return None

    def part(
        name: str, members: list[int], *, suffix: str = "", gpus: Sequence[str] = ()
    ) -> CoreCommunicator | None:
        name = f"{name}{suffix}, GPUs" if gpus else f"{name}{suffix}"
        made = group.native_part(name, members, options.timeout_seconds, gpus)
        if made is None:
            return None
        return sized(made.with_buckets_of(GPU_BUCKET_BYTES) if gpus else made, options)

    def make_exchanges(within_hosts: bool) -> list[Exchange]:
        if len(devices) == 1:
            of_gpu = None
            if isinstance(replicas[0], GpuCommunicator):
                split = functools.partial(part, gpus=devices)
                of_gpu = OnGpus(replicas[0].on_gpu, split)
            return [
                Exchange(
                    workers,
                    within_hosts=within_hosts,
                    split=part,
                    exact=replicas[0],
                    on_gpus=of_gpu,
                )
            ]
        exchanges = []
        for i, local in enumerate(group.native_devices(devices)):
            route, exact = None, None
            of_workers = sized(group.native(f"device {i}"), options)
            if isinstance(replicas[i], GpuCommunicator):
                route = route_of_gpu(i, local)
                exact = GpuCommunicator(route.workers, of_workers)
            exchanges.append(
                Exchange(
                    of_workers,
                    within_hosts=within_hosts,
                    devices=HostLeaders(local, len(devices), i),
                    split=functools.partial(part, suffix=f", device {i}"),
                    exact=exact,
                    on_gpus=route,
                )
            )
        return exchanges

    def route_of_gpu(i: int, local: CoreCommunicator) -> OnGpus:
        topology, gpus, replica = group.topology, devices[i : i + 1], replicas[i]
        here = part("devices", [topology.rank], gpus=devices)
        of_workers = part(f"device {i}", list(range(topology.size)), gpus=gpus)
        assert here and of_workers and isinstance(replica, GpuCommunicator)
        neighbors = GpuCommunicator(here.on_gpu(i), local)
        return OnGpus(
            of_workers,
            functools.partial(part, suffix=f", device {i}", gpus=gpus),
            HostLeaders(neighbors, len(devices), i),
            replica.on_gpu,
        )

    def agree(policy: Policy | None) -> None:
        group.agree("compression", repr(policy))

    compressor = Compressor(policy, make_exchanges, devices, agree)
    group.follow(compressor)
    return compressor


def cannot_compress(asked_by: str) -> UnsupportedError:
    """Returns the error for compression with TensorFlow's collectives.

    Args:
        asked_by: the argument or call that requests compression, which the user can omit.
    """
    return UnsupportedError(
        "Compression needs the native collectives, and these workers use TensorFlow's. "
        f"Run `tfdist doctor` for the reason, or omit {asked_by}."
    )


InputDivision = Literal["auto", "always", "never"]


def check_input_division(given: str | None) -> None:
    """Checks the `input_division` argument of a strategy.

    Raises:
        ValueError: the value is unknown.
    """
    choices = get_args(InputDivision)
    if given is not None and given not in choices:
        raise ValueError(
            f"`input_division` must be one of {', '.join(map(repr, choices))}. "
            f"Received: {given!r}. Omit it to use `TFDIST_INPUT_DIVISION`, or 'never'."
        )


def agreed_input_division(group: Group, given: str | None) -> str:
    """Returns the `input_division` of a strategy, after checking that all workers agree.

    All workers must call this function.

    Args:
        group: the workers.
        given: the argument on this worker; None to use `TFDIST_INPUT_DIVISION`.

    Raises:
        ProgramMismatchError: the workers' settings differ.
    """
    chosen = group.options.input_division if given is None else given
    group.agree("input_division", chosen)
    return chosen


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """Synchronous data parallelism over the workers of a cluster, with `model.fit` unchanged.

    Each worker has a replica of the model on each of its GPUs, or on its CPU. Each global batch is
    split among all replicas; the result is the same as in a single process.

    Args:
        cluster_resolver: any `tf.distribute.cluster_resolver.ClusterResolver`. By default, the
            cluster is read from the environment: from `TF_CONFIG`, or from the variables of Slurm,
            mpirun and other launchers. A process without any of these variables trains alone.
        communication_options: a `tf.distribute.experimental.CommunicationOptions`. The native
            collectives use only its `bytes_per_pack` and `timeout_seconds`.
        communication: `"native"` for tfdist's collectives (shared memory and TCP; on GPUs its own
            kernels and NCCL), or `"tensorflow"` for TensorFlow's (RING on CPUs, NCCL on GPUs).
            `"auto"`, the default, selects tfdist's collectives if there are several workers and all
            of them support tfdist's, and else TensorFlow's.
        compression: how to compress gradients that are sent between hosts: a name such as
            `"int8"`, a codec of `tfdist.compression`, or a `tfdist.compression.Policy`. With None,
            gradients are not compressed.
        shard_optimizer: whether to shard the optimizer state (ZeRO-1). Each worker then keeps the
            optimizer state for an equal share of all weight elements, and updates this share.
        batch_statistics: the rows that `BatchNormalization` layers compute statistics from during
            training. With `"global"`, these are the rows of the whole batch, as in one process.
            With `"replica"`, each replica uses its own rows, without communication. Layers with
            `synchronized=True` always use the whole batch. The default is the value of
            `TFDIST_BATCH_STATISTICS`, or `"global"` if this variable is not set.
        input_division: whether each worker preprocesses only its own rows of a `tf.data` dataset.
            With `"auto"`, it does so for each `map` whose function treats every element, or every
            row of a batch, separately and in the same way, and does not call Python. With
            `"always"`, you assert that the function does so, and the function may call Python. With
            `"never"`, each worker preprocesses all rows. The batches are those of one process,
            unless the functions draw random numbers that depend on state. The default is the value
            of `TFDIST_INPUT_DIVISION`, or `"auto"` if this variable is not set.

    Raises:
        ValueError: `communication`, `batch_statistics` or `input_division` has an unknown value.
        ClusterError: the description of the cluster is invalid.
        RendezvousError: not all workers connected within `TFDIST_START_TIMEOUT` seconds.
        NativeUnavailableError: `communication` is `"native"`, but the native core cannot be
            compiled or loaded.
        UnsupportedError: TensorFlow's collectives are used, but TensorFlow ran an operation before
            the strategy was created; or these workers cannot compress gradients or shard
            optimizers.
        ProgramMismatchError: the workers have different values of `compression` or of other
            arguments.

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
        batch_statistics: mirrored.BatchStatistics | None = None,
        input_division: InputDivision | None = None,
    ) -> None:
        check_communication(communication)
        mirrored.check_batch_statistics(batch_statistics)
        check_input_division(input_division)
        found = read_cluster(cluster_resolver)
        policy = compression_policy(compression)
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        group = join(found)
        group.agree("shard_optimizer", str(bool(shard_optimizer)))
        statistics = mirrored.agreed_batch_statistics(group, batch_statistics)
        division = agreed_input_division(group, input_division)
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
                "shard_optimizer=True needs the native collectives. Received: TensorFlow's. Run "
                "`tfdist doctor` for their requirements, or omit `shard_optimizer`."
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
        extended.input_division = division
        extended.compressor = make_compressor(group, policy, devices, workers, replicas, options)
        tf.distribute.Strategy.__init__(self, extended)

    def explain(self, model: Any, batch: Any) -> Any:
        """Prints the values that a training step communicates, with their sizes and source lines.

        Args:
            model: a compiled Keras model, created in the scope of this strategy.
            batch: a global batch in the form that `train_step` receives, such as a pair of inputs
                and targets.

        Returns:
            A list of transfers, each with the attributes `kind` ("reduce" or "gather"),
            `operation`, `size` in bytes, `shape`, `where` and `reason`.

        Example:
            >>> strategy.explain(model, (x[:64], y[:64]))
            The step reduces 26.0 MiB and gathers 0 B: …
        """
        return extended_of(self).explain(model, batch)

    @property
    def generation(self) -> int:
        """The number of changes of the group of workers since the job started.

        The group changes only with `tfdist.callbacks.Elastic`; otherwise, the number stays 0.
        """
        return int(extended_of(self).group.generation)

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver, as in `tf.distribute.MultiWorkerMirroredStrategy`."""
        return extended_of(self).cluster_resolver


def _warn_of_implementation(group: Group, options: Any) -> None:
    chosen = options.implementation
    automatic = tf.distribute.experimental.CommunicationImplementation.AUTO
    if chosen != automatic and group.topology.is_chief:
        logger.warning(
            f"`implementation` of `communication_options` is for TensorFlow's collectives. "
            f"Received: {chosen.name}, but this strategy uses the native ones, which choose their "
            'algorithm by size and hosts. Omit it, or pass communication="tensorflow"; '
            "TFDIST_ALGORITHM sets the native algorithm."
        )


def cannot_shard(devices: list[str]) -> UnsupportedError:
    """Returns the error for sharding the optimizer of a worker with several devices."""
    return UnsupportedError(
        f"shard_optimizer=True needs workers with one device each. Received: {len(devices)} in "
        "this process. Start one worker per device, with CUDA_VISIBLE_DEVICES or "
        "`tfdist run --gpus-per-worker`, or omit `shard_optimizer`."
    )


def read_cluster(cluster_resolver: Any) -> ResolvedJob:
    """Returns the job that a cluster resolver describes; without one, the job in the environment.

    Raises:
        ClusterError: the description of the cluster is invalid.
    """
    if cluster_resolver is None:
        return cluster.find()
    return ResolvedJob(type(cluster_resolver).__name__, cluster.from_resolver(cluster_resolver))


def resolver_of(group: Group, found: ResolvedJob) -> Any:
    """Returns a cluster resolver for a job that was found in the environment."""
    # Until a process is admitted to a running job, its group contains only the process itself.
    topology = found.topology if found.exchange is None else group.topology
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(topology.jobs),
        task_type=topology.task_type,
        task_id=topology.task_index,
    )
