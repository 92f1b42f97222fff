"""Descriptors that are Python's until they are handed over, and never a forked child's."""

from __future__ import annotations

import os
import weakref
from typing import Protocol, TypeVar


class Owned(Protocol):
    """What owns a descriptor, as a socket does."""

    def fileno(self) -> int: ...

    def detach(self) -> int: ...

    def close(self) -> None: ...


class Descriptor:
    """Owns a descriptor that is no socket.

    Args:
        number: an open descriptor; -1 for none.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """The descriptor; -1 where it is closed or was handed over."""
        return self._number

    def detach(self) -> int:
        """Gives the descriptor away without closing it."""
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        """Closes the descriptor; a second time does nothing."""
        if (number := self.detach()) >= 0:
            os.close(number)


_T = TypeVar("_T", bound=Owned)
_ours: weakref.WeakSet[Owned] = weakref.WeakSet()


def not_for_children(owned: _T) -> _T:
    """Closes a descriptor in every child that is forked while it is Python's.

    A child's copy would keep the connection open after this process has died.

    Args:
        owned: owns the descriptor.

    Returns:
        The same.
    """
    _ours.add(owned)
    return owned


def _after_fork() -> None:
    for owned in list(_ours):
        owned.close()


os.register_at_fork(after_in_child=_after_fork)
