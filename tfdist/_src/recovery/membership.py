"""This process's part in deciding who belongs to the group: one for each job, made when needed."""

from __future__ import annotations

import functools
import weakref

from tfdist._src.cluster import Declined, Membership, Session
from tfdist._src.group.group import Group
from tfdist._src.recovery.fit_calls import FitCalls
from tfdist._src.recovery.left_behind import whereabouts
from tfdist._src.recovery.preemption import preemption
from tfdist.errors import GroupLostError, PeerLostError, ProgramMismatchError

_calls: weakref.WeakKeyDictionary[Group, FitCalls] = weakref.WeakKeyDictionary()


def calls_of(group: Group) -> FitCalls:
    """The calls of `fit` on a group that may change."""
    return _calls.setdefault(group, FitCalls())


def membership_of(group: Group) -> Membership | None:
    """The membership of this process in a group; all its workers call this together.

    Returns:
        None for a process that has yet to be admitted.

    Raises:
        GroupLostError: a worker has been lost before anything could decide on the group.
    """
    if group.joiner is not None:
        return None
    membership = group.membership  # with TFDIST_ELASTIC=1 since the workers have met
    if membership is None:
        try:
            membership = Membership(group.session, group.options)
        except PeerLostError as error:
            raise GroupLostError(
                "Elastic cannot go on without a worker that was lost before its first training. "
                f"{error} Start the job again; with TFDIST_ELASTIC=1, as `tfdist run --elastic` "
                "sets it, a worker may be lost at any time."
            ) from error
    _enter(group, membership)
    return membership


def be_admitted(group: Group) -> tuple[Membership, Session]:
    """Waits until this process has been admitted to the running job that it has found.

    Returns:
        Its membership, and the session with the other workers.

    Raises:
        CallHasEnded: the others have ended the call of `fit` that this process is in.
        ProgramMismatchError: they call `fit` differently.
        RendezvousError: it has not been admitted in time.
        GroupLostError: it was admitted, but cannot form a group with the others.
    """
    calls, joiner = calls_of(group), group.joiner
    assert joiner is not None
    try:
        session = joiner.wait(calls.request, check=functools.partial(preemption.check, saved=False))
    except Declined as declined:
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
