"""A communicator over the native core: shared memory within a host, TCP between hosts."""

from __future__ import annotations

import atexit
import copy
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.cluster import Loss, Mesh, Session, connect
from tfdist._src.cluster.session import exit_reason
from tfdist._src.comm import flight_log, native_ops, registry, tokens
from tfdist._src.comm.buckets import plan
from tfdist._src.comm.cause import FAILED, LOST, SILENT, Cause
from tfdist._src.comm.communicator_interface import NativeCommunicator, Traffic
from tfdist._src.comm.gpu import Gpu
from tfdist._src.comm.tracing import marked_buckets
from tfdist._src.internals.tensorflow import are_results_watched, only_reads_resources
from tfdist._src.native.api import Link, Setup, Statistics
from tfdist._src.options import Options
from tfdist.errors import UnsupportedError


def rank_and_size(communicator: str) -> tuple[tf.Tensor, tf.Tensor]:
    """This process's rank in a communicator, and the number of ranks, as int32 scalars.

    Args:
        communicator: the communicator's name.
    """
    operations = native.load_ops()
    rank, size = operations.tfdist_group_shape(order=_order(), communicator=communicator)
    return rank, size


@functools.cache
def _order() -> tf.Tensor:
    """The resource that the call reads.

    Without one, TensorFlow would run the call in order with all operations with side effects.
    """
    only_reads_resources("TfdistGroupShape")
    return tokens.make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)


def gather_strings(tensor: tf.Tensor, all_gather: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Gathers a string tensor as its bytes and their lengths.

    Args:
        tensor: strings of any shape with rank >= 1.
        all_gather: concatenates the group's numeric tensors along axis 0.
    """
    flat = tf.reshape(tensor, [-1])
    codes = tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8)
    lengths = all_gather(tf.strings.length(flat))
    rows = tf.reduce_sum(all_gather(tf.shape(tensor)[:1]))
    codes = all_gather(tf.cast(codes, tf.int32))
    letters = tf.gather(tf.constant([bytes([code]) for code in range(256)]), codes)
    words = tf.strings.reduce_join(tf.RaggedTensor.from_row_lengths(letters, lengths), axis=1)
    row = tf.shape(tensor)[1:]
    return tf.ensure_shape(
        tf.reshape(words, tf.concat([[rows], row], axis=0)), [None, *tensor.shape[1:]]
    )


def setup_of(mesh: Mesh, options: Options, gpus: Sequence[Gpu] = (), news: int = -1) -> Setup:
    """The core's setup for a connected rank.

    Args:
        mesh: the rank's descriptors.
        options: the settings.
        gpus: the GPUs that operations run on; empty for the CPU.
        news: a socket to which the core writes a byte when the communicator is aborted; -1 for
            none.
    """

    def integers(values: Sequence[int]) -> Any:
        return (ctypes.c_int * len(values))(*values)

    def texts(values: Sequence[bytes]) -> Any:
        return (ctypes.c_char_p * len(values))(*values)

    return Setup(
        name=mesh.name.encode(),
        rank=mesh.rank,
        size=mesh.size,
        ranks=texts([name.encode() for name in mesh.ranks]),
        hosts=integers(mesh.hosts),
        control=integers(mesh.control),
        data=integers(mesh.data),
        segment=mesh.segment,
        segment_bytes=mesh.segment_bytes,
        silence_warning_seconds=options.silence_warning,
        silence_timeout_seconds=options.heartbeat_timeout,
        stall_seconds=options.stall_warning,
        timeout_seconds=options.collective_timeout,
        start_seconds=options.start_timeout,
        algorithm=options.algorithm.encode(),
        tls_certificate=os.fsencode(options.tls_certificate),
        tls_key=os.fsencode(options.tls_key),
        tls_ca=os.fsencode(options.tls_ca),
        tls_secret=options.secret.encode(errors="surrogateescape"),
        gpus=len(gpus),
        gpu_numbers=integers([gpu.number for gpu in gpus]),
        gpu_kernels=texts([os.fsencode(gpu.kernels) for gpu in gpus]),
        cuda_library=os.fsencode(options.cuda_library),
        nccl_library=os.fsencode(gpus[0].nccl if gpus else ""),
        device_algorithm=options.device_algorithm.encode(),
        device_buffer_bytes=options.device_buffers,
        news=news,
    )


# Longer than the core waits until Python has supplied the stacks of its threads.
_FLIGHT_LOG_SECONDS = 3.0
_open: dict[int, tuple[Callable[[Cause], None], str]] = {}


def add(number: int, abort: Callable[[Cause], None], rank: str) -> None:
    """Registers a communicator of the native core to be closed at exit.

    Args:
        number: the core's number of the communicator.
        abort: fails its operations on all ranks.
        rank: the name of this process's rank in messages.
    """
    _open[number] = abort, rank
    # Registered again as the newest handler, so that it is called before the session leaves.
    atexit.unregister(_leave)
    atexit.register(_leave)


def discard(number: int) -> None:
    """Removes a communicator that has been closed; calling this again has no effect."""
    _open.pop(number, None)


def _leave() -> None:
    """Closes all communicators, and reports the exception that terminates this process, if any."""
    if failure := exit_reason.failure():
        for abort, rank in list(_open.values()):
            abort(Cause(f"{rank} failed: {failure}", FAILED, rank))
    if _open:
        core = native.load().library
        # Wait for the flight log now: it shows the communicators until they are closed.
        core.tfd_flight_flush(_FLIGHT_LOG_SECONDS)
        core.tfd_close_all()


CLOSED = 0
"""The core's number for no communicator."""

_INVALID_ARGUMENT = 1


@dataclass
class Context:
    """This process's membership in a communicator of the core.

    Attributes:
        number: the core's number of the communicator; `CLOSED` before `open`.
        rank: this process's rank.
        size: the number of ranks.
        hosts: for each rank, the number of its host.
        session: the job's control connections; None if all ranks are threads.
        gpus: the GPUs that operations run on; empty for the CPU.
    """

    number: int
    rank: int
    size: int
    hosts: tuple[int, ...]
    session: Session | None
    gpus: tuple[Gpu, ...] = ()
    _remove_detector: Callable[[], None] | None = None

    def open(self, mesh: Mesh, options: Options, session: Session | None) -> None:
        """Opens a communicator of the core over a mesh, and takes over the mesh's descriptors.

        Raises:
            NativeUnavailableError: the core cannot be compiled or loaded.
            ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm, or a GPU cannot be
                used.
        """
        core = native.load().library
        native.load_ops()
        number = ctypes.c_int64()
        news = -1 if session is None else session.news
        setup = setup_of(mesh, options, self.gpus, news)
        # The core always closes the descriptor of the shared memory, and closes the sockets if it
        # fails. Until `hand_over`, Python closes the sockets in forked children.
        mesh.hand_over_segment()
        try:
            check(core, core.tfd_create(ctypes.byref(setup), ctypes.byref(number)))
        finally:
            mesh.hand_over()
        self.number, self.session = number.value, session
        self.rank, self.size, self.hosts = mesh.rank, mesh.size, mesh.hosts
        add(self.number, self.aborter(), mesh.ranks[mesh.rank])
        if session is not None:
            self._remove_detector = session.detect_by(self._detector())

    def traffic(self) -> Traffic:
        """The traffic so far over sockets, shared memory and the links between GPUs."""
        core, statistics = native.load().library, Statistics()
        check(core, core.tfd_get_statistics(self.number, ctypes.byref(statistics)))
        return Traffic(
            statistics.collectives,
            statistics.shared_bytes,
            statistics.sent_bytes,
            statistics.received_bytes,
            statistics.device_bytes,
        )

    def links(self) -> list[Link]:
        """The operating system's statistics of the connection to each rank."""
        core, links = native.load().library, (Link * self.size)()
        check(core, core.tfd_get_links(self.number, links))
        return list(links)

    def aborter(self) -> Callable[[Cause], None]:
        """Returns a function that aborts the currently open communicator, but no later one."""
        core, number = native.load().library, self.number

        def abort(cause: Cause) -> None:
            core.tfd_abort(number, *_encoded(cause))

        return abort

    def abort_on_loss(self, session: Session) -> None:
        """Aborts the currently open communicator as soon as a worker of the session is lost."""
        abort = self.aborter()

        def lose(message: str) -> None:
            loss = session.loss
            if loss is None:  # No worker is lost, as when the workers run different programs.
                abort(Cause(message))
            else:
                abort(Cause(message, SILENT if loss.silent else LOST, loss.worker))

        session.on_peer_lost(lose)

    def step_failed(self, cause: Cause) -> None:
        """Reports that this rank's step failed; ranks waiting for it fail with this cause."""
        native.load().library.tfd_step_failed(self.number, *_encoded(cause))

    def cause(self) -> Cause | None:
        """The event that aborted the communicator; None if it is not aborted, or is closed."""
        return _cause(native.load().library, self.number)

    def _detector(self) -> Callable[[], Loss | None]:
        """Returns a function that reports the worker that this open communicator lost, if any."""
        core, number = native.load().library, self.number

        def detect() -> Loss | None:
            cause = _cause(core, number)
            if cause is None or not cause.is_loss:
                return None
            return Loss(cause.worker, cause.message, silent=cause.event == SILENT)

        return detect

    def close(self) -> None:
        """Waits for pending operations and closes the communicator; idempotent."""
        discard(self.number)
        native.load().library.tfd_close(self.number)
        remove, self._remove_detector = self._remove_detector, None
        if remove is not None:
            remove()


def _cause(core: Any, number: int) -> Cause | None:
    return None if number == CLOSED else Cause.of(core.tfd_cause(number))


def _encoded(cause: Cause) -> tuple[bytes, bytes, bytes]:
    return cause.event.encode(), cause.worker.encode(), cause.message.encode()


def closed(gpus: Sequence[Gpu] = ()) -> Context:
    """A context that has not been opened yet."""
    return Context(CLOSED, 0, 1, (0,), None, tuple(gpus))


def check(core: Any, code: int) -> None:
    """Raises the core's error if a call has failed.

    Raises:
        ValueError: the arguments were invalid.
        RuntimeError: any other error.
    """
    if code:
        message = core.tfd_error().decode(errors="replace")
        raise ValueError(message) if code == _INVALID_ARGUMENT else RuntimeError(message)


BUCKET_BYTES = 4 << 20
FIRST_BYTES = 1 << 20


class CoreCommunicator(NativeCommunicator):
    """A communicator of the core; created by `open_communicator`.

    Its operations run eagerly and in `tf.function`, in the same order on all ranks. If a rank is
    lost, all pending and later operations raise `tf.errors.UnavailableError` on every rank. Ranks
    that call different operations raise `tf.errors.FailedPreconditionError`, which names both
    operations.

    Args:
        name: the group's name.
        context: this process's membership in the group, shared by all copies of this object.
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
        self._gpu = 0  # the index among the context's GPUs, if it has any
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
        if self.context.session is not None:  # A group of threads does not change.
            registry.note_read()

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        with tf.device(self.device):
            summable = [native_ops.to_native_summable(t) for t in tensors]
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
            return [native_ops.from_summable(s, t) for s, t in zip(sums, tensors, strict=True)]

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(self.device):
            summable = native_ops.to_native_summable(tensor)
            token, name = self.token, self.name
            part = native_ops.reduce_scatter(token, summable, "sum", name, "", gpu=self._gpu)
            return native_ops.from_summable(part, tensor)

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        with tf.device(self.device):
            if tensor.dtype == tf.string:
                return gather_strings(tensor, lambda part: self.all_gather(part, key))
            if tensor.dtype in native_ops.TYPES:
                return native_ops.all_gather(self.token, tensor, self.name, key, gpu=self._gpu)
            bits = native_ops.all_gather(self.token, native_ops.to_bits(tensor), self.name, key)
            return native_ops.from_bits(bits, tensor.dtype)

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
            bits = native_ops.broadcast(self.token, native_ops.to_bits(tensor), root, self.name, "")
            return native_ops.from_bits(bits, tensor.dtype)

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
        """The index of this handle's GPU among the context's GPUs, if it has any."""
        return self._gpu

    def on_gpu(self, index: int) -> CoreCommunicator:
        """The handle of one of the context's GPUs; each GPU contributes to every operation."""
        other = CoreCommunicator(self.name, self.context, self._options)
        other._gpu, other.bucket_bytes = index, self.bucket_bytes
        return other

    def with_buckets_of(self, bucket_bytes: int) -> CoreCommunicator:
        """The same communicator, with buckets of about `bucket_bytes`."""
        _ = self.token  # Created now, so that the copy shares it.
        other = copy.copy(self)
        other.bucket_bytes = bucket_bytes
        return other

    def plan(self, tensors: Sequence[tf.Tensor]) -> list[list[int]]:
        """Groups tensors into buckets, each reduced by one collective; see `buckets.plan`."""
        bytes_ = self.bucket_bytes
        return plan(tensors, bytes_, first_bytes=min(bytes_, FIRST_BYTES), alone_bytes=bytes_)

    def launches(self, plan: Sequence[Sequence[int]]) -> bool:
        """Whether a plan's collectives may end as soon as GPUs have started them.

        True if a plan has several collectives and they run on GPUs, unless a callback inspects the
        results of operations.
        """
        return bool(self.context.gpus) and len(plan) > 1 and not are_results_watched()

    def split(self, name: str, members: Sequence[int]) -> CoreCommunicator | None:
        if self.context.session is None:
            raise UnsupportedError("A communicator of this process's devices cannot be split.")
        return open_communicator(self.context.session, name, members, self._options)

    def traffic(self) -> Traffic:
        return self.context.traffic()

    def links(self) -> list[Link]:
        """The system's statistics of the connection to each rank; zeros for ranks of this host."""
        return self.context.links()

    def abort(self, message: str) -> None:
        """Fails all pending and later operations, on all ranks, with this message."""
        self.context.aborter()(Cause(message))

    def step_failed(self, message: str) -> None:
        """Reports that this rank's step failed; ranks that wait for it fail with this message.

        If the steps of all ranks fail, no rank waits, and the group remains usable.
        """
        self.context.step_failed(Cause(message, FAILED))

    def close(self) -> None:
        registry.remove(self.name, self)
        self.context.close()

    def reopen(self, session: Session, options: Options) -> None:
        """Opens this closed communicator again, with all ranks of a session.

        All ranks of the session call this or `open_communicator` at the same time. From then on,
        existing graphs and copies of this object use the new ranks.

        Raises:
            TfdistError: the group is not complete in time; the same error on all ranks.
            ValueError: a process of the group already has a communicator with this name.
        """
        mesh = _connect(session, self.name, range(session.size), options)
        assert mesh is not None
        self.context.open(mesh, options, session)
        registry.put(self.name, self)


def _cpu() -> str:
    return str(tf.config.list_logical_devices("CPU")[0].name)


def open_communicator(
    session: Session, name: str, members: Sequence[int], options: Options, gpus: Sequence[Gpu] = ()
) -> CoreCommunicator | None:
    """Connects a group of ranks; called by all ranks of the session together.

    Args:
        session: the job's control connections.
        name: the group's name, the same on all ranks.
        members: the job's ranks in this process's group, in the order of the group; empty if this
            process belongs to no group.
        options: the settings.
        gpus: the GPUs that operations run on, each with a handle from `on_gpu`; empty for the CPU.

    Returns:
        The communicator; None if this process belongs to no group.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        TfdistError: the group is not complete in time; the same error on all ranks.
        ValueError: a process of the group already has a communicator with this name (the same error
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
) -> CoreCommunicator:
    """The communicator of a connected rank; takes ownership of the mesh's descriptors.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm, or a GPU cannot be used.
    """
    context = closed(gpus)
    context.open(mesh, options, session)
    return CoreCommunicator(mesh.name, context, options)
