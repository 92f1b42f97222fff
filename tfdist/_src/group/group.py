"""The group of workers that all strategies of a process share."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist._src.cluster import Joiner, Membership, Session, Topology
from tfdist._src.cluster.this_worker import note_joined
from tfdist._src.comm import flight_log, registry
from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.compression.compressor import Compressor
from tfdist._src.group.communicators import Communicators
from tfdist._src.group.error_cause import plain
from tfdist._src.internals.tensorflow import abort_collectives, start_server
from tfdist._src.monitoring import report
from tfdist._src.options import Options
from tfdist.errors import ProgramMismatchError, UnsupportedError


class Group:
    """The workers of one job, as seen by one of them.

    Args:
        topology: the workers and this process's rank.
        session: the control connections among them.
        options: the settings from the environment.
        elastic: see below.
        joiner: see below.
        label: tells its communicators from those of other groups of this process.

    Attributes:
        topology: as given, until `regroup`.
        session: as given, until `regroup`.
        options: as given.
        elastic: whether the workers may become others, set before data is distributed. A single
            worker has communicators then, and models see no static number of rows.
        joiner: waits to be admitted to the running job that this process has found; None otherwise.
        membership: decides who belongs to the group; None until that is needed.
        role_of: what the worker with a rank does that others do not, as a clause for messages about
            its loss; None where all do the same.
    """

    def __init__(
        self,
        topology: Topology,
        session: Session,
        options: Options,
        *,
        elastic: bool = False,
        joiner: Joiner | None = None,
        label: str = "",
    ) -> None:
        self.topology = topology
        self.session = session
        self.options = options
        self._loss: str | None = None
        self._lost = threading.Event()
        self._step_began: float | None = None
        self.elastic = elastic
        self.joiner = joiner
        self.membership: Membership | None = None
        self.role_of: Callable[[int], str] | None = None
        self._communicators = Communicators(options, label)
        self._compressors: list[weakref.ref[Compressor]] = []
        self._fixed_because = ""
        self._serves_tensorflow = False
        self._here = threading.local()

    def native(self, name: str = "workers", timeout: float | None = None) -> NativeCommunicator:
        """The native communicator of all workers under a name; all of them call this.

        Args:
            timeout: seconds a collective may take, if the communicator is created by this call,
                otherwise ignored with a warning; by default the value in the settings.

        Raises:
            NativeUnavailableError: the core cannot be compiled or loaded here.
            TfdistError: the workers cannot be connected; the same error on all of them.
        """
        return self._communicators.named(self.session, name, timeout)

    def native_part(
        self, name: str, members: list[int], timeout: float | None = None, gpus: Sequence[str] = ()
    ) -> NativeCommunicator | None:
        """A native communicator of some workers, created at the first call of all of them.

        Args:
            name: the name of the groups, the same on all workers; there is one communicator per
                name and members.
            members: the ranks in this worker's group; empty for a worker in none.
            timeout: as for `native`.
            gpus: TensorFlow's names of this worker's GPUs, if operations run on them.
        """
        return self._communicators.part(self.session, name, members, timeout, gpus)

    def native_gpus(self, devices: list[str], timeout: float | None) -> list[NativeCommunicator]:
        """For each GPU of this worker, its handle on the communicator of all workers' GPUs.

        All workers call this; see `native`.
        """
        return self._communicators.on_gpus(self.session, devices, timeout)

    def native_devices(self, devices: list[str]) -> list[NativeCommunicator]:
        """For each device of this worker, its handle on the native communicator of all of them.

        Raises:
            NativeUnavailableError: the core cannot be compiled or loaded here.
        """
        me = str(self.topology.me) if self.topology.workers else "this process"
        names = [f"{me} {device.rsplit('device:')[-1]}" for device in devices]
        return self._communicators.of_devices(self.session, names)

    @property
    def generation(self) -> int:
        """How often the group has changed since the job started."""
        return self.topology.generation

    def follow(self, compressor: Compressor) -> None:
        """Has a compressor make its routes anew after each change of the group, while it lives."""
        self._compressors = [one for one in self._compressors if one() is not None]
        self._compressors.append(weakref.ref(compressor))

    def fix(self, reason: str) -> None:
        """Has `regroup` refuse, for a reason: a clause that begins with what cannot follow."""
        self._fixed_because = self._fixed_because or reason

    def check_can_change(self) -> None:
        """Checks that other workers can take the place of these.

        Raises:
            UnsupportedError: something in use cannot follow a change of the group.
        """
        obstacle = self._fixed_because
        if not (obstacle or self._communicators.exist):
            obstacle = "this worker has not used the native collectives so far"
        if obstacle:
            raise UnsupportedError(
                f"The workers of a running job cannot change here: {obstacle}. Restart the job "
                "with the other workers, from a snapshot of tfdist.callbacks.BackupAndRestore."
            )

    def regroup(self, session: Session) -> None:
        """Goes on with the workers of another session, which may have other ranks, or be new.

        All workers of that session call this together, while no step runs. This object, the
        communicators and what refers to them stay; those that the user has split off are closed.
        If it fails, it can be called again, with another session.

        Raises:
            UnsupportedError: something in use cannot follow a change of the group.
            ProgramMismatchError: the workers compress differently.
            TfdistError: the workers cannot be connected, or another one is lost.
        """
        self.check_can_change()
        self._communicators.close_for_change(self.session.failure)
        self.session.close()
        self.session, self.topology = session, session.topology
        note_joined(self.topology)
        introduce(session)
        flight_log.move(session, self.options)
        self._communicators.reopen(session)
        self._renew_compressors()

    def _renew_compressors(self) -> None:
        """Rank 0's routes count: a worker that is new may have made none so far."""
        living = filter(None, (reference() for reference in self._compressors))
        used = [compressor for compressor in living if compressor.routes]
        routes = json.dumps([compressor.routes for compressor in used])
        self.agree("routes of compressed gradients", routes)
        for compressor in used:
            compressor.renew()

    def serve_tensorflow(self) -> None:
        """Starts TensorFlow's server, through which its collectives reach the other workers.

        Raises:
            UnsupportedError: TensorFlow has already run an operation.
        """
        if self._serves_tensorflow or self.topology.size == 1:
            return
        self.session.address.evict()
        chief, me = self.topology.chief, self.topology.me
        leader = f"/job:{chief.task_type}/replica:0/task:{chief.task_index}"
        try:
            start_server(self.topology.jobs, me.task_type, me.task_index, leader)
        except RuntimeError as error:
            raise UnsupportedError(
                "TensorFlow ran an operation before the strategy was created, so its collectives "
                "can no longer reach the other workers. Create the strategy first, right after the "
                "imports."
            ) from error
        self._serves_tensorflow = True
        self.fix("its strategy uses TensorFlow's collectives, not communication='native'")
        self.session.on_peer_lost(self._lose)
        self.session.on_peer_left(self._expect_no_more_steps)

    def close(self) -> None:
        """Leaves the group, as happens at process exit."""
        self._communicators.close()
        self.session.close()

    def _lose(self, message: str) -> None:
        self._loss = message
        self._lost.set()
        abort_collectives(message)

    def _expect_no_more_steps(self, message: str) -> None:
        def watch() -> None:
            while not self._lost.wait(1.0):
                since = self._step_began
                if since is not None and time.monotonic() - since > _LAST_STEP_SECONDS:
                    self._lose(message)

        threading.Thread(target=watch, daemon=True).start()

    @contextlib.contextmanager
    def naming_lost_workers(self) -> Iterator[None]:
        """Names the lost worker when a collective fails because of it.

        Raises:
            tf.errors.UnavailableError: a worker was lost; the message names it.
        """
        self._step_began = time.monotonic()
        outer, self._here.in_step = self.in_step, True
        try:
            yield
        except _FAILURES as error:
            if not self._serves_tensorflow:
                raise type(error)(None, None, self._with_roles(plain(error))) from error
            # TensorFlow may notice the loss just before the control connection does.
            if self.topology.size > 1 and self._lost.wait(_LOSS_REPORT_SECONDS):
                raise tf.errors.UnavailableError(None, None, self._loss) from error
            raise
        finally:
            self._step_began = None
            self._here.in_step = outer

    def _with_roles(self, message: str) -> str:
        if self.role_of is None:
            return message
        for rank, worker in enumerate(self.topology.workers):
            if f"{worker} is lost" in message:
                message = message.replace(str(worker), self.described(rank))
        return message

    def described(self, rank: int) -> str:
        """The worker with a rank, and its role if it has one."""
        # A single process has no cluster.
        worker = str(self.topology.workers[rank]) if self.topology.workers else "this process"
        return worker if self.role_of is None else f"{worker}, {self.role_of(rank)},"

    @property
    def in_any_step(self) -> bool:
        """Whether any thread is inside `naming_lost_workers`."""
        return self._step_began is not None

    @property
    def in_step(self) -> bool:
        """Whether this thread is inside `naming_lost_workers`."""
        return getattr(self._here, "in_step", False)

    def fail(self, message: str) -> None:
        """Fails the workers that wait for this one in native collectives, with a message."""
        for communicator in (*registry.every(), *self._communicators.local):
            if isinstance(communicator, NativeCommunicator):
                communicator.step_failed(message)

    def end(self, cause: str) -> None:
        """Ends the group if it uses TensorFlow's collectives, which do not recover from errors."""
        if self._serves_tensorflow and not self._lost.is_set():
            abort_collectives(cause)
            self.session.close(cause)

    def exchange(self, topic: str, text: str) -> list[str]:
        """Every worker's text for a topic, in rank order; called by all workers."""
        if self.topology.size == 1:
            return [text]
        return [t.decode() for t in self.session.exchange(topic, text.encode())]

    def agree(self, topic: str, text: str) -> None:
        """Checks that all workers pass the same text for a topic.

        Raises:
            ProgramMismatchError: they do not; the message names the first two that differ.
        """
        texts = self.exchange(topic, text)
        for rank, other in enumerate(texts):
            if other != texts[0]:
                workers = self.topology.workers
                raise ProgramMismatchError(
                    f"The workers do not run the same program: {workers[0]} has the {topic} "
                    f"{texts[0]!r} where {workers[rank]} has {other!r}. "
                    "Run one script, with the same arguments and data, on all workers, and train "
                    "and predict in one thread."
                )


_FAILURES = (
    tf.errors.UnavailableError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.UnknownError,
)
_LOSS_REPORT_SECONDS = 2.0
_LAST_STEP_SECONDS = 5.0


def introduce(session: Session) -> None:
    """Has rank 0 learn from this process how it goes, whenever it is asked."""
    session.report.made_by(report.reporter(session))
