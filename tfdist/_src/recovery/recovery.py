"""Continues training in the same process, but in another group of workers."""

import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist._src.cluster import Loss, Membership, Session, Topology
from tfdist._src.comm.cause import FAILED, LEFT, SILENT, Cause
from tfdist._src.group import Group
from tfdist._src.internals.iterators import set_initial_epoch
from tfdist._src.keras.fit.callback import protocol_of
from tfdist._src.keras.fit.hooks import Entries
from tfdist._src.keras.fit.metric_state import keep_totals
from tfdist._src.keras.fit.step_exchange import Request, step_exchange
from tfdist._src.keras.optimizers.applying import accumulate_sums
from tfdist._src.log import logger
from tfdist._src.monitoring.training import record
from tfdist._src.recovery import next_group, state_transfer
from tfdist._src.recovery.agreement import (
    Agreement,
    FitProgress,
    GroupShrinks,
    Stages,
    StagesMissing,
    agree,
)
from tfdist._src.recovery.fit_calls import allow_reentry, keep_validation
from tfdist._src.recovery.preemption import preemption, release
from tfdist._src.snapshots.shard_state import ShardState
from tfdist._src.snapshots.workers import broadcast_bytes, workers_of
from tfdist._src.strategy.extended import extended_of
from tfdist.errors import GroupLostError, PeerLostError, SnapshotError, TfdistError


class StaleGraphs:
    """Retraces a model's steps if their graphs may depend on ranks or the number of workers.

    Args:
        model: the model in training.
        divided: whether the model is divided into pipeline stages. The functions of stages depend
            on the group.
    """

    def __init__(self, model: keras.Model, *, divided: bool) -> None:
        self._model, self._extended = model, extended_of(model.distribute_strategy)
        self._divided = divided
        self._traces = False  # whether the next step is traced
        self._began = 0.0

    def group_changes(self) -> None:
        """Requests a new trace of the next step if one is needed."""
        if not (self._divided or self._extended.traces_know_group):
            return
        self._traces = True
        self._extended.traces_know_group = False
        if not self._divided:
            # A new worker needs this as well: its `fit` has already created the train function.
            self._model.make_train_function(force=True)
            self._model.test_function = self._model.predict_function = None

    def step_begins(self) -> None:
        """Records when a step begins."""
        self._began = time.monotonic()

    def step_ends(self) -> None:
        """Reports on rank 0 how long the step took, if it was traced for a new group."""
        if self._traces and self._extended.group.session.rank == 0:
            logger.info(
                "the steps use the number of workers or a rank, so they were traced again for the "
                f"new group: the first one took {time.monotonic() - self._began:.1f} s."
            )
        self._traces = False


class RestartFit(Exception):
    """Raised to leave `fit` and enter it again, as if the process had just started."""


def go_back(lost: GroupLostError, entries: Entries, group: Group, committed_steps: int) -> None:
    """Restarts `fit` from the last snapshot.

    All workers must call this function.

    Args:
        lost: the error that says why no worker can continue.
        entries: the state of the call of `fit`, which may be entered repeatedly.
        group: the workers; some may be new.
        committed_steps: the number of committed steps on the most advanced worker.

    Raises:
        GroupLostError: there is no usable snapshot.
    """
    read = next_group.reader_of(entries.callbacks.callbacks)
    mine = "there is no BackupAndRestore" if read is None else entries.data.obstacle
    obstacle = next(filter(None, group.exchange("obstacle", mine)), "")
    if read is None or obstacle:
        raise GroupLostError(_no_way(lost, obstacle))
    try:
        found = read(committed_steps)
    except SnapshotError as error:
        raise GroupLostError(_no_way(lost, str(error))) from error
    if found is None:
        raise GroupLostError(_no_way(lost, "no complete snapshot exists"))
    entries.callbacks.begin_anew()
    entries.data.begin_anew()
    set_initial_epoch(entries.callbacks.model, None)
    if group.topology.is_chief:
        steps, again = found
        if not steps:
            logger.info("no worker has trained a step yet, so all start from the beginning.")
            return
        logger.warning(
            "no remaining worker has the complete training state, so all return to the snapshot "
            f"of step {steps}: {again} steps are repeated."
        )


def _no_way(lost: GroupLostError, why: str) -> str:
    return f"{lost} These workers cannot return to a snapshot: {why}."


_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 10.0
"""The time limit for a worker's process to end after its step has failed."""

# Errors that an operation raises when another worker has failed.
_FAILURES = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


def is_loss(error: BaseException, session: Session, causes: Sequence[Cause]) -> bool:
    """Whether an error was caused by a loss of a worker that has already been detected.

    Args:
        error: an error that was raised in `fit`.
        session: the session of the group. If only the native core has detected the loss, this
            function reports the loss to the session.
        causes: the causes for which communicators of the group were aborted.
    """
    if not _may_come_from_others(error):
        return False
    lost = next((cause for cause in causes if cause.is_loss), None)
    if lost is not None:
        session.lose(Loss(lost.worker, lost.message, silent=lost.event == SILENT))
    return _has_lost(session)


def find_farewell(
    error: BaseException, topology: Topology, causes: Sequence[Cause]
) -> Cause | None:
    """Returns a report from another worker; None if there is no such report.

    With a report, a worker says that its step has failed, or that it leaves the group.

    Args:
        error: an error that was raised in `fit`.
        topology: the group.
        causes: the causes for which communicators of this process were aborted.
    """
    if not _may_come_from_others(error):
        return None
    # The causes of communicators among this worker's devices name devices, not workers.
    workers = enumerate(topology.workers)
    others = {str(worker) for rank, worker in workers if rank != topology.rank}
    said = (one for one in causes if one.event in (FAILED, LEFT) and one.worker in others)
    return next(said, None)


def await_end(
    farewell: Cause, session: Session, silence: float, check: Callable[[], object]
) -> bool:
    """Waits for the end of a worker's process, after the worker has reported a failure or left.

    While the process is alive, the session reports no loss. Most exceptions end the process, and
    the session then reports the loss. If the program catches the exception, the worker continues,
    and may soon need this group again. So the duration of the wait is limited.

    Args:
        farewell: the worker's report.
        session: the session of the group.
        silence: the number of seconds after which a silent worker counts as lost.
        check: a function that is called repeatedly during the wait, and may raise an error.

    Returns:
        Whether a worker is lost.
    """
    over = threading.Event()
    session.on_peer_lost(lambda _: over.set())
    if farewell.event == LEFT:
        session.on_peer_left(lambda _: over.set())
    deadline = time.monotonic() + _NOTICE_SECONDS + silence
    while not over.wait(_POLL_SECONDS) and time.monotonic() < deadline:
        check()
    return _has_lost(session)


def _has_lost(session: Session) -> bool:
    """Whether a session has ended because a worker was lost."""
    try:
        session.check()
    except PeerLostError:
        return True
    except TfdistError:
        pass
    return False


def _may_come_from_others(error: BaseException) -> bool:
    return isinstance(error, (*_FAILURES, TfdistError)) and not isinstance(error, GroupLostError)


_MAX_CHANGES = 8
"""How often the group may change between two steps."""


class Recovery:
    """One call of `fit` on a group of workers that may change.

    Args:
        model: the model in training.
        entries: the state of the call, which may be entered repeatedly.
        membership: this process's membership, which forms groups; None if the process has not been
            admitted yet.
        min_workers: the minimum number of workers.
        max_workers: the maximum number of workers; None for any number.
        keeps_rows: whether each worker keeps its number of rows per batch when the group changes;
            otherwise, the global batch keeps its number of rows.
        shards: this worker's part of the state of a sharded optimizer.
    """

    def __init__(
        self,
        model: keras.Model,
        entries: Entries,
        membership: Membership | None,
        *,
        min_workers: int,
        max_workers: int | None,
        keeps_rows: bool,
        shards: ShardState,
    ) -> None:
        self._model, self._stages = model, Stages(model)
        self._extended = extended_of(model.distribute_strategy)
        self._group = self._extended.group
        self._group.elastic = True
        self._entries, self._callbacks, self._data = entries, entries.callbacks, entries.data
        self._keeps_rows = keeps_rows
        self._reentry = allow_reentry(self._model, self._data, keeps_rows=keeps_rows)
        self._validation = keep_validation(model, self._data)
        self._totals = keep_totals(model)
        self.shards, self.graphs = shards, StaleGraphs(model, divided=self._stages.divided)
        accumulate_sums(model, joins=membership is None)
        self._next = next_group.NextGroup(
            self._stages,
            entries.callbacks,
            membership,
            min_workers=min_workers,
            max_workers=max_workers,
        )
        self._steps_before: dict[int, int] = {}  # the committed steps before each recent epoch
        self._known = self._group.topology  # the last group that was reported to callbacks
        self._lost: GroupLostError | None = None  # the reason why no worker has the state
        self._changed_at = (-1, 0)  # the step of the last change, and the number of changes there

    @property
    def membership(self) -> Membership | None:
        """This process's membership; None before the process is admitted."""
        return self._next.membership

    @property
    def can_grow(self) -> bool:
        """Whether processes are waiting to join, and the next group would admit them."""
        return self._next.can_grow

    def release(self) -> None:
        """Releases the workers that have received SIGTERM, if the other workers can continue.

        All workers must call this method.

        Raises:
            SystemExit: this worker leaves, and others continue.
            GroupShrinks: other workers leave, and this worker continues.
            TfdistError: a worker is lost.
        """
        assert self.membership is not None
        release(
            self._group,
            self.membership,
            self._stages.alike(),
            self.shards.held(),
            min_workers=self._next.min_workers,
            steps=self._extended.progress.committed_steps,
        )

    def epoch_begins(self, epoch: int) -> None:
        """Records the number of committed steps before an epoch."""
        recent = {one: steps for one, steps in self._steps_before.items() if one >= epoch - 1}
        before = self._extended.progress.committed_steps - self._data.batches_before
        self._steps_before = {epoch: before} | recent
        self._data.epoch_begins()

    def batch_begins(self) -> None:
        """Prepares for a step, and marks a restored state as valid once all workers have it."""
        if self._extended.progress.torn:
            self._group.exchange("state restored", "")
            self._extended.progress.torn = False
        self.shards.batch_begins()
        self.graphs.step_begins()

    def can_help(self, error: BaseException) -> bool:
        """Whether an error was caused by the loss of a worker, and another group may be formed.

        If another worker has reported a failure, this method waits until that worker's process ends
        or has had enough time to end.
        """
        steps, times = self._changed_at
        if self._extended.progress.committed_steps == steps and times > _MAX_CHANGES:
            return False
        group, causes = self._group, self._group.causes()
        if is_loss(error, group.session, causes):
            return True
        farewell = find_farewell(error, group.topology, causes)
        if farewell is None:
            return False
        silence = group.options.heartbeat_timeout
        return await_end(farewell, group.session, silence, check=preemption.later_check())

    def change(self, leave: GroupShrinks | None = None) -> None:
        """Forms another group, and brings this worker to the common position.

        Args:
            leave: lists the workers that leave; None if workers are lost, or if processes are
                waiting to be admitted.

        Raises:
            SystemExit: SIGTERM arrived while this worker waited for others.
            TfdistError: training cannot continue on this worker.
        """
        began, lost = time.monotonic(), bool(leave or self._group.session.lost_ranks)
        self._callbacks.stopped = bool(self._model.stop_training)
        step_exchange.grant(Request(0))  # The next step repeats requests that are still pending.
        form: Callable[[], Session] = self._next.first
        if leave is not None:
            form = functools.partial(self._next.after, leave)
        while True:
            try:
                agreement = self._enter(form(), is_new=False)
                if self._group.topology.size < self._next.min_workers:
                    saved = False
                    if agreement and not agreement.newcomers:  # New workers have nothing to save.
                        saved = self._save_before_waiting(agreement)
                    session = self._next.large_enough(saved=saved)
                    agreement = self._enter(session, is_new=False)
                if agreement is None:
                    self._go_back()
                break
            except (StagesMissing, GroupShrinks) as error:
                form = functools.partial(self._next.after, error)
            except (tf.errors.OpError, TfdistError) as error:
                if not self.can_help(error):
                    raise
                form = self._next.first
        if agreement is not None:
            self._go_on(agreement)
        self._report(time.monotonic() - began, lost=lost)

    def join(self) -> None:
        """Waits to be admitted, and brings this worker to the position of the others.

        Raises:
            FitAlreadyEnded: the other workers have ended this call of `fit`.
            RestartFit: no remaining worker has the state, so `fit` must be entered again.
            TfdistError: this worker was not admitted, or cannot continue.
        """
        self._next.membership, session = next_group.be_admitted(self._group)
        self._reentry.came_later = True
        while True:
            form: Callable[[], Session] = self._next.large_enough
            try:
                agreement = self._enter(session, is_new=True)
                if self._group.topology.size >= self._next.min_workers:
                    if agreement is None:
                        self._go_back()
                    break
            except (StagesMissing, GroupShrinks) as error:
                form = functools.partial(self._next.after, error)
            except (tf.errors.OpError, TfdistError) as error:
                if not self.can_help(error):
                    raise
            session = form()
        self._known = self._group.topology
        if agreement is None:
            raise RestartFit

    def _enter(self, session: Session, *, is_new: bool) -> Agreement | None:
        """Enters a group and synchronizes the state; returns None if no worker has the state."""
        self._group.regroup(session)
        self._stages.follow_group(self._next.membership)
        mine = FitProgress(is_new=True, came_later=True) if is_new else self._fit_progress()
        mine = dataclasses.replace(mine, shards=self.shards.held())
        texts = self._group.exchange("progress", json.dumps([mine.to_json(), self._reentry.logs]))
        answers = [json.loads(text) for text in texts]
        everyone = [FitProgress.from_json(text) for text, _ in answers]
        came = any(one.came_later for one in everyone)
        try:
            with self.shards.redistributing():
                agreement = agree(everyone, self._stages.alike())
        except GroupLostError as error:
            self._validation.group_changes(-1, is_new=is_new, others_came=came)
            self._lose(error, max(one.steps for one in everyone))
            return None
        takes = session.rank in agreement.takers
        redoes = session.rank in agreement.redo
        replaced = None
        if takes:
            has_own = not (is_new or mine.is_torn or redoes)
            replaced = state_transfer.ReplacedValues() if has_own else None
            self._extended.progress.torn = True  # This holds until the whole state has arrived.
        if redoes:
            self._extended.progress.redo()
        if agreement.shards is not None:
            self.shards.receive_slots(agreement.shards, agreement.steps)
        if agreement.takers:
            self._share_state(agreement, takes=takes, replaced=replaced)
        self._stand_at(agreement.steps)
        if takes or redoes:
            self._reentry.logs = answers[agreement.source][1]
        self.graphs.group_changes()
        self._reentry.compares = came
        self._validation.group_changes(agreement.epoch, is_new=is_new, others_came=came)
        set_initial_epoch(self._model, agreement.epoch)
        if any(one.is_new for one in everyone):
            self._share_entry(agreement, is_new=is_new)
        if not is_new:
            self._end_last_batch(agreement)
        next_group.tell_of_change(self._callbacks.callbacks, self._known, self._group.topology)
        return agreement

    def _share_state(
        self, agreement: Agreement, *, takes: bool, replaced: state_transfer.ReplacedValues | None
    ) -> None:
        """Broadcasts the state; if the broadcast fails, restores this worker's previous values."""
        source = self._stages.position_of(agreement.sources[self._group.session.rank])
        workers = self._extended.workers
        try:
            state_transfer.share_state(
                self._model, self._totals, workers, source, takes=takes, replaced=replaced
            )
        except BaseException:
            if replaced is not None:
                # If only the lost worker was a step ahead, the previous values are needed again.
                self._extended.progress.torn = not replaced.put_back()
            raise

    def _stand_at(self, steps: int) -> None:
        self._extended.progress.restore(steps)
        self.shards.drop_earlier()
        before, times = self._changed_at
        self._changed_at = steps, times + 1 if before == steps else 1

    def _lose(self, error: GroupLostError, steps: int) -> None:
        """Records that no worker has the whole state, and sets the common number of steps."""
        self._lost = error
        self._stand_at(steps)
        self._extended.progress.torn = True
        self.graphs.group_changes()
        next_group.tell_of_change(self._callbacks.callbacks, self._known, self._group.topology)

    def _go_back(self) -> None:
        """Restarts `fit` from the last snapshot, on all workers."""
        assert self._lost is not None
        go_back(self._lost, self._entries, self._group, self._extended.progress.committed_steps)
        self._reentry = allow_reentry(self._model, self._data, keeps_rows=self._keeps_rows)
        self._steps_before = {}

    def _save_before_waiting(self, agreement: Agreement) -> bool:
        """Lets callbacks save the state, since the missing workers may never join.

        Returns:
            Whether the state is saved.
        """
        saved = False
        before, self._known = self._known, self._group.topology
        reentry, batches = self._reentry, self._batches(agreement)
        if reentry.has_ended:
            batches = 0
        if agreement.epoch > reentry.read or not reentry.has_ended:
            if batches:
                self._totals.restore()
            for callback in self._callbacks.callbacks:
                saved |= bool(protocol_of(callback).on_group_wait(agreement.epoch, batches))
        if self._known.rank == 0:
            logger.warning(
                f"{self._known.size} of {before.size} workers remain, and at least "
                f"{self._next.min_workers} are needed: training waits for others."
            )
        return saved

    def _fit_progress(self) -> FitProgress:
        progress, batch = self._extended.progress, self._reentry.last_batch
        return FitProgress(
            is_torn=progress.torn,
            can_redo=self._stages.divided and progress.has_undone,
            steps=progress.committed_steps,
            epochs_ended=self._callbacks.epochs_ended,
            seen=0 if batch is None else self._callbacks.seen_of(*batch),
            came_later=self._reentry.came_later,
        )

    def _share_entry(self, agreement: Agreement, *, is_new: bool) -> None:
        """Sends the position in `fit` and the state of callbacks to new workers."""
        contents = b""
        if self._group.session.rank == agreement.source:
            batches = self._batches(agreement)
            contents = state_transfer.encode(
                state_transfer.entry_of(self._callbacks, self._data, batches)
            )
        contents = broadcast_bytes(contents, agreement.source, workers_of(self._extended))
        if is_new:
            entry = state_transfer.decode(contents)
            state_transfer.enter_at(
                entry, agreement.epoch, self._callbacks, self._data, self._totals.restore
            )
            self._steps_before = {entry.epoch: agreement.steps - entry.batches}

    def _go_on(self, agreement: Agreement) -> None:
        """Prepares to enter `fit` again, at the common position."""
        batches = self._batches(agreement)
        self._reentry.go_on(batches, self._totals.restore if batches else lambda: None)
        self._data.enter_again()

    def _end_last_batch(self, agreement: Agreement) -> None:
        """Calls the callbacks that were not yet called at the end of the last committed batch."""
        reentry, batches = self._reentry, self._batches(agreement)
        if reentry.last_batch is not None and batches >= reentry.taken:
            self._callbacks.end_batch(*reentry.last_batch, reentry.logs, agreement.seen)

    def _batches(self, agreement: Agreement) -> int:
        """Returns the number of trained batches in the last epoch for which data was read."""
        return agreement.steps - self._steps_before.get(self._reentry.read, agreement.steps)

    def _report(self, seconds: float, *, lost: bool) -> None:
        before, self._known = self._known, self._group.topology
        record.recoveries += lost
        steps, rows = self._extended.progress.committed_steps, self._reentry.batch_size.rows
        separate = self._data.separate
        own = separate is not None and separate.is_shared_out
        next_group.report_change(before, self._known, steps, seconds, rows, own=own, lost=lost)
