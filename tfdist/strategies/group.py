"""This process's membership in its group of workers: joined once, shared by all strategies."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from tfdist.cluster import Session, Topology, meet, observe
from tfdist.cluster.net.wait_messages import say
from tfdist.cluster.this_worker import note_joined
from tfdist.collective import flight_log, registry
from tfdist.collective.communicator_interface import Alone
from tfdist.collective.native_communicator import (
    NativeCommunicator,
    open_communicator,
    open_local_communicators,
)
from tfdist.errors import ClusterError, ProgramMismatchError, UnsupportedError
from tfdist.internals.tensorflow import abort_collectives, start_server
from tfdist.monitoring import report
from tfdist.options import Options
from tfdist.strategies.error_cause import plain


class Group:
    """The workers of one job, as seen by one of them.

    Attributes:
        topology: the workers and this process's rank.
        session: the control connections among them.
        options: the settings from the environment.
    """

    def __init__(self, topology: Topology, session: Session, options: Options) -> None:
        self.topology = topology
        self.session = session
        self.options = options
        self._loss: str | None = None
        self._lost = threading.Event()
        self._step_began: float | None = None
        self._native: dict[str, NativeCommunicator] = {}
        self._timeouts: dict[str, float] = {}
        self._warned_of_timeout = False
        self._parts: dict[str, NativeCommunicator | None] = {}
        self._devices: list[NativeCommunicator] = []
        self._serves_tensorflow = False
        self._here = threading.local()

    def native(self, name: str = "workers", timeout: float | None = None) -> NativeCommunicator:
        """The native communicator of all workers under a name, created at the first call.

        All workers call this.

        Args:
            name: the communicator's name.
            timeout: seconds a collective may take, if the communicator is created by this call,
                otherwise ignored with a warning; by default the value in the settings.

        Raises:
            NativeUnavailableError: the core cannot be compiled or loaded here.
            TfdistError: the workers cannot be connected; the same error on all of them.
        """
        if name not in self._native:
            everyone = range(self.topology.size)
            options = self._options(timeout)
            communicator = open_communicator(self.session, name, everyone, options)
            assert communicator is not None
            self.session.on_peer_lost(communicator.abort)
            self._native[name] = communicator
            observe(self.session, self.options)
            self._timeouts[name] = options.collective_timeout
        elif timeout and timeout != self._timeouts[name]:
            self._warn_of_timeout(timeout, self._timeouts[name])
        return self._native[name]

    def native_part(
        self, name: str, members: list[int], timeout: float | None = None
    ) -> NativeCommunicator | None:
        """A native communicator of some workers, created at the first call.

        All workers call this.

        Args:
            name: the name of the groups, the same on all workers; there is one communicator per
                name and members.
            members: the ranks in this worker's group; empty for a worker in none.
            timeout: as for `native`.

        Raises:
            TfdistError: the workers cannot be connected; the same error on all of them.
        """
        key = f"{name} of {members}"
        if key not in self._parts:
            part = open_communicator(self.session, name, members, self._options(timeout))
            if part is not None:
                self.session.on_peer_lost(part.abort)
            self._parts[key] = part
        return self._parts[key]

    def native_devices(self, devices: list[str]) -> list[NativeCommunicator]:
        """For each device of this worker, its handle on the native communicator of all of them.

        Raises:
            NativeUnavailableError: the core cannot be compiled or loaded here.
        """
        if not self._devices:
            names = [f"{self.topology.me} {device.rsplit('device:')[-1]}" for device in devices]
            self._devices = open_local_communicators("devices", names, self.options)
            for communicator in self._devices:
                self.session.on_peer_lost(communicator.abort)
        return self._devices

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
        self.session.on_peer_lost(self._lose)
        self.session.on_peer_left(self._expect_no_more_steps)

    def close(self) -> None:
        """Leaves the group, as happens at process exit."""
        for communicator in (*self._native.values(), *self._parts.values(), *self._devices):
            if communicator is not None:
                communicator.close()
        self.session.close()

    def _warn_of_timeout(self, ignored: float, used: float) -> None:
        if self._warned_of_timeout or not self.topology.is_chief:
            return
        self._warned_of_timeout = True
        say(
            "tfdist: the first strategy of a process sets `timeout_seconds` of "
            f"`communication_options` for all. Received: {ignored:g} s for a later strategy, whose "
            f"collectives keep the {used:g} s of the first. Pass it to the first one, or set "
            "TFDIST_COLLECTIVE_TIMEOUT."
        )

    def _options(self, timeout: float | None) -> Options:
        if not timeout:
            return self.options
        return dataclasses.replace(self.options, collective_timeout=timeout)

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
                raise type(error)(None, None, plain(error)) from error
            # TensorFlow may notice the loss just before the control connection does.
            if self.topology.size > 1 and self._lost.wait(_LOSS_REPORT_SECONDS):
                raise tf.errors.UnavailableError(None, None, self._loss) from error
            raise
        finally:
            self._step_began = None
            self._here.in_step = outer

    @property
    def in_step(self) -> bool:
        """Whether this thread is inside `naming_lost_workers`."""
        return getattr(self._here, "in_step", False)

    def fail(self, message: str) -> None:
        """Fails the workers that wait for this one in native collectives, with a message."""
        for communicator in (*registry.every(), *self._devices):
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
                    "Run one script, with the same arguments and data, on all workers."
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
_joined: Group | None = None


def join(topology: Topology) -> Group:
    """Joins the group, or returns the membership that this process already has.

    Args:
        topology: the cluster and this process's rank in it.

    Raises:
        ClusterError: the process is already a member of another group.
        RendezvousError: not all workers connected in time.
    """
    global _joined
    if topology.size == 1:
        options = Options.from_environment()
        if _joined is None:
            # In a job, "workers" is the communicator of all its workers.
            registry.put("workers", Alone())
        return Group(topology, meet(Topology(), options), options)
    if _joined is None:
        _joined = _join(topology)
        note_joined(topology)
    elif (_joined.topology.fingerprint(), _joined.topology.rank) != (
        topology.fingerprint(),
        topology.rank,
    ):
        raise ClusterError(
            f"This process is {_joined.topology.me} of a running group and cannot become "
            f"{topology.me} of another. Start a new process for another cluster."
        )
    return _joined


def joined_group() -> Group | None:
    """The group that this process has joined, if any."""
    return _joined


def _join(topology: Topology) -> Group:
    flight_log.survive_signal()
    options = Options.from_environment()
    session = meet(topology, options)
    session.report.made_by(report.reporter(session))
    group = Group(topology, session, options)
    registry.forget_alone("workers")
    group.agree("TensorFlow", f"{tf.__version__} on Python {platform.python_version()}")
    return group
