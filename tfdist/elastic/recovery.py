"""Goes on with training in another group of workers, in the same process."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster import Membership, Session
from tfdist.cluster.net.wait_messages import say
from tfdist.elastic.group_info import GroupInfo
from tfdist.elastic.membership import be_admitted
from tfdist.elastic.newcomer import decode, encode, enter_at, entry_of
from tfdist.elastic.peer_state import share_state
from tfdist.elastic.standing import Agreement, Standing, agree
from tfdist.elastic.workers import broadcast_bytes, workers_of
from tfdist.errors import GroupLostError, PeerLostError, TfdistError
from tfdist.internals.iterators import forget_validation_data, set_initial_epoch
from tfdist.monitoring.training import record
from tfdist.trainer.fit.added_callbacks import Entries
from tfdist.trainer.fit.live_data import LiveData
from tfdist.trainer.fit.metric_totals import keep_totals
from tfdist.trainer.optimizers.accumulation import accumulate_sums
from tfdist.trainer.saving.callbacks import become_writer

_MOST_CHANGES = 8
"""How often the group may change without a step in between."""

_NOTICE_SECONDS = 10.0
"""How long after the failure of a step it may take to learn that a worker is lost."""

# What an operation raises when it is another worker that has failed.
_FAILURES = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


class Recovery:
    """One call of `fit` on a group of workers that may change.

    Args:
        model: in training.
        entries: what all entries of the call have in common.
        membership: decides on the group; None for a process that has yet to be admitted.
        min_workers: how many workers it must have.
        max_workers: how many it may admit; None for any number.
        admits: whether it admits any.
    """

    def __init__(
        self,
        model: keras.Model,
        entries: Entries,
        membership: Membership | None,
        *,
        min_workers: int,
        max_workers: int | None,
        admits: bool,
    ) -> None:
        self._model = model
        self._extended = model.distribute_strategy.extended
        self._group = self._extended.group
        self._group.elastic = True
        self._callbacks, self._data = entries.callbacks, entries.data
        self._membership = membership
        self._min_workers, self._max_workers = min_workers, max_workers
        self._admits = admits
        self._data.live = self._live = LiveData()
        self._totals = keep_totals(model)
        accumulate_sums(model, joins=membership is None)
        self._steps_before: dict[int, int] = {}  # epochs
        self._known = self._group.topology  # what callbacks know
        self._changed_at = (-1, 0)  # after which step, and how often

    @property
    def membership(self) -> Membership | None:
        """This process's membership, once it has one."""
        return self._membership

    @property
    def is_full(self) -> bool:
        """Whether no others are admitted."""
        most = self._max_workers
        return not self._admits or (most is not None and self._group.topology.size >= most)

    def epoch_begins(self, epoch: int) -> None:
        """Records how many steps stood before an epoch."""
        recent = {one: steps for one, steps in self._steps_before.items() if one >= epoch - 1}
        self._steps_before = {epoch: self._extended.progress.standing} | recent
        self._data.epoch_begins()

    def can_help(self, error: BaseException) -> bool:
        """Whether an error is that of a group that has lost a worker."""
        if not isinstance(error, (*_FAILURES, TfdistError)) or isinstance(error, GroupLostError):
            return False
        steps, times = self._changed_at
        if self._extended.progress.standing == steps and times > _MOST_CHANGES:
            return False
        try:
            self._group.session.check()
        except PeerLostError:
            return True
        except TfdistError:
            return False
        lost = threading.Event()
        self._group.session.on_peer_lost(lambda _: lost.set())
        return lost.wait(_NOTICE_SECONDS)

    def change(self) -> None:
        """Forms another group, and brings this worker to where it goes on.

        Raises:
            TfdistError: training cannot go on here.
        """
        began, lost = time.monotonic(), bool(self._group.session.lost_ranks)
        self._callbacks.stopped = bool(self._model.stop_training)
        while True:
            try:
                agreement = self._enter(self._regroup_first(), is_new=False)
                if self._group.topology.size < self._min_workers:
                    if not agreement.newcomers:  # They have nothing to save.
                        self._save_before_waiting(agreement)
                    agreement = self._enter(self._regroup(), is_new=False)
                break
            except (tf.errors.OpError, TfdistError) as error:
                if not self.can_help(error):
                    raise
        self._go_on(agreement)
        self._report(agreement, time.monotonic() - began, lost=lost)

    def join(self) -> None:
        """Waits to be admitted, and brings this worker to where the others go on.

        Raises:
            TfdistError: it was not admitted, or cannot go on.
        """
        self._membership, session = be_admitted(self._group)
        while True:
            try:
                self._enter(session, is_new=True)
                if self._group.topology.size >= self._min_workers:
                    break
            except (tf.errors.OpError, TfdistError) as error:
                if not self.can_help(error):
                    raise
            session = self._regroup()
        self._known = self._group.topology

    def _regroup_first(self) -> Session:
        """A group that may be too small for training, if a callback saves then."""
        left = self._group.topology.size - len(self._group.session.lost_ranks)
        if left < self._min_workers and any(map(_save_of, self._callbacks.callbacks)):
            return self._regroup(min_workers=1, joiners_welcome=False)
        return self._regroup()

    def _regroup(self, **changes: Any) -> Session:
        assert self._membership is not None
        terms = {
            "min_workers": self._min_workers,
            "max_workers": self._max_workers,
            "joiners_welcome": self._admits,
        }
        return self._membership.regroup(**{**terms, **changes})

    def _enter(self, session: Session, *, is_new: bool) -> Agreement:
        self._group.regroup(session)
        standing = Standing(is_new=True) if is_new else self._standing()
        texts = self._group.exchange("standing", json.dumps([standing.to_json(), self._live.logs]))
        answers = [json.loads(text) for text in texts]
        standings = [Standing.from_json(text) for text, _ in answers]
        agreement = agree(standings)
        takes = session.rank in agreement.takers
        broadcast = self._extended.workers.broadcast
        if takes:
            self._extended.progress.torn = True  # until it has all
        if agreement.takers:
            share_state(self._model, self._totals, broadcast, agreement.source, takes=takes)
        self._extended.progress.restore(agreement.steps)
        steps, times = self._changed_at
        self._changed_at = agreement.steps, times + 1 if steps == agreement.steps else 1
        if takes:
            self._live.logs = answers[agreement.source][1]
        self._trace_anew_if_needed()
        forget_validation_data(self._model)
        set_initial_epoch(self._model, agreement.epoch)
        if any(one.is_new for one in standings):
            self._share_entry(agreement, is_new=is_new)
        if not is_new:
            self._end_last_batch(agreement)
        self._tell()
        return agreement

    def _save_before_waiting(self, agreement: Agreement) -> None:
        """Has callbacks save, since the workers that are needed may never come."""
        before, self._known = self._known, self._group.topology
        live, batches = self._live, self._batches(agreement)
        if live.has_ended:
            batches = 0
        if agreement.epoch > live.read or not live.has_ended:
            if batches:
                self._totals.restore()
            for save in filter(None, map(_save_of, self._callbacks.callbacks)):
                save(agreement.epoch, batches)
        if self._known.rank == 0:
            say(
                f"tfdist: {self._known.size} of {before.size} workers are left, and at least "
                f"{self._min_workers} are needed: training waits for others."
            )

    def _trace_anew_if_needed(self) -> None:
        extended, model = self._extended, self._model
        if extended.traces_know_group:
            extended.traces_know_group = False
            model.train_function = model.test_function = model.predict_function = None
            if self._group.session.rank == 0:
                say(
                    "tfdist: the model's code uses the number of workers or a rank, so its steps "
                    "are traced anew for the new group."
                )

    def _standing(self) -> Standing:
        progress, batch = self._extended.progress, self._live.last_batch
        return Standing(
            is_torn=progress.torn,
            steps=progress.standing,
            epochs_ended=self._callbacks.epochs_ended,
            seen=0 if batch is None else self._callbacks.seen_of(*batch),
        )

    def _share_entry(self, agreement: Agreement, *, is_new: bool) -> None:
        """Has the workers that are new learn where `fit` is, and what callbacks remember."""
        callbacks, contents = self._callbacks.callbacks, b""
        if self._group.session.rank == agreement.source:
            batches = self._batches(agreement)
            contents = encode(entry_of(callbacks, self._data, batches))
        contents = broadcast_bytes(contents, agreement.source, workers_of(self._extended))
        if is_new:
            entry = decode(contents)
            enter_at(entry, agreement.epoch, callbacks, self._data, self._totals.restore)
            self._callbacks.enter_at(agreement.epoch)
            self._steps_before = {entry.epoch: agreement.steps - entry.batches}

    def _go_on(self, agreement: Agreement) -> None:
        """Prepares the next entry into `fit`."""
        batches = self._batches(agreement)
        self._live.go_on(batches, self._totals.restore if batches else lambda: None)
        self._data.enter_again()

    def _end_last_batch(self, agreement: Agreement) -> None:
        """Tells the callbacks that have not seen the end of the last batch that stands."""
        live, batches = self._live, self._batches(agreement)
        if live.last_batch is not None and batches >= live.taken:
            self._callbacks.end_batch(*live.last_batch, live.logs, agreement.seen)

    def _batches(self, agreement: Agreement) -> int:
        """How many batches of the epoch that was read last have been trained."""
        return agreement.steps - self._steps_before.get(self._live.read, agreement.steps)

    def _tell(self) -> None:
        old, new = GroupInfo.of(self._known), GroupInfo.of(self._group.topology)
        for callback in self._callbacks.callbacks:
            if old.rank != 0 and new.rank == 0:
                become_writer(callback)
            tell = getattr(callback, "on_group_change", None)
            if tell is not None:
                tell(old, new)

    def _report(self, agreement: Agreement, seconds: float, *, lost: bool) -> None:
        before, self._known = self._known, self._group.topology
        if lost:
            record.recoveries += 1
        if self._known.rank == 0:
            say(
                f"tfdist: training goes on with {self._known.size} workers, formerly "
                f"{before.size}, after {agreement.steps} steps; the change took {seconds:.1f} s."
            )


def _save_of(callback: Any) -> Any:
    return getattr(callback, "on_group_wait", None)
