"""Decides which group of workers forms next, and when waiting processes are admitted."""

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tfdist._src.cluster import JoinRejected, Membership, Session, Topology
from tfdist._src.group import Group
from tfdist._src.keras.fit.callback import Callback, GroupInfo, protocol_of, saves_before_waits
from tfdist._src.keras.fit.delivered_once import DeliveredOnce
from tfdist._src.keras.saving.callbacks import become_writer
from tfdist._src.log import logger
from tfdist._src.recovery.agreement import GroupShrinks, Stages, StagesMissing
from tfdist._src.recovery.fit_calls import FitCalls, whereabouts
from tfdist._src.recovery.preemption import preemption
from tfdist.errors import GroupLostError, PeerLostError, ProgramMismatchError


class ReadsSnapshots(Callback):
    """Base class of callbacks that can restart `fit` from a snapshot."""

    def _on_state_lost(self, committed_steps: int) -> tuple[int, int] | None:
        """Reads the newest snapshot, so that `fit` restarts from there.

        All workers must call this method.

        Args:
            committed_steps: the number of committed steps on the most advanced worker.

        Returns:
            The number of steps before the snapshot, and the number of steps that were trained after
            it. Without a snapshot, returns two zeros if all workers have the state before the first
            step, else None.
        """
        raise NotImplementedError


def reader_of(callbacks: Sequence[Any]) -> Callable[[int], tuple[int, int] | None] | None:
    """Returns the `_on_state_lost` of the first callback that can read snapshots; else None."""
    readers = (one._on_state_lost for one in callbacks if isinstance(one, ReadsSnapshots))
    return next(readers, None)


def _info_of(topology: Topology) -> GroupInfo:
    names = tuple(str(worker) for worker in topology.workers)
    return GroupInfo(topology.generation, topology.rank, topology.size, names)


def tell_of_change(callbacks: Sequence[Any], before: Topology, now: Topology) -> None:
    """Notifies callbacks of a new group.

    If this worker becomes the chief, the callbacks continue the files that the old chief has
    written.

    Args:
        callbacks: the callbacks, in their order.
        before: the last group that was reported to the callbacks.
        now: the present group.
    """
    old, new = _info_of(before), _info_of(now)
    for callback in callbacks:
        if old.rank != 0 and new.rank == 0:
            become_writer(callback)
        protocol_of(callback).on_group_change(old, new)


def report_change(
    before: Topology,
    now: Topology,
    steps: int,
    seconds: float,
    rows: int,
    *,
    own: bool,
    lost: bool,
) -> None:
    """Reports on rank 0 that training continues.

    Args:
        before: the group that trained.
        now: the present group.
        steps: the number of committed steps.
        seconds: the duration of the change.
        rows: the new number of rows of a global batch; 0 if it has not changed.
        own: whether each worker reads its own batches, instead of a share of common batches.
        lost: whether a worker was lost.
    """
    if now.rank == 0:
        batch = f" The global batch now has {rows} rows." if rows else ""
        logger.info(
            f"training continues with {now.size} workers, formerly {before.size}, after {steps} "
            f"steps; the change took {seconds:.1f} s.{batch}"
        )
        if own:
            logger.warning(
                "each worker reads its own data. In this epoch, the data that the lost workers had "
                "not yet read is skipped, and so are their batches of the failed step; the next "
                "epoch is divided among all workers again."
                if lost
                else "each worker reads its own data, so new workers read nothing before the next "
                "epoch, which is divided among all workers again."
            )


_calls: weakref.WeakKeyDictionary[Group, FitCalls] = weakref.WeakKeyDictionary()


def calls_of(group: Group) -> FitCalls:
    """Returns the counter of this process's calls of `fit` in a group that may change."""
    return _calls.setdefault(group, FitCalls())


def membership_of(group: Group) -> Membership | None:
    """Returns this process's membership in a group.

    All workers of the group must call this function.

    Returns:
        The membership; None if the process has not been admitted yet.

    Raises:
        GroupLostError: a worker was lost before the group had a membership.
    """
    if group.joiner is not None:
        return None
    membership = group.membership  # With TFDIST_ELASTIC=1, the rendezvous has created it.
    if membership is None:
        try:
            membership = Membership(group.session, group.options)
        except PeerLostError as error:
            raise GroupLostError(
                "Elastic cannot continue without a worker that was lost before it first trained. "
                f"{error} Restart the job; with TFDIST_ELASTIC=1, which `tfdist run --elastic` "
                "sets, a worker may be lost at any time."
            ) from error
    _enter(group, membership)
    return membership


def be_admitted(group: Group) -> tuple[Membership, Session]:
    """Waits until this process has been admitted to the running job that it has found.

    Returns:
        The membership of this process, and the session with the other workers.

    Raises:
        FitAlreadyEnded: the other workers have ended the call of `fit` that this process is in.
        ProgramMismatchError: the other workers call `fit` differently.
        RendezvousError: this process has not been admitted in time.
        GroupLostError: this process was admitted, but cannot form a group with the others.
    """
    calls, joiner = calls_of(group), group.joiner
    assert joiner is not None
    try:
        session = joiner.wait(calls.request, check=functools.partial(preemption.check, saved=False))
    except JoinRejected as declined:
        try:
            calls.raise_for(str(declined), str(group.topology.me))
        except ProgramMismatchError:
            joiner.close()
            raise
    group.joiner = None
    assert joiner.membership is not None
    _enter(group, joiner.membership)
    return joiner.membership, session


def _enter(group: Group, membership: Membership) -> None:
    group.membership = membership
    calls = calls_of(group)
    membership.judge_newcomers(calls.judge)
    membership.tell_others(lambda: whereabouts(group, calls))


class NextGroup:
    """Forms each new group of workers during a call of `fit`.

    Args:
        stages: the pipeline stages of the model in training.
        callbacks: the callbacks of the call of `fit`.
        membership: this process's membership, which forms groups; None if the process has not been
            admitted yet.
        min_workers: the minimum number of workers.
        max_workers: the maximum number of workers; None for any number.

    Attributes:
        membership: this process's membership; None before it is admitted.
        min_workers: the minimum number of workers.
    """

    def __init__(
        self,
        stages: Stages,
        callbacks: DeliveredOnce,
        membership: Membership | None,
        *,
        min_workers: int,
        max_workers: int | None,
    ) -> None:
        self.membership = membership
        self.min_workers = min_workers
        self._stages, self._group = stages, stages.group
        self._callbacks = callbacks
        self._most = stages.most(max_workers)

    @property
    def can_grow(self) -> bool:
        """Whether processes are waiting to join, and the next group would admit them."""
        waiting = len(self.membership.waiting) if self.membership is not None else 0
        size, most = self._group.topology.size, self._most
        if not waiting or (most is not None and size >= most):
            return False
        # If the pipelines were not full, the new workers might be in no pipeline.
        return not self._stages.divided or size + waiting >= (most or 0)

    def first(self) -> Session:
        """Forms a group, which may be too small for training if a callback can save the state."""
        return self._of_those_left(())

    def after(self, error: GroupShrinks | StagesMissing) -> Session:
        """Forms the next group if the current group lacks stages, or if some of its workers leave.

        Args:
            error: the reason why the current group cannot train.

        Raises:
            GroupLostError: there are not enough workers for a single pipeline.
        """
        if isinstance(error, GroupShrinks):
            return self._of_those_left(error.ranks)
        size = max(self._group.topology.size + len(error.missing), self.min_workers)
        if reader_of(self._callbacks.callbacks) is None:
            raise GroupLostError(error.without_others)
        if self._group.topology.is_chief:
            logger.warning(f"{error} Training waits for new workers, to continue from a snapshot.")
        try:
            # No worker has a whole state that it could save.
            check = functools.partial(preemption.check, saved=False)
            return self._form(check, min_workers=size, max_workers=size)
        except GroupLostError as lost:
            raise GroupLostError(f"{error.without_others} {lost}") from lost

    def large_enough(self, *, saved: bool = False) -> Session:
        """Forms a group that is large enough for training.

        Args:
            saved: whether the state has been saved. If so, SIGTERM during the wait ends this worker
                with the exit code that requests a restart.
        """
        check = functools.partial(preemption.check, saved=saved)
        return self._form(check)

    def _of_those_left(self, leaving: Collection[int]) -> Session:
        lost = len({*self._group.session.lost_ranks, *leaving})
        left, check = self._group.topology.size - lost, preemption.later_check()
        if left < self.min_workers and any(map(saves_before_waits, self._callbacks.callbacks)):
            return self._form(check, min_workers=1, joiners_welcome=False)
        if lost and left >= self.min_workers and self._stages.divided:
            return self._form(check, joiners_welcome=False)  # Joiners might be in no pipeline.
        return self._form(check)

    def _form(self, check: Callable[[], None], **changes: Any) -> Session:
        assert self.membership is not None
        terms = {"min_workers": self.min_workers, "max_workers": self._most}
        return self.membership.regroup(**{**terms, **changes}, check=check)
