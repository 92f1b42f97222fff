"""This process's part in deciding who belongs to the group: one for each job, made when needed."""

from __future__ import annotations

import weakref

from tfdist.cluster import Membership, Session
from tfdist.strategies.group import Group

_memberships: weakref.WeakKeyDictionary[Group, Membership] = weakref.WeakKeyDictionary()
_calls: weakref.WeakKeyDictionary[Group, int] = weakref.WeakKeyDictionary()


def membership_of(group: Group) -> Membership | None:
    """The membership of this process in a group; all its workers call this together.

    Returns:
        None for a process that has yet to be admitted.
    """
    if group.joiner is not None:
        return None
    if group not in _memberships:
        _memberships[group] = Membership(group.session, group.options)
    return _memberships[group]


def is_first_call(group: Group) -> bool:
    """Counts a call of `fit`; whether it is the first one on a group that may change."""
    _calls[group] = _calls.get(group, 0) + 1
    return _calls[group] == 1


def be_admitted(group: Group) -> tuple[Membership, Session]:
    """Waits until this process has been admitted to the running job that it has found.

    Returns:
        Its membership, and the session with the other workers.

    Raises:
        RendezvousError: it has not been admitted in time.
        GroupLostError: it was admitted, but cannot form a group with the others.
    """
    joiner, group.joiner = group.joiner, None
    assert joiner is not None
    session = joiner.wait()
    assert joiner.membership is not None
    _memberships[group] = joiner.membership
    return joiner.membership, session
