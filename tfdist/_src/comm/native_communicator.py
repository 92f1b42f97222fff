"""Communicators of the native core: shared memory within a host, and TCP between hosts."""

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
    """Returns this process's rank in a communicator and the number of ranks, as int32 tensors.

    In a graph, the values are read each time the graph runs.

    Args:
        communicator: the communicator's name.
    """
    operations = native.load_ops()
    rank, size = operations.tfdist_group_shape(order=_order(), communicator=communicator)
    return rank, size


@functools.cache
def _order() -> tf.Tensor:
    """Returns a resource for the operation of `rank_and_size`, which only reads this resource.

    Without a resource, TensorFlow would run the operation in program order with all other stateful
    operations, and would delay it unnecessarily.
    """
    only_reads_resources("TfdistGroupShape")
    return tokens.make(str(tf.config.list_logical_devices("CPU")[0].name), tf.float32)


def gather_strings(tensor: tf.Tensor, all_gather: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Gathers the string tensors of all ranks.

    Collectives do not support strings, so this function gathers the bytes and the lengths.

    Args:
        tensor: a string tensor with at least one axis.
        all_gather: a function that concatenates the numeric tensors of all ranks along the first
            axis.
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
    """Converts the description of a connected rank to the structure that the core expects.

    Args:
        mesh: the rank's connections to the other ranks of its group.
        options: the settings.
        gpus: the GPUs on which operations run; empty if they run on the CPU.
        news: the descriptor of a socket. The core writes a byte to the socket when the communicator
            is aborted. -1 if no socket is needed.
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


# This limit must be longer than the time for which the core waits for the stacks of Python's
# threads.
_FLIGHT_LOG_SECONDS = 3.0
_open: dict[int, tuple[Callable[[Cause], None], str]] = {}


def add(number: int, abort: Callable[[Cause], None], rank: str) -> None:
    """Registers a communicator of the native core, so that it is closed when this process exits.

    Args:
        number: the number by which the core identifies the communicator.
        abort: a function that makes the communicator's operations fail on all ranks.
        rank: the name of this process in messages, such as "worker 1 (10.0.0.2:8470)".
    """
    _open[number] = abort, rank
    # Python calls the newest handler first. Registering this handler again makes sure that it runs
    # before the handler that closes the session.
    atexit.unregister(_leave)
    atexit.register(_leave)


def discard(number: int) -> None:
    """Removes a closed communicator from the registered ones; further calls have no effect."""
    _open.pop(number, None)


def _leave() -> None:
    """Closes all communicators when this process exits.

    If an exception ends the process, the other ranks' operations fail with a message about the
    exception.
    """
    if failure := exit_reason.failure():
        for abort, rank in list(_open.values()):
            abort(Cause(f"{rank} failed: {failure}", FAILED, rank))
    if _open:
        core = native.load().library
        # A flight log that has been requested must be written before the communicators are closed,
        # because it does not show closed ones.
        core.tfd_flight_flush(_FLIGHT_LOG_SECONDS)
        core.tfd_close_all()


CLOSED = 0
"""The number that the core returns if there is no communicator."""

_INVALID_ARGUMENT = 1


@dataclass
class Context:
    """This process's membership in a communicator of the core.

    Attributes:
        number: the number by which the core identifies the communicator; `CLOSED` before `open` is
            called.
        rank: this process's rank in the communicator.
        size: the number of ranks.
        hosts: for each rank, a number that identifies its host.
        session: the control connections of the job; None if the ranks are threads of this process.
        gpus: the GPUs on which operations run; empty if they run on the CPU.
    """

    number: int
    rank: int
    size: int
    hosts: tuple[int, ...]
    session: Session | None
    gpus: tuple[Gpu, ...] = ()
    _remove_detector: Callable[[], None] | None = None

    def open(self, mesh: Mesh, options: Options, session: Session | None) -> None:
        """Opens a communicator of the core that uses the connections of a mesh.

        The core becomes the owner of the mesh's descriptors and closes them later.

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
        # `tfd_create` closes the descriptor of the shared memory in any case, and the sockets if it
        # fails. If Python forks before `hand_over`, it closes the sockets in the child process.
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
        """Returns the traffic so far over sockets, through shared memory and between GPUs."""
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
        """Returns, for each rank, the operating system's statistics about the connection to it."""
        core, links = native.load().library, (Link * self.size)()
        check(core, core.tfd_get_links(self.number, links))
        return list(links)

    def aborter(self) -> Callable[[Cause], None]:
        """Returns a function that aborts the communicator that is open now.

        If this object is opened again later, the function does not abort the new communicator.
        """
        core, number = native.load().library, self.number

        def abort(cause: Cause) -> None:
            core.tfd_abort(number, *_encoded(cause))

        return abort

    def abort_on_loss(self, session: Session) -> None:
        """Makes the loss of a worker abort the communicator that is open now."""
        abort = self.aborter()

        def lose(message: str) -> None:
            loss = session.loss
            # The session has ended for another reason, for example because the workers run
            # different programs.
            if loss is None:
                abort(Cause(message))
            else:
                abort(Cause(message, SILENT if loss.silent else LOST, loss.worker))

        session.on_peer_lost(lose)

    def step_failed(self, cause: Cause) -> None:
        """Reports that this rank's step has failed.

        Ranks that wait for this rank then fail with the same cause.
        """
        native.load().library.tfd_step_failed(self.number, *_encoded(cause))

    def cause(self) -> Cause | None:
        """Returns the event that aborted the communicator.

        Returns None if the communicator has not been aborted, or has been closed.
        """
        return _cause(native.load().library, self.number)

    def _detector(self) -> Callable[[], Loss | None]:
        """Returns a function that checks whether the communicator has lost a worker.

        The function returns a description of the loss, or None. It keeps checking the communicator
        that is open now, even if this object is opened again later.
        """
        core, number = native.load().library, self.number

        def detect() -> Loss | None:
            cause = _cause(core, number)
            if cause is None or not cause.is_loss:
                return None
            return Loss(cause.worker, cause.message, silent=cause.event == SILENT)

        return detect

    def close(self) -> None:
        """Waits for pending operations and closes the communicator; later calls have no effect."""
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
    """Creates a context that has not been opened yet."""
    return Context(CLOSED, 0, 1, (0,), None, tuple(gpus))


def check(core: Any, code: int) -> None:
    """Raises an error with the core's message if a function of the core has failed.

    Raises:
        ValueError: the function received an invalid argument.
        RuntimeError: the function failed for another reason.
    """
    if code:
        message = core.tfd_error().decode(errors="replace")
        raise ValueError(message) if code == _INVALID_ARGUMENT else RuntimeError(message)


BUCKET_BYTES = 4 << 20
FIRST_BYTES = 1 << 20


class CoreCommunicator(NativeCommunicator):
    """A communicator of the native core. `open_communicator` creates objects of this class.

    Operations can be called eagerly and in a `tf.function`, in the same order on all ranks. If a
    rank is lost, all pending and later operations raise `tf.errors.UnavailableError` on every
    remaining rank. If two ranks call different operations, these raise a
    `tf.errors.FailedPreconditionError` that names both operations.

    Args:
        name: the group's name.
        context: this process's membership in the group. All copies of this object share it.
        options: the settings.

    Attributes:
        bucket_bytes: the approximate number of bytes that one collective reduces. Smaller tensors
            are packed into buckets of this size.
    """

    def __init__(self, name: str, context: Context, options: Options) -> None:
        self.name = name
        self.context = context
        self._options = options
        self.bucket_bytes = BUCKET_BYTES
        # These attributes are set on first use, because setting them initializes TensorFlow's
        # devices.
        self._device: str | None = None
        self._token: tf.Tensor | None = None
        self._gpu = 0  # an index into `context.gpus`, if there are any
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
        """For each rank, a number that identifies its host."""
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
        if self.context.session is not None:  # If the ranks are threads, the group never changes.
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
        """Returns the root's tensor on all ranks, without changing any bit.

        All ranks must pass a tensor of the same shape and type.
        """
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
        """The device on which operations run: this process's CPU, or one of the context's GPUs."""
        if self._device is None:
            gpus = self.context.gpus
            self._device = gpus[self._gpu].device if gpus else _cpu()
        return self._device

    @property
    def token(self) -> tf.Tensor:
        """The resource that all operations take as an input, so that they run in program order."""
        tokens.note_collective()
        with self._token_lock:
            if self._token is None:
                self._token = tokens.make(self.device, tf.float32)
            return self._token

    @property
    def gpu(self) -> int:
        """The index of this object's GPU in `context.gpus`; 0 if operations run on the CPU."""
        return self._gpu

    def on_gpu(self, index: int) -> CoreCommunicator:
        """Returns the object through which one of the context's GPUs calls operations.

        Every operation must be called for each of the context's GPUs.
        """
        other = CoreCommunicator(self.name, self.context, self._options)
        other._gpu, other.bucket_bytes = index, self.bucket_bytes
        return other

    def with_buckets_of(self, bucket_bytes: int) -> CoreCommunicator:
        """Returns a copy that packs tensors into buckets of about `bucket_bytes`."""
        _ = self.token  # Creates the token now, so that the copy has the same one.
        other = copy.copy(self)
        other.bucket_bytes = bucket_bytes
        return other

    def plan(self, tensors: Sequence[tf.Tensor]) -> list[list[int]]:
        """Groups tensors into buckets, so that one collective reduces all tensors of a bucket.

        See `buckets.plan`.
        """
        bytes_ = self.bucket_bytes
        return plan(tensors, bytes_, first_bytes=min(bytes_, FIRST_BYTES), alone_bytes=bytes_)

    def launches(self, plan: Sequence[Sequence[int]]) -> bool:
        """Whether the collectives of a plan may end before the GPUs have computed their results.

        Starting several collectives without waiting for each result saves time. This is possible
        only on GPUs, and only if no callback of TensorFlow inspects the results of operations.
        """
        return bool(self.context.gpus) and len(plan) > 1 and not are_results_watched()

    def split(self, name: str, members: Sequence[int]) -> CoreCommunicator | None:
        if self.context.session is None:
            raise UnsupportedError("A communicator of this process's devices cannot be split.")
        return open_communicator(self.context.session, name, members, self._options)

    def traffic(self) -> Traffic:
        return self.context.traffic()

    def links(self) -> list[Link]:
        """Returns, for each rank, the operating system's statistics about the connection to it.

        The statistics of ranks on this host are zero.
        """
        return self.context.links()

    def abort(self, message: str) -> None:
        """Makes all pending and later operations fail with this message, on all ranks."""
        self.context.aborter()(Cause(message))

    def step_failed(self, message: str) -> None:
        """Reports that this rank's step has failed.

        Ranks that wait for this rank then fail with the same message. If the steps of all ranks
        have failed, no rank waits for another, and the group can still be used.
        """
        self.context.step_failed(Cause(message, FAILED))

    def close(self) -> None:
        registry.remove(self.name, self)
        self.context.close()

    def reopen(self, session: Session, options: Options) -> None:
        """Opens this closed communicator again. It then connects the ranks of `session`.

        All ranks of the session must call either this method or `open_communicator` at the same
        time. Existing graphs and copies of this object then use the new ranks.

        Raises:
            TfdistError: some ranks of the group have not connected before the time limit. All ranks
                raise the same error.
            ValueError: a process of the group already has an open communicator with this name.
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
    """Creates a communicator by connecting a group of ranks.

    All ranks of the session must call this function together.

    Args:
        session: the control connections of the job.
        name: the group's name, the same on all ranks.
        members: the members of this process's group, as ranks in the job. Their order determines
            the ranks in the group. Empty if this process belongs to no group.
        options: the settings.
        gpus: the GPUs on which operations run; empty if they run on the CPU. `on_gpu` returns the
            object through which a GPU calls operations.

    Returns:
        The communicator; None if `members` is empty.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        TfdistError: some ranks of the group have not connected before the time limit. All ranks
            raise the same error.
        ValueError: a process of the group already has an open communicator with this name, in which
            case all ranks raise the same error. Or `TFDIST_ALGORITHM` is not the name of an
            algorithm, or a GPU cannot be used.
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
    """Creates the communicator of a rank that is already connected to the others.

    The communicator becomes the owner of the mesh's descriptors.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm, or a GPU cannot be used.
    """
    context = closed(gpus)
    context.open(mesh, options, session)
    return CoreCommunicator(mesh.name, context, options)
