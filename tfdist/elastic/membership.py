"""This process's part in deciding who belongs to the group: one for each job, made when needed."""

from __future__ import annotations

import weakref

from tfdist.cluster import Membership
from tfdist.errors import UnsupportedError
from tfdist.strategies.group import Group

_memberships: weakref.WeakKeyDictionary[Group, Membership] = weakref.WeakKeyDictionary()


def membership_of(group: Group) -> Membership | None:
    """The membership of this process in a group; all its workers call this together.

    Returns:
        None for a process without others.

    Raises:
        UnsupportedError: the group cannot change, since it uses TensorFlow's collectives.
    """
    if group.topology.size == 1 and group not in _memberships:
        return None
    if group not in _memberships:
        _memberships[group] = Membership(group.session, group.options)
    return _memberships[group]
