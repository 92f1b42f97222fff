"""Goes on with training in a new group of workers, in the same process."""

from __future__ import annotations

import json
import time

import keras
import tensorflow as tf

from tfdist.cluster import Membership
from tfdist.cluster.net.wait_messages import say
from tfdist.elastic.group_info import GroupInfo
from tfdist.elastic.peer_state import share_state
from tfdist.elastic.standing import Agreement, Standing, agree
from tfdist.errors import PeerLostError, TfdistError
from tfdist.internals.iterators import forget_validation_data, set_initial_epoch
from tfdist.trainer.fit.added_callbacks import Entries
from tfdist.trainer.fit.live_data import LiveData
from tfdist.trainer.fit.metric_totals import MetricTotals, keep_totals

_NOTICE_SECONDS = 5.0
"""How long after the failure of a step it may take to learn that a worker is lost."""


class Recovery:
    """One call of `fit` on a group of workers that may change.

    Args:
        model: in training.
        entries: what all entries of the call have in common.
        membership: decides on the group.
        min_workers: how many it must have.
    """

    def __init__(
        self, model: keras.Model, entries: Entries, membership: Membership, *, min_workers: int
    ) -> None:
        self._model = model
        self._extended = model.distribute_strategy.extended
        self._group = self._extended.group
        self._callbacks, self._data = entries.callbacks, entries.data
        self._membership, self._min_workers = membership, min_workers
        self._group.elastic = True
        self._data.live = self._live = LiveData()
        self._totals: MetricTotals = keep_totals(model)
        self._began_at: dict[int, int] = {}
        self._known = self._group.topology  # what callbacks know

    def epoch_begins(self, epoch: int) -> None:
        """Records how many steps stood before an epoch."""
        self._began_at = {
            one: steps for one, steps in self._began_at.items() if one >= epoch - 1
        } | {epoch: self._extended.progress.standing}

    def can_help(self, error: BaseException) -> bool:
        """Whether an error is that of a group that has lost a worker."""
        if not isinstance(error, (tf.errors.OpError, TfdistError)):
            return False
        deadline = time.monotonic() + _NOTICE_SECONDS
        while True:
            try:
                self._group.session.check()
            except PeerLostError:
                return True
            except TfdistError:
                return False
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)

    def recover(self) -> None:
        """Forms the next group and brings this worker to where it goes on.

        Raises:
            TfdistError: training cannot go on here.
        """
        began = time.monotonic()
        self._callbacks.stopped = bool(self._model.stop_training)
        while True:
            session = self._membership.regroup(min_workers=self._min_workers)
            try:
                self._group.regroup(session)
                agreement = self._agree()
                self._take_state(agreement)
                self._go_on(agreement)
                break
            except (tf.errors.OpError, TfdistError) as error:
                if not self.can_help(error):
                    raise
        if session.rank == 0:
            say(
                f"tfdist: training goes on with {session.size} of {self._known.size} workers after "
                f"{agreement.steps} steps, {time.monotonic() - began:.1f} s after the loss was "
                "noticed."
            )
        self._known = session.topology

    def _agree(self) -> Agreement:
        mine = json.dumps([self._standing().to_json(), self._live.logs])
        answers = [json.loads(text) for text in self._group.exchange("standing", mine)]
        agreement = agree([Standing.from_json(text) for text, _ in answers])
        if self._group.session.rank in agreement.takers:
            self._live.logs = answers[agreement.source][1]
        return agreement

    def _standing(self) -> Standing:
        progress, live = self._extended.progress, self._live
        batch = live.last_batch
        return Standing(
            is_torn=progress.torn,
            steps=progress.standing,
            epochs_ended=self._callbacks.epochs_ended,
            seen=0 if batch is None else self._callbacks.seen_of(*batch),
        )

    def _take_state(self, agreement: Agreement) -> None:
        if agreement.takers:
            takes = self._group.session.rank in agreement.takers
            broadcast = self._extended.workers.broadcast
            share_state(self._model, self._totals, broadcast, agreement.source, takes=takes)
        self._extended.progress.restore(agreement.steps)

    def _go_on(self, agreement: Agreement) -> None:
        """Prepares the next entry into `fit`."""
        live, model = self._live, self._model
        batches = agreement.steps - self._began_at.get(live.read, agreement.steps)
        live.go_on(batches, self._totals.restore if batches else lambda: None)
        self._data.enter_again()
        forget_validation_data(model)
        set_initial_epoch(model, agreement.epoch)
        old, new = GroupInfo.of(self._known), GroupInfo.of(self._group.topology)
        for callback in self._callbacks.callbacks:
            tell = getattr(callback, "on_group_change", None)
            if tell is not None:
                tell(old, new)
        if live.last_batch is not None and batches > live.last_batch[1]:
            self._callbacks.end_batch(*live.last_batch, live.logs, agreement.seen)
