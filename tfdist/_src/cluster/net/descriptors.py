"""Descriptors that Python owns until they are handed over, and that forked children close."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import weakref
from typing import Protocol, TypeVar

_SPARE = 256
"""Descriptors left for everything else, such as files of the program's."""


class Owner(Protocol):
    """Anything that owns a descriptor, like a socket."""

    def fileno(self) -> int: ...

    def detach(self) -> int: ...

    def close(self) -> None: ...


class Descriptor:
    """Owns a descriptor that is not a socket.

    Args:
        number: an open descriptor; -1 for none.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """The descriptor; -1 once it is closed or detached."""
        return self._number

    def detach(self) -> int:
        """Releases the descriptor without closing it."""
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        """Closes the descriptor; calling this again has no effect."""
        if (number := self.detach()) >= 0:
            os.close(number)


def allow_descriptors(count: int) -> None:
    """Raises the soft limit of open descriptors, as far as `count` more need it.

    Raises:
        OSError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count + _SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OSError(
            errno.EMFILE,
            f"this process needs {needed} descriptors, but its hard limit is {hard}: raise it with "
            f"`ulimit -Hn` or LimitNOFILE=",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


_T = TypeVar("_T", bound=Owner)
_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_on_fork(owner: _T) -> _T:
    """Closes a descriptor in every child forked while Python owns it.

    A child's copy would keep the connection open after this process has died.

    Args:
        owner: the owner of the descriptor.

    Returns:
        The owner.
    """
    _owners.add(owner)
    return owner


def _after_fork() -> None:
    for owner in list(_owners):
        with contextlib.suppress(OSError):  # the native core was faster
            owner.close()


os.register_at_fork(after_in_child=_after_fork)
