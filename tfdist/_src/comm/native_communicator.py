"""A communicator over the native core: shared memory within a host, TCP between hosts."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.cluster import Mesh, Session, connect
from tfdist._src.comm import dtypes, flight_log, native_ops, registry, tokens, traces
from tfdist._src.comm.buckets import plan
from tfdist._src.comm.context import Context, closed
from tfdist._src.comm.gpu import Gpu
from tfdist._src.comm.group_shape import rank_and_size
from tfdist._src.comm.overlap import marked_buckets
from tfdist._src.comm.strings import gather_strings
from tfdist._src.comm.traffic import Traffic
from tfdist._src.internals.tensorflow import are_results_watched
from tfdist._src.native.api import Link
from tfdist._src.options import Options
from tfdist.errors import UnsupportedError

BUCKET_BYTES = 4 << 20
FIRST_BYTES = 1 << 20


class NativeCommunicator:
    """This process's handle on a group of ranks; created by `open_communicator`.

    Its operations run eagerly and in `tf.function`, in the same order on all ranks. If a rank is
    lost, all pending and later operations raise `tf.errors.UnavailableError` on every rank. Ranks
    that call different operations raise `tf.errors.FailedPreconditionError`, which names both.

    Args:
        name: the group's name.
        context: this process's place in it, shared by all copies.
        options: the settings.

    Attributes:
        bucket_bytes: tensors are reduced in collectives of about this size.
    """

    def __init__(self, name: str, context: Context, options: Options) -> None:
        self.name = name
        self.context = context
        self._options = options
        self.bucket_bytes = BUCKET_BYTES
        # Set on first use, when TensorFlow's devices are initialized.
        self._device: str | None = None
        self._token: tf.Tensor | None = None
        self._gpu = 0  # which of the context's, if it has any
        self._token_lock = threading.Lock()

    @property
    def size(self) -> int:
        self._note_read()
        return self.context.size

    @property
    def rank(self) -> int:
        self._note_read()
        return self.context.rank

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each rank, the number of its host."""
        self._note_read()
        return self.context.hosts

    def place(self) -> tuple[Any, Any]:
        if tf.executing_eagerly() or self.context.session is None:
            rank, size = self.context.rank, self.context.size
        else:
            with tf.device(_cpu()):
                rank, size = rank_and_size(self.name)
        gpus = len(self.context.gpus)
        return (rank * gpus + self._gpu, size * gpus) if gpus > 1 else (rank, size)

    @property
    def lasting_name(self) -> str:
        return "" if self.context.session is None else self.name

    @property
    def across_workers(self) -> tuple[str, ...]:
        return (self.name,)

    def _note_read(self) -> None:
        if self.context.session is not None:  # The threads of a process do not change.
            traces.note_read()

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        with tf.device(self.device):
            summable = [dtypes.to_native_summable(t) for t in tensors]
            sums: list[Any] = [None] * len(summable)
            plan = self.plan(summable)
            awaited = self.launches(plan)
            first = self._gpu == 0
            for bucket in marked_buckets(self.name, key, summable, plan, notes=first):
                with tf.control_dependencies(bucket.marks):
                    reduced = native_ops.all_reduce(
                        self.token,
                        [summable[i] for i in bucket.members],
                        "sum",
                        self.name,
                        bucket.key,
                        overlaps=bucket.overlaps,
                        gpu=self._gpu,
                        awaited=awaited,
                    )
                for i, value in zip(bucket.members, reduced, strict=True):
                    sums[i] = value
            if awaited:
                sums = native_ops.await_launched(self.token, sums, self.name, key, gpu=self._gpu)
            return [dtypes.from_summable(s, t) for s, t in zip(sums, tensors, strict=True)]

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(self.device):
            summable = dtypes.to_native_summable(tensor)
            token, name = self.token, self.name
            part = native_ops.reduce_scatter(token, summable, "sum", name, "", gpu=self._gpu)
            return dtypes.from_summable(part, tensor)

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        with tf.device(self.device):
            if tensor.dtype == tf.string:
                return gather_strings(tensor, lambda part: self.all_gather(part, key))
            if tensor.dtype in native_ops.TYPES:
                return native_ops.all_gather(self.token, tensor, self.name, key, gpu=self._gpu)
            bits = native_ops.all_gather(self.token, dtypes.to_bits(tensor), self.name, key)
            return dtypes.from_bits(bits, tensor.dtype)

    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        """Returns the root's value, bit for bit, on all ranks; shapes and types must agree."""
        if tensor.dtype in (tf.string, tf.resource, tf.variant):
            raise UnsupportedError(
                f"A tensor of type {tensor.dtype.name} cannot be broadcast to the other workers. "
                "Create it outside of the strategy's scope."
            )
        with tf.device(self.device):
            if tensor.dtype in native_ops.TYPES:
                return native_ops.broadcast(self.token, tensor, root, self.name, "", gpu=self._gpu)
            bits = native_ops.broadcast(self.token, dtypes.to_bits(tensor), root, self.name, "")
            return dtypes.from_bits(bits, tensor.dtype)

    @property
    def device(self) -> str:
        """The device that operations run on: this process's CPU, or one of the context's GPUs."""
        if self._device is None:
            gpus = self.context.gpus
            self._device = gpus[self._gpu].device if gpus else _cpu()
        return self._device

    @property
    def token(self) -> tf.Tensor:
        """The resource that operations hold so that they run in order."""
        tokens.note_collective()
        with self._token_lock:
            if self._token is None:
                self._token = tokens.make(self.device, tf.float32)
            return self._token

    @property
    def gpu(self) -> int:
        """Which of the context's GPUs this handle is of, if it has any."""
        return self._gpu

    def on_gpu(self, index: int) -> NativeCommunicator:
        """The handle of one of the context's GPUs: each brings its part to every operation."""
        other = NativeCommunicator(self.name, self.context, self._options)
        other._gpu, other.bucket_bytes = index, self.bucket_bytes
        return other

    def with_buckets_of(self, bucket_bytes: int) -> NativeCommunicator:
        """The same communicator with collectives of about this size."""
        _ = self.token  # Created now, so that both share it.
        other = copy.copy(self)
        other.bucket_bytes = bucket_bytes
        return other

    def plan(self, tensors: Sequence[tf.Tensor]) -> list[list[int]]:
        """Groups tensors into buckets, each reduced by one collective; see `buckets.plan`."""
        bytes_ = self.bucket_bytes
        return plan(tensors, bytes_, first_bytes=min(bytes_, FIRST_BYTES), alone_bytes=bytes_)

    def launches(self, plan: Sequence[Sequence[int]]) -> bool:
        """Whether a plan's collectives end when GPUs have begun them: several, unseen by others."""
        return bool(self.context.gpus) and len(plan) > 1 and not are_results_watched()

    def split(self, name: str, members: Sequence[int]) -> NativeCommunicator | None:
        """Creates a communicator of some of the job's ranks; called by all of them together.

        Args:
            name: the name of the new group, the same on all ranks; several groups may have the
                same name if each process is in at most one of them.
            members: the job's ranks in this process's group, in the group's order; empty for a
                process in none.

        Returns:
            The new communicator; None for a process in no group.

        Raises:
            UnsupportedError: the ranks are threads of this process.
            ValueError: a process of the group has a communicator of this name.
        """
        if self.context.session is None:
            raise UnsupportedError("A communicator of this process's devices cannot be split.")
        return open_communicator(self.context.session, name, members, self._options)

    def traffic(self) -> Traffic:
        """This communicator's traffic so far."""
        return self.context.traffic()

    def links(self) -> list[Link]:
        """The kernel's counts of each rank's connection; all zero for ranks of this host."""
        return self.context.links()

    def abort(self, message: str) -> None:
        """Fails all pending and later operations, on all ranks, with this message."""
        self.context.aborter()(message)

    def step_failed(self, message: str) -> None:
        """Reports that this rank's step failed: ranks that wait for it fail with this message.

        If the steps of all ranks fail, no rank waits, and the group remains usable.
        """
        native.load().library.tfd_step_failed(self.context.number, message.encode())

    def close(self) -> None:
        """Waits for pending operations and leaves the group; idempotent."""
        registry.remove(self.name, self)
        self.context.close()

    def reopen(self, session: Session, options: Options) -> None:
        """Connects all ranks of a session under the name of this communicator, which is closed.

        All ranks of the session call this together, or `open_communicator`. Graphs and copies of
        this object use the new ranks from then on.

        Raises:
            As `open_communicator`.
        """
        mesh = _connect(session, self.name, range(session.size), options)
        assert mesh is not None
        self.context.open(mesh, options, session)
        registry.put(self.name, self)


def _cpu() -> str:
    return str(tf.config.list_logical_devices("CPU")[0].name)


def open_communicator(
    session: Session, name: str, members: Sequence[int], options: Options, gpus: Sequence[Gpu] = ()
) -> NativeCommunicator | None:
    """Connects a group of ranks; called by all ranks of the session together.

    Args:
        session: the job's control connections.
        name: the group's name, the same on all ranks.
        members: the job's ranks in this process's group, in its order; none for a process in none.
        options: the settings.
        gpus: the GPUs that operations run on, each with a handle by `on_gpu`; none for the CPU.

    Returns:
        None for a process in no group.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        TfdistError: the group is not complete in time; the same error on all ranks.
        ValueError: a process of the group already has a communicator of this name (the same error
            on all ranks), `TFDIST_ALGORITHM` is not the name of an algorithm, or a GPU cannot be
            used.
    """
    mesh = _connect(session, name, members, options)
    if mesh is None:
        return None
    communicator = open_mesh(mesh, options, session, gpus)
    registry.put(name, communicator)
    return communicator


def _connect(session: Session, name: str, members: Sequence[int], options: Options) -> Mesh | None:
    registry.check_free(session, name, members)
    flight_log.start(session, options)
    segment_bytes = native.load().library.tfd_segment_bytes
    return connect(session, name, members, options, segment_bytes)


def open_mesh(
    mesh: Mesh, options: Options, session: Session | None = None, gpus: Sequence[Gpu] = ()
) -> NativeCommunicator:
    """The communicator of a connected rank; takes ownership of the mesh's descriptors.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm, or a GPU cannot be used.
    """
    context = closed(gpus)
    context.open(mesh, options, session)
    return NativeCommunicator(mesh.name, context, options)
