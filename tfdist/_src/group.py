"""The group of workers that all strategies of a process share.

A process joins its group only once. Later, the workers can change the members of the group together
(`Group.regroup`).
"""

import contextlib
import dataclasses
import json
import platform
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist._src.cluster import (
    Joiner,
    Membership,
    ResolvedJob,
    Session,
    Topology,
    complete,
    meet,
    meet_or_join,
    observe,
)
from tfdist._src.cluster.this_worker import note_joined
from tfdist._src.comm import device_communicator, flight_log, gpu, registry
from tfdist._src.comm.cause import Cause
from tfdist._src.comm.native_communicator import CoreCommunicator, open_communicator
from tfdist._src.comm.registry import OneRank
from tfdist._src.compression.compressor import Compressor
from tfdist._src.internals.tensorflow import abort_collectives, start_server
from tfdist._src.log import logger
from tfdist._src.monitoring import report
from tfdist._src.options import Options
from tfdist.errors import ClusterError, ProgramMismatchError, UnsupportedError

_COLORS = re.compile(r"\x1b\[[\d;]*m")
# An error message of Keras begins with this text and a location. The cause is on the next line.
_KERAS_PREFIX = "Exception encountered when calling"
# An error message of AutoGraph begins with this line, followed by a traceback. The last line of the
# traceback is the actual error.
_AUTOGRAPH_PREFIX = "in user code:"


def cause(error: BaseException) -> str:
    """Returns an error's type and the first line of its message.

    Example:
        >>> cause(ValueError("wrong\\nin detail"))
        'ValueError: wrong'
    """
    kind = type(error).__name__
    text = plain(error) if isinstance(error, tf.errors.OpError) else str(error)
    lines = [line.strip() for line in _COLORS.sub("", text).splitlines() if line.strip()]
    if lines and lines[0].startswith(_KERAS_PREFIX) and len(lines) > 1:
        lines = [f"{lines[0]} {lines[1]}"]
    if lines and lines[0] == _AUTOGRAPH_PREFIX:
        lines = [lines[-1].removeprefix(f"{kind}: ")]
    return f"{kind}: {lines[0]}" if lines else kind


def plain(error: tf.errors.OpError) -> str:
    """Returns an error's message without TensorFlow's description of the failed operation."""
    lines = [line.strip() for line in str(error.message).splitlines()]
    lines = [line for line in lines if line]
    ends = [i for i, line in enumerate(lines) if line.startswith("[[{{node")]
    text = lines[ends[0] - 1] if ends and ends[0] else str(error.message)
    # TensorFlow adds these parts to the message of an operation that ran eagerly.
    return re.sub(r"^\{\{function_node \S+ ?\}\} | \[Op:\w+\] name: *$", "", text)


ON_GPUS = "workers' GPUs"
"""The name of the communicator whose operations run on the processes' GPUs."""

_DEVICES = "devices"


class Communicators:
    """A process's native communicators: with the other workers, and among its own devices.

    Args:
        options: the settings.
        label: a text in the names of the communicators, which distinguishes the groups of one
            process; "" for the job's group.
    """

    def __init__(self, options: Options, label: str = "") -> None:
        self._options = options
        self._on_gpus = f"{ON_GPUS}, {label}" if label else ON_GPUS
        self._of_devices = f"{_DEVICES}, {label}" if label else _DEVICES
        self._named: dict[str, CoreCommunicator] = {}
        self._timeouts: dict[str, float] = {}
        self._warned_of_timeout = False
        self._parts: dict[str, CoreCommunicator | None] = {}
        self._gpus: list[str] = []
        self._devices: list[CoreCommunicator] = []
        self._device_names: list[str] = []

    @property
    def local(self) -> list[CoreCommunicator]:
        """The communicators of this worker's devices."""
        return self._devices

    @property
    def exist(self) -> bool:
        """Whether a communicator with the other workers exists."""
        return bool(self._named)

    def named(self, session: Session, name: str, timeout: float | None) -> CoreCommunicator:
        """Returns the communicator of all workers with the given name; the first call opens it."""
        if name not in self._named:
            options = self._with(timeout)
            found = gpu.find(self._gpus, options) if name == self._on_gpus else ()
            everyone = range(session.size)
            communicator = open_communicator(session, name, everyone, options, found)
            assert communicator is not None
            communicator.context.abort_on_loss(session)
            self._named[name] = communicator
            observe(session, self._options)
            self._timeouts[name] = options.collective_timeout
        elif timeout and timeout != self._timeouts[name]:
            self._warn_of_timeout(session, timeout, self._timeouts[name])
        return self._named[name]

    def on_gpus(
        self, session: Session, devices: list[str], timeout: float | None
    ) -> list[CoreCommunicator]:
        """Returns the communicator of all workers' GPUs: one object for each GPU of this worker."""
        self._gpus = self._gpus or devices
        communicator = self.named(session, self._on_gpus, timeout)
        return [communicator.on_gpu(index) for index in range(len(devices))]

    def part(
        self,
        session: Session,
        name: str,
        members: list[int],
        timeout: float | None,
        gpus: Sequence[str],
    ) -> CoreCommunicator | None:
        """Returns the communicator of the ranks `members`, or None if `members` is empty.

        The first call with the same `name` and `members` opens the communicator.
        """
        key = f"{name} of {members}"
        if key not in self._parts:
            options = self._with(timeout)
            found = gpu.find(gpus, options) if members else ()
            part = open_communicator(session, name, members, options, found)
            if part is not None:
                part.context.abort_on_loss(session)
            self._parts[key] = part
        return self._parts[key]

    def of_devices(self, session: Session, names: list[str]) -> list[CoreCommunicator]:
        """Returns the communicators of this worker's devices, which the first call opens."""
        if not self._devices:
            self._devices = device_communicator.open_local_communicators(
                self._of_devices, names, self._options
            )
            self._device_names = names
            self._watch_devices(session)
        return self._devices

    def close(self, cause: str | None = None) -> None:
        """Closes all communicators.

        Args:
            cause: the reason why the communicators have failed; None if they have not failed. If a
                reason is given, the method does not wait for other ranks.
        """
        for communicator in (*self._named.values(), *self._parts.values(), *self._devices):
            if communicator is not None:
                _close(communicator, cause)

    def close_for_change(self, cause: str | None) -> None:
        """Closes all communicators, including the communicators that user code has split off."""
        self.close(cause)
        self._parts.clear()
        for communicator in registry.every():
            if isinstance(communicator, CoreCommunicator):
                _close(communicator, cause)

    def reopen(self, session: Session) -> None:
        """Connects the communicators to the workers of a new session. Called by all workers.

        Rank 0 determines which communicators all workers have afterward, because a new worker may
        have opened other communicators before.
        """
        if self._devices:
            device_communicator.reopen_local_communicators(
                self._devices, self._of_devices, self._device_names, self._options
            )
            self._watch_devices(session)
        own = json.dumps(list(self._timeouts.items()))
        chiefs: dict[str, float] = dict(
            json.loads(session.exchange("communicators", own.encode())[0])
        )
        before, self._named = self._named, {}
        for name, timeout in chiefs.items():
            communicator = before.pop(name, None)
            if communicator is None:
                self.named(session, name, timeout)
                continue
            self._named[name] = communicator
            communicator.reopen(session, self._with(timeout))
            communicator.context.abort_on_loss(session)
        self._timeouts = chiefs
        observe(session, self._options)

    def _watch_devices(self, session: Session) -> None:
        for communicator in self._devices:
            communicator.context.abort_on_loss(session)

    def _with(self, timeout: float | None) -> Options:
        if not timeout:
            return self._options
        return dataclasses.replace(self._options, collective_timeout=timeout)

    def _warn_of_timeout(self, session: Session, ignored: float, used: float) -> None:
        if self._warned_of_timeout or not session.topology.is_chief:
            return
        self._warned_of_timeout = True
        logger.warning(
            "the first strategy of a process sets `timeout_seconds` of "
            f"`communication_options` for all. Received: {ignored:g} s for a later strategy, whose "
            f"collectives keep the {used:g} s of the first. Pass it to the first one, or set "
            "TFDIST_COLLECTIVE_TIMEOUT."
        )


def _close(communicator: CoreCommunicator, cause: str | None) -> None:
    if cause:
        communicator.abort(cause)
    communicator.close()


class Group:
    """The group of workers of a job, from the point of view of one worker.

    Args:
        topology: the workers and this process's rank.
        session: the control connections among the workers.
        options: the settings from the environment.
        elastic: the initial value of the attribute `elastic`.
        joiner: the value of the attribute `joiner`.
        label: a text that distinguishes this group's communicators from the communicators of other
            groups in this process.

    Attributes:
        topology: the workers and this process's rank; `regroup` replaces it.
        session: the control connections among the workers; `regroup` replaces it.
        options: the settings from the environment.
        elastic: whether workers may be lost, join or be replaced. The attribute must be set before
            data is distributed. In an elastic group, even a single worker has communicators, and a
            model cannot know the number of rows of a batch while a step is traced.
        joiner: an object that asks a running job to admit this process; None if the process is
            already a member.
        membership: the object that decides which workers are members of the group; None until it is
            needed.
        role_of: a function that takes a rank and returns a clause about the role of its worker, for
            messages about the loss of this worker. None if all workers have the same role.
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

    def native(self, name: str = "workers", timeout: float | None = None) -> CoreCommunicator:
        """Returns the native communicator of all workers with the given name.

        All workers call this method together. The first call opens the communicator.

        Args:
            timeout: the maximum number of seconds that a collective may take; by default, the value
                in the settings. If the communicator was opened earlier with another timeout, the
                method logs a warning and keeps the earlier timeout.

        Raises:
            NativeUnavailableError: the core cannot be compiled or loaded on this worker.
            TfdistError: the workers cannot be connected; all workers raise the same error.
        """
        return self._communicators.named(self.session, name, timeout)

    def native_part(
        self, name: str, members: list[int], timeout: float | None = None, gpus: Sequence[str] = ()
    ) -> CoreCommunicator | None:
        """Returns the native communicator of the ranks `members`; None if `members` is empty.

        All workers call this method together, each with the members of its own part of the workers.
        The first call opens the communicators of the parts.

        Args:
            name: the name of the communicators, the same on all workers. Each combination of a name
                and a list of members has a communicator of its own.
            members: the ranks in the same part as this worker; empty if this worker is in no part.
            timeout: as for `native`.
            gpus: TensorFlow's names of this worker's GPUs, if the operations of the communicator
                run on GPUs.
        """
        return self._communicators.part(self.session, name, members, timeout, gpus)

    def native_gpus(self, devices: list[str], timeout: float | None) -> list[CoreCommunicator]:
        """Returns the communicator of all workers' GPUs: one object for each GPU of this worker.

        All workers call this method together, as for `native`.
        """
        return self._communicators.on_gpus(self.session, devices, timeout)

    def native_devices(self, devices: list[str]) -> list[CoreCommunicator]:
        """Returns the native communicators of this worker's devices, one per device.

        Raises:
            NativeUnavailableError: the core cannot be compiled or loaded on this worker.
        """
        me = str(self.topology.me) if self.topology.workers else "this process"
        names = [f"{me} {device.rsplit('device:')[-1]}" for device in devices]
        return self._communicators.of_devices(self.session, names)

    @property
    def generation(self) -> int:
        """The number of times that the group has changed since the job started."""
        return self.topology.generation

    def follow(self, compressor: Compressor) -> None:
        """Registers a compressor, which renews its routes after each change of the group.

        The group holds only a weak reference to the compressor.
        """
        self._compressors = [one for one in self._compressors if one() is not None]
        self._compressors.append(weakref.ref(compressor))

    def fix(self, reason: str) -> None:
        """Marks the group as fixed, so that later calls of `regroup` raise an error.

        Args:
            reason: a clause for the error message, which names the feature that does not allow a
                change of the group. If the group is already fixed, the first reason is kept.
        """
        self._fixed_because = self._fixed_because or reason

    def check_can_change(self) -> None:
        """Checks that this group can continue with other workers.

        Raises:
            UnsupportedError: a feature in use does not support a change of the group.
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
        """Replaces the workers of this group by the workers of another session.

        All workers of that session call this method together, while no step runs. Some workers may
        be new, and ranks may change. Other objects may keep their references to this group, to its
        communicators of all workers, and to its communicators of devices. All other communicators
        are closed. These are the results of `native_part`, and the communicators that user code has
        created with `split`. After an error, the method can be called again with another session.

        Raises:
            UnsupportedError: a feature in use does not support a change of the group.
            ProgramMismatchError: the workers compress gradients differently.
            TfdistError: the workers cannot be connected, or another worker is lost.
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
        """Renews the routes of all compressors that already have routes. Called by all workers.

        Raises:
            ProgramMismatchError: the routes of the workers' compressors have different values of
                `within_hosts`.
        """
        living = filter(None, (reference() for reference in self._compressors))
        used = [compressor for compressor in living if compressor.routes]
        routes = json.dumps([compressor.routes for compressor in used])
        self.agree("routes of compressed gradients", routes)
        for compressor in used:
            compressor.renew()

    def serve_tensorflow(self) -> None:
        """Starts TensorFlow's server, which connects TensorFlow's collectives to other workers.

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
        """Leaves the group and closes its connections, as at the end of the process."""
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
        """Returns a context in which the error of a failed collective names a lost worker.

        Raises:
            tf.errors.UnavailableError: a worker was lost; the message names it.
        """
        began_ns, self._step_began = time.monotonic_ns(), time.monotonic()
        outer, self._here.in_step = self.in_step, True
        try:
            yield
        except _FAILURES as error:
            if not self._serves_tensorflow:
                message = self._with_roles(plain(error), self.cause_of(error, began_ns))
                raise type(error)(None, None, message) from error
            # TensorFlow may notice the loss before the control connection does, so wait for the
            # message from the control connection.
            if self.topology.size > 1 and self._lost.wait(_LOSS_REPORT_SECONDS):
                raise tf.errors.UnavailableError(None, None, self._loss) from error
            raise
        finally:
            self._step_began = None
            self._here.in_step = outer

    def _with_roles(self, message: str, cause: Cause | None) -> str:
        if self.role_of is None or cause is None or not cause.is_loss:
            return message
        for rank, worker in enumerate(self.topology.workers):
            if str(worker) == cause.worker:
                message = message.replace(cause.worker, self.described(rank))
        return message

    def described(self, rank: int) -> str:
        """Returns the name of the worker with a rank, and its role if roles are known."""
        # A single process may have no description of a cluster.
        worker = str(self.topology.workers[rank]) if self.topology.workers else "this process"
        return worker if self.role_of is None else f"{worker}, {self.role_of(rank)},"

    @property
    def in_any_step(self) -> bool:
        """Whether any thread is inside a context of `naming_lost_workers`."""
        return self._step_began is not None

    @property
    def in_step(self) -> bool:
        """Whether this thread is inside a context of `naming_lost_workers`."""
        return getattr(self._here, "in_step", False)

    def fail(self, cause: Cause) -> None:
        """Makes the native collectives of other workers fail if they wait for this worker."""
        for communicator in self._native():
            communicator.context.step_failed(cause)

    def causes(self) -> list[Cause]:
        """Returns the reasons why communicators of this process were aborted, earliest first."""
        found = [communicator.context.cause() for communicator in self._native()]
        return sorted(filter(None, found), key=lambda cause: cause.at_ns)

    def cause_of(self, error: BaseException, since_ns: int = 0) -> Cause | None:
        """Returns the cause of an operation's error if a communicator was aborted; otherwise None.

        Args:
            error: the operation's error.
            since_ns: the value of `time.monotonic_ns()` before the operation began.
        """
        return next((one for one in self.causes() if one.explains(error, since_ns)), None)

    def _native(self) -> list[CoreCommunicator]:
        every = (*registry.every(), *self._communicators.local)
        return [one for one in every if isinstance(one, CoreCommunicator)]

    def end(self, cause: str) -> None:
        """Ends the group if it uses TensorFlow's collectives, which an error makes unusable."""
        if self._serves_tensorflow and not self._lost.is_set():
            abort_collectives(cause)
            self.session.close(cause)

    def exchange(self, topic: str, text: str) -> list[str]:
        """Sends `text` to all workers, and returns the texts of all workers in rank order.

        All workers call this method together, with the same topic.
        """
        if self.topology.size == 1:
            return [text]
        return [t.decode() for t in self.session.exchange(topic, text.encode())]

    def agree(self, topic: str, text: str) -> None:
        """Checks that all workers call this method with the same text for a topic.

        Raises:
            ProgramMismatchError: the text of a worker differs from the text of rank 0; the message
                shows both texts.
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
    """Registers the function that makes this process's status report when rank 0 requests it."""
    session.report.made_by(report.reporter(session))


_joined: Group | None = None
_joined_by: Topology | None = None  # the topology with which the program has called `join`


def join(found: ResolvedJob, *, elastic: bool = False) -> Group:
    """Joins the group, or returns the group that this process has already joined.

    Args:
        found: the cluster and this process's rank in it.
        elastic: whether the workers may change; see `Group`.

    Raises:
        ClusterError: the process is already a member of another group.
        RendezvousError: not all workers connected in time.
    """
    global _joined, _joined_by
    topology = found.topology
    if topology.size == 1 and not (elastic or _is_same(topology, _joined_by)):
        if _joined is None:
            # Until this process joins a job, the communicator "workers" consists of this process
            # alone.
            registry.put("workers", OneRank("workers"))
        return _by_itself(topology)
    if _joined is None:
        _joined, _joined_by = _join(found, elastic), topology
        note_joined(_joined.topology, is_admitted=_joined.joiner is None)
    elif not _is_same(topology, _joined_by):
        raise ClusterError(
            f"This process is {_joined.topology.me} of a running group and cannot become "
            f"{topology.me} of another. Start a new process for another cluster."
        )
    return _joined


def join_devices(devices: Sequence[str]) -> Group:
    """Returns the group of this process alone that all strategies with the same devices share.

    Args:
        devices: TensorFlow's names, as returned by `tf.config.list_logical_devices`.
    """
    key = tuple(devices)
    if key not in _of_devices:
        label = ", ".join(device.rsplit("device:")[-1] for device in devices)
        _of_devices[key] = _by_itself(Topology(), label)
    return _of_devices[key]


_of_devices: dict[tuple[str, ...], Group] = {}


def _by_itself(topology: Topology, label: str = "") -> Group:
    options = Options.from_environment()
    return Group(topology, meet(Topology(), options), options, label=label)


def joined_group() -> Group | None:
    """The group that this process has joined; None if it has not joined one."""
    return _joined


def _alone(topology: Topology) -> Topology:
    """Returns a topology of this process alone, until a running job admits the process."""
    return dataclasses.replace(topology, workers=(topology.me,), rank=0)


def _is_same(topology: Topology, other: Topology | None) -> bool:
    return other is not None and (topology.fingerprint(), topology.rank) == (
        other.fingerprint(),
        other.rank,
    )


def _join(found: ResolvedJob, elastic: bool) -> Group:
    flight_log.survive_signal()
    topology, options = complete(found, Options.from_environment())
    met = meet_or_join(topology, options) if options.launcher.elastic else meet(topology, options)
    joiner = None
    if isinstance(met, Joiner):
        joiner, topology = met, _alone(topology)
        met = meet(topology, options)
    introduce(met)
    group = Group(topology, met, options, elastic=elastic or joiner is not None, joiner=joiner)
    registry.forget_alone("workers")
    group.agree("TensorFlow", f"{tf.__version__} on Python {platform.python_version()}")
    # The membership is created now, because a worker may be lost before training begins.
    if joiner is None and set(group.exchange("elastic", str(options.launcher.elastic))) == {"True"}:
        group.membership = Membership(met, options)
    return group
