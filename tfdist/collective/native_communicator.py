"""A communicator over the native core: shared memory within a host, TCP between hosts."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import native
from tfdist.cluster import Mesh, Session, connect
from tfdist.cluster.mesh.in_process import connect_threads
from tfdist.collective import at_exit, dtypes, flight_log, native_ops, registry, tokens
from tfdist.collective.buckets import plan
from tfdist.collective.core_setup import setup_of
from tfdist.collective.overlap import marked_buckets
from tfdist.collective.strings import gather_strings
from tfdist.collective.traffic import Traffic
from tfdist.errors import UnsupportedError
from tfdist.native.api import Link, Statistics
from tfdist.options import Options

BUCKET_BYTES = 4 << 20
FIRST_BYTES = 1 << 20


class NativeCommunicator:
    """This process's handle on a group of ranks; created by `open_communicator`.

    Its operations run eagerly and in `tf.function`, in the same order on all ranks. If a rank is
    lost, all pending and later operations raise `tf.errors.UnavailableError` on every rank. Ranks
    that call different operations raise `tf.errors.FailedPreconditionError`, which names both.

    Args:
        number: the core's number of the communicator.
        mesh: the group.
        options: the settings.
        session: the job's control connections, for `split`; None if all ranks are threads.

    Attributes:
        bucket_bytes: tensors are reduced in collectives of about this size.
    """

    def __init__(
        self, number: int, mesh: Mesh, options: Options, session: Session | None = None
    ) -> None:
        self.name = mesh.name
        self._number = number
        self._rank, self._size, self._hosts = mesh.rank, mesh.size, mesh.hosts
        self._session, self._options = session, options
        self.bucket_bytes = BUCKET_BYTES
        self._core = native.load().library
        # Set on first use, when TensorFlow's devices are initialized.
        self._host: str | None = None
        self._token: tf.Tensor | None = None
        self._token_lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def hosts(self) -> tuple[int, ...]:
        """For each rank, the number of its host."""
        return self._hosts

    def all_reduce(self, tensors: Sequence[tf.Tensor], key: str = "") -> list[tf.Tensor]:
        with tf.device(self.host):
            summable = [dtypes.to_native_summable(t) for t in tensors]
            sums: list[Any] = [None] * len(summable)
            for bucket in marked_buckets(self.name, key, summable, self.plan(summable)):
                with tf.control_dependencies(bucket.marks):
                    reduced = native_ops.all_reduce(
                        self.token,
                        [summable[i] for i in bucket.members],
                        "sum",
                        self.name,
                        bucket.key,
                        overlaps=bucket.overlaps,
                    )
                for i, value in zip(bucket.members, reduced, strict=True):
                    sums[i] = value
            return [dtypes.from_summable(s, t) for s, t in zip(sums, tensors, strict=True)]

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(self.host):
            summable = dtypes.to_native_summable(tensor)
            part = native_ops.reduce_scatter(self.token, summable, "sum", self.name, "")
            return dtypes.from_summable(part, tensor)

    def all_gather(self, tensor: tf.Tensor, key: str = "") -> tf.Tensor:
        with tf.device(self.host):
            if tensor.dtype == tf.string:
                return gather_strings(tensor, lambda part: self.all_gather(part, key))
            if tensor.dtype in native_ops.TYPES:
                return native_ops.all_gather(self.token, tensor, self.name, key)
            bits = native_ops.all_gather(self.token, dtypes.to_bits(tensor), self.name, key)
            return dtypes.from_bits(bits, tensor.dtype)

    def broadcast(self, tensor: tf.Tensor, root: int = 0) -> tf.Tensor:
        """Returns the root's value, bit for bit, on all ranks; shapes and types must agree."""
        if tensor.dtype in (tf.string, tf.resource, tf.variant):
            raise UnsupportedError(
                f"A tensor of type {tensor.dtype.name} cannot be broadcast to the other workers. "
                "Create it outside of the strategy's scope."
            )
        with tf.device(self.host):
            if tensor.dtype in native_ops.TYPES:
                return native_ops.broadcast(self.token, tensor, root, self.name, "")
            bits = native_ops.broadcast(self.token, dtypes.to_bits(tensor), root, self.name, "")
            return dtypes.from_bits(bits, tensor.dtype)

    @property
    def host(self) -> str:
        """The device that operations run on: this process's CPU."""
        if self._host is None:
            self._host = str(tf.config.list_logical_devices("CPU")[0].name)
        return self._host

    @property
    def token(self) -> tf.Tensor:
        """The resource that operations hold so that they run in order."""
        tokens.note_use()
        with self._token_lock:
            if self._token is None:
                self._token = tokens.make(self.host, tf.float32)
            return self._token

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
            ValueError: a process of the group already has a communicator of this name.
        """
        if self._session is None:
            raise UnsupportedError("A communicator of this process's devices cannot be split.")
        return open_communicator(self._session, name, members, self._options)

    def traffic(self) -> Traffic:
        """This communicator's traffic so far."""
        statistics = Statistics()
        _check(self._core, self._core.tfd_get_statistics(self._number, ctypes.byref(statistics)))
        return Traffic(
            statistics.collectives,
            statistics.shared_bytes,
            statistics.sent_bytes,
            statistics.received_bytes,
        )

    def links(self) -> list[Link]:
        """The kernel's counts of the connection to each rank; all zero for ranks of this host."""
        links = (Link * self.size)()
        _check(self._core, self._core.tfd_get_links(self._number, links))
        return list(links)

    def abort(self, message: str) -> None:
        """Fails all pending and later operations, on all ranks, with this message."""
        self._core.tfd_abort(self._number, message.encode())

    def step_failed(self, message: str) -> None:
        """Reports that this rank's step failed: ranks that wait for it fail with this message.

        If the steps of all ranks fail, no rank waits, and the group remains usable.
        """
        self._core.tfd_step_failed(self._number, message.encode())

    def close(self) -> None:
        """Waits for pending operations and leaves the group; idempotent."""
        at_exit.discard(self._number)
        registry.remove(self.name, self)
        self._core.tfd_close(self._number)


def open_communicator(
    session: Session, name: str, members: Sequence[int], options: Options
) -> NativeCommunicator | None:
    """Connects a group of ranks; called by all ranks of the session together.

    Args:
        session: the job's control connections.
        name: the group's name, the same on all ranks.
        members: the job's ranks in this process's group, in the group's order; empty for a process
            in none.
        options: the settings.

    Returns:
        The communicator; None for a process in no group.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        TfdistError: the group is not complete in time; the same error on all ranks.
        ValueError: a process of the group already has a communicator of this name (the same error
            on all ranks), or `TFDIST_ALGORITHM` is not the name of an algorithm.
    """
    registry.check_free(session, name, members)
    flight_log.start(session, options)
    segment_bytes = native.load().library.tfd_segment_bytes
    mesh = connect(session, name, members, options, segment_bytes)
    if mesh is None:
        return None
    communicator = open_mesh(mesh, options, session)
    registry.put(name, communicator)
    return communicator


def open_local_communicators(
    name: str, ranks: Sequence[str], options: Options
) -> list[NativeCommunicator]:
    """Connects ranks that are threads of this process.

    Args:
        name: the group's name.
        ranks: the name of each rank in messages.
        options: the settings.

    Returns:
        The communicator of each rank.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        OSError: out of memory or file descriptors.
        ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm.
    """
    meshes = connect_threads(name, ranks, native.load().library.tfd_segment_bytes)
    try:
        return [open_mesh(mesh, options) for mesh in meshes]
    finally:
        for mesh in meshes:
            mesh.close()  # Frees those without a communicator after an error.


def open_mesh(mesh: Mesh, options: Options, session: Session | None = None) -> NativeCommunicator:
    """The communicator of a connected rank; takes ownership of the mesh's descriptors.

    Raises:
        NativeUnavailableError: the core cannot be compiled or loaded.
        ValueError: `TFDIST_ALGORITHM` is not the name of an algorithm.
    """
    core = native.load().library
    native.load_ops()
    number = ctypes.c_int64()
    setup = setup_of(mesh, options)
    # The core closes the memory's descriptor at once, and the sockets if it fails. Until it has
    # them registered, a forked child closes them for Python.
    mesh.hand_over_segment()
    try:
        _check(core, core.tfd_create(ctypes.byref(setup), ctypes.byref(number)))
    finally:
        mesh.hand_over()
    communicator = NativeCommunicator(number.value, mesh, options, session)
    at_exit.add(number.value, communicator.abort, mesh.ranks[mesh.rank])
    return communicator


def _check(core: Any, code: int) -> None:
    if code:
        message = core.tfd_error().decode(errors="replace")
        raise ValueError(message) if code == _INVALID_ARGUMENT else RuntimeError(message)


_INVALID_ARGUMENT = 1
