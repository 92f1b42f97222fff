"""Strategies for pipeline parallelism, alone or with data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from tfdist._src.cluster import ClusterResolver, Topology
from tfdist._src.comm.communicator_interface import Alone, Communicator
from tfdist._src.comm.device_communicator import GPU_BUCKET_BYTES, GpuCommunicator
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.compression.compressor import Compressor
from tfdist._src.compression.policy import CompressionLike, Policy
from tfdist._src.compression.policy import read as compression_policy
from tfdist._src.compression.transport import Exchange, OnGpus, is_shared_out
from tfdist._src.global_view.transfer import report
from tfdist._src.group import Group, join
from tfdist._src.keras.fit.call_checks import refuse_in_one_piece
from tfdist._src.keras.saving.files import is_pipeline_model
from tfdist._src.pipeline.placement.rank_mesh import Arrangement, RankMesh, arrange
from tfdist._src.pipeline.plan.schedule import Schedule
from tfdist._src.pipeline.schedules import make_schedule
from tfdist._src.strategy import multi_worker
from tfdist._src.strategy.communication import (
    choose,
    local_devices,
    part_communicators,
    sums_on_gpus,
)
from tfdist._src.strategy.extended import ReplicatedExtended
from tfdist.errors import UnsupportedError


def make_compressor(
    group: Group,
    policy: Policy | None,
    device: str,
    data: Communicator,
    exact: Communicator,
    mesh: RankMesh,
) -> Compressor | None:
    """Makes the compressor of this worker's gradients, or returns None with a single pipeline.

    All workers must call this function together.

    Args:
        group: all workers.
        policy: this worker's compression policy; None if gradients are not compressed yet.
        device: this worker's device.
        data: the communicator of this worker's data group: the workers that hold the same stages.
        exact: the communicator that sums the gradients of the data group without compression.
        mesh: the mesh of all workers.

    Raises:
        ProgramMismatchError: the workers' policies differ.
    """

    def agree(policy: Policy | None) -> None:
        group.agree("compression", repr(policy))

    if not isinstance(data, CoreCommunicator):
        agree(policy)
        return None
    members = mesh.data_group_of(group.topology.rank)

    def split(name: str, within: list[int]) -> CoreCommunicator | None:
        # The name contains the size of the mesh, since a process may use several meshes over time.
        return group.native_part(f"{name} in data of {mesh}", [members[i] for i in within])

    def split_gpus(name: str, within: list[int]) -> CoreCommunicator | None:
        ranks = [members[i] for i in within]
        made = group.native_part(f"{name} in data of {mesh}, GPUs", ranks, gpus=[device])
        return made and made.with_buckets_of(GPU_BUCKET_BYTES)

    on_gpus = OnGpus(exact.on_gpu, split_gpus) if isinstance(exact, GpuCommunicator) else None

    def make_exchanges(within_hosts: bool) -> list[Exchange]:
        exchange = Exchange(
            data, within_hosts=within_hosts, split=split, exact=exact, on_gpus=on_gpus
        )
        if not within_hosts and not is_shared_out(data.hosts) and _any_is_shared_out(group, mesh):
            # `native_part` is collective over all workers. So this worker must also call it if only
            # other data groups need communicators within and between hosts.
            for create in (split, split_gpus) if on_gpus else (split,):
                create("host", [])
                create("carriers", [])
        return [exchange]

    return Compressor(policy, make_exchanges, [device], agree)


def _any_is_shared_out(group: Group, mesh: RankMesh) -> bool:
    hosts = group.native().hosts
    return any(is_shared_out([hosts[rank] for rank in ranks]) for ranks in mesh.data_groups)


class PipelineExtended(ReplicatedExtended):
    """The `extended` object of a pipeline strategy.

    Its replicas are the workers of this worker's data group, which hold the same stages.

    Args:
        container: the strategy to which the object belongs.
        device: this worker's device.
        group: all workers.
        mesh: the mesh of all workers.
        pipeline_rank: this worker's pipeline rank.
        full_size: the number of workers at the start of the job.
        gpus: a list with this worker's device if gradients and messages between stages are
            communicated directly from its GPU; otherwise an empty list.
        connect: a function of a group and a mesh that opens the communicators of the mesh. It
            returns two communicators of this worker's data group: one for values in CPU memory,
            and one for the replicas' values, such as gradients, which may be on GPUs.

    Attributes:
        mesh: the mesh of the current group.
        full_size: the number of workers at the start of the job.
        gpus: see `gpus` under Args.
    """

    in_stages = True

    def __init__(
        self,
        container: tf.distribute.Strategy,
        device: str,
        group: Group,
        mesh: RankMesh,
        pipeline_rank: int,
        full_size: int,
        gpus: Sequence[str],
        connect: Callable[[Group, RankMesh], tuple[Communicator, Communicator]],
    ) -> None:
        workers, replicas = connect(group, mesh)
        super().__init__(container, [device], [replicas], workers, group)
        self.mesh, self.full_size, self.gpus = mesh, full_size, gpus
        self._pipeline_rank, self._connect = pipeline_rank, connect

    def follow_group(self) -> Arrangement:
        """Forms new pipelines after the group has changed; all workers must call it together.

        Returns:
            The arrangement of the workers. If it has spare or missing ranks, the pipelines have
            not been formed and this object is unchanged.
        """
        pipeline_ranks = self.group.exchange("pipeline ranks", str(self._pipeline_rank))
        arrangement = arrange(list(map(int, pipeline_ranks)), self.mesh.pipeline_size)
        if arrangement.mesh is not None and not arrangement.spare:
            self.mesh = arrangement.mesh
            self._workers, replicas = self._connect(self.group, self.mesh)
            self._replicas = (replicas,)
        return arrangement

    @property
    def should_checkpoint(self) -> bool:
        return self.group.topology.is_chief

    @property
    def should_save_summary(self) -> bool:
        return self.group.topology.is_chief

    def agree_on_variable(self, description: str) -> None:
        # Workers with different stages have different variables, so they cannot compare all of
        # them here. A variable that several stages share is compared later, when its value is
        # broadcast from the first of these stages.
        pass


def pipeline_extended_of(strategy: HybridStrategy) -> PipelineExtended:
    """Returns the `extended` object of a pipeline strategy."""
    extended: PipelineExtended = strategy.extended
    return extended


class HybridStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """Trains a model in stages on one or more parallel pipelines of workers.

    The model is cut into stages, and each worker of a pipeline holds one or more of them. A batch
    is cut into microbatches, which pass through the stages one after another. If there are more
    than `pipeline_size` workers, they form several pipelines. The pipelines divide the rows of each
    batch among them and sum their gradients. The results are the same as in a single process.

    Args:
        pipeline_size: the number of workers per pipeline, which must divide the total number of
            workers. By default, all workers form a single pipeline.
        microbatches: the number of microbatches into which a pipeline cuts its rows of a batch.
            If a batch has fewer rows, there are fewer microbatches.
        schedule: a name in `tfdist.pipeline.SCHEDULES`, or a function of `ranks` and
            `microbatches` that returns a list of actions for each rank.
        virtual_stages: the number of stages per worker, if the schedule supports different
            numbers. By default, the schedule determines the number.
        cluster_resolver: as for `tfdist.MultiWorkerMirroredStrategy`.
        compression: how to compress the gradients that the pipelines sum, as for
            `tfdist.MultiWorkerMirroredStrategy`.
        shard_optimizer: whether the workers that hold the same stages shard their optimizer state;
            see `tfdist.MultiWorkerMirroredStrategy`. This has no effect if there is a single
            pipeline.
        communication: `"auto"` (the default) or `"native"`. Both mean the same, since pipelines
            always use the native collectives.
        input_division: as for `tfdist.MultiWorkerMirroredStrategy`. All workers of a pipeline
            preprocess the rows of this pipeline.

    Raises:
        ValueError: `input_division` has an unknown value, or the number of workers is not a
            multiple of `pipeline_size`.
        ScheduleError: the schedule is invalid.
        NativeUnavailableError: the native collectives are unavailable.

    Example:
        ```python
        strategy = tfdist.HybridStrategy(pipeline_size=2, microbatches=8)
        with strategy.scope():
            model = tfdist.PipelineModel(build_model)
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(dataset)
        ```
    """

    def __init__(
        self,
        *,
        pipeline_size: int | None = None,
        microbatches: int = 8,
        schedule: str | Callable[..., Any] = "1f1b",
        virtual_stages: int | None = None,
        cluster_resolver: ClusterResolver | None = None,
        compression: CompressionLike = None,
        shard_optimizer: bool = False,
        communication: Literal["auto", "native"] = "auto",
        input_division: multi_worker.InputDivision | None = None,
    ) -> None:
        multi_worker.check_input_division(input_division)
        if communication not in ("auto", "native"):
            raise ValueError(
                f"`communication` must be 'auto' or 'native'. Received: {communication!r}."
            )
        if not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(f"`microbatches` must be an integer >= 1. Received: {microbatches!r}.")
        found = multi_worker.read_cluster(cluster_resolver)
        topology = found.topology
        policy = compression_policy(compression)
        size = topology.size if pipeline_size is None else pipeline_size
        # Check `pipeline_size` here, before any worker waits for others.
        RankMesh.of_hosts([0] * topology.size, size)
        self.microbatches = microbatches
        self._schedule, self._virtual_stages = schedule, virtual_stages
        self._schedules: dict[int, Schedule] = {}
        self._pipeline_size = size
        self.schedule_for(microbatches)
        group = join(found)
        group.agree("shard_optimizer", str(bool(shard_optimizer)))
        division = multi_worker.agreed_input_division(group, input_division)
        multi_worker.share_randomness(group)
        name = getattr(schedule, "__qualname__", schedule)
        group.agree("pipeline", f"{size} workers, {microbatches} microbatches, {name}")
        if topology.size > 1:
            choose(group, "native")
            if shard_optimizer:
                group.fix("its workers shard the optimizer of a model in stages")
            if policy is not None:
                group.fix("its workers compress the gradients of a model in stages")
        hosts: Sequence[int] = (0,)
        if topology.size > 1:
            own = group.native().hosts
            hosts = own if group.joiner is None else _hosts_of(topology)
        mesh = RankMesh.of_hosts(hosts, size)
        self._name, self._divides_batches = str(mesh), mesh.pipeline_count > 1
        if group.joiner is not None:
            mesh = RankMesh.of_one(mesh.pipeline_rank_of(topology.rank), size)
        self._pipeline_rank = mesh.pipeline_rank_of(group.topology.rank)
        devices = local_devices(group)
        if len(devices) > 1:
            raise UnsupportedError(
                f"A pipeline worker must have one device. Received: {len(devices)} in this "
                "process. Start one worker per device, with CUDA_VISIBLE_DEVICES or "
                "`tfdist run --gpus-per-worker`."
            )
        on_gpus = topology.size > 1 and sums_on_gpus(group, devices)
        self._gpus = devices if on_gpus else []
        self.pipeline_communicator: Communicator = Alone()
        extended = PipelineExtended(
            self,
            devices[0],
            group,
            mesh,
            self._pipeline_rank,
            topology.size,
            self._gpus,
            self._connect,
        )
        extended.cluster_resolver = cluster_resolver or multi_worker.resolver_of(group, found)
        extended.input_division = division
        extended.compressor = make_compressor(
            group, policy, devices[0], extended.workers, extended.replicas[0], mesh
        )
        extended.shards_optimizers = bool(shard_optimizer) and mesh.pipeline_count > 1
        tf.distribute.Strategy.__init__(self, extended)
        group.role_of = self._role_of

    def explain(self, model: Any, batch: Any) -> Any:
        """Prints all values that the workers communicate in a training step.

        For each transfer, the report shows the value, its size in bytes, and the layer, variable or
        line of code from which the value comes. If `model` is a `tfdist.PipelineModel`, all workers
        must call this method.

        Args:
            model: a compiled model, created in the scope of this strategy.
            batch: a global batch as for `fit`, such as a pair of inputs and targets.

        Returns:
            A list of transfers, as in `tfdist.MultiWorkerMirroredStrategy.explain`. Transfers
            between stages have the kind "send".

        Example:
            >>> strategy.explain(model, (x[:64], y[:64]))
            The step reduces 0 B, gathers 0 B and sends 64.0 KiB between stages: …
        """
        if not is_pipeline_model(model):
            refuse_in_one_piece(model, "explain")
            return super().explain(model, batch)
        found = model.explain_on_batch(batch)
        print(report(found))
        return found

    def _role_of(self, rank: int) -> str:
        stages = self.stages_of(pipeline_extended_of(self).mesh.pipeline_rank_of(rank))
        return f"which holds stage {', '.join(map(str, stages))}"

    def _connect(self, group: Group, mesh: RankMesh) -> tuple[Communicator, Communicator]:
        """Opens the communicators of this worker's pipeline and of its data group.

        Returns:
            Two communicators of the data group: one for values in CPU memory, and one for the
            replicas' values.
        """
        rank = group.topology.rank
        if self._pipeline_size > 1 and group.joiner is None:
            members = list(mesh.pipeline_of(rank))
            part = group.native_part(f"pipeline of {self._name}", members)
            assert part is not None
            self.pipeline_communicator = part
        if not self._divides_batches:
            return Alone(), Alone()
        members = list(mesh.data_group_of(rank))
        workers, replicas = part_communicators(group, f"data of {self._name}", members, self._gpus)
        assert workers is not None
        assert replicas is not None
        return workers, replicas

    @property
    def pipeline_size(self) -> int:
        """The number of workers per pipeline."""
        return self._pipeline_size

    @property
    def pipeline_rank(self) -> int:
        """This worker's position in its pipeline, which never changes while the process runs."""
        return self._pipeline_rank

    @property
    def stages(self) -> int:
        """The number of stages into which a model is cut."""
        return self.schedule_for(self.microbatches).stages

    def pipeline_rank_of(self, stage: int) -> int:
        """Returns the pipeline rank of the worker that holds a stage."""
        return self.schedule_for(self.microbatches).rank_of(stage)

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Returns the indices of the stages that the worker with a given pipeline rank holds."""
        return self.schedule_for(self.microbatches).stages_of(pipeline_rank)

    def schedule_for(self, microbatches: int) -> Schedule:
        """Returns the schedule for a given number of microbatches.

        Args:
            microbatches: the number of microbatches, which is less than `self.microbatches` if a
                batch has too few rows.
        """
        if microbatches not in self._schedules:
            self._schedules[microbatches] = make_schedule(
                self._schedule, self._pipeline_size, microbatches, self._virtual_stages
            )
        return self._schedules[microbatches]


def _hosts_of(topology: Topology) -> list[int]:
    """Returns, for each worker, the index of the first worker with the same host address."""
    names = [worker.address.rpartition(":")[0] for worker in topology.workers]
    return [names.index(name) for name in names]


class PipelineStrategy(HybridStrategy):
    """Trains a model in stages on a single pipeline of all workers; see `HybridStrategy`.

    Args:
        microbatches: the number of microbatches into which a batch is cut. If a batch has fewer
            rows, there are fewer microbatches.
        schedule: as for `HybridStrategy`.
        virtual_stages: as for `HybridStrategy`.
        cluster_resolver: as for `HybridStrategy`.
        communication: as for `HybridStrategy`.

    Example:
        ```python
        strategy = tfdist.PipelineStrategy(microbatches=8, schedule="zb_h1")
        with strategy.scope():
            model = tfdist.PipelineModel(build_model)
            model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(dataset)
        ```
    """

    def __init__(
        self,
        *,
        microbatches: int = 8,
        schedule: str | Callable[..., Any] = "1f1b",
        virtual_stages: int | None = None,
        cluster_resolver: ClusterResolver | None = None,
        communication: Literal["auto", "native"] = "auto",
    ) -> None:
        super().__init__(
            microbatches=microbatches,
            schedule=schedule,
            virtual_stages=virtual_stages,
            cluster_resolver=cluster_resolver,
            communication=communication,
        )
