"""The communicators of this process, by the names of their groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.cluster import Session
from tfdist.collective.communicator import Alone

_ALONE = Alone()
_communicators: dict[str, Any] = {}


def put(name: str, communicator: Any) -> None:
    """Makes a communicator known, of a name that no open one has."""
    _communicators[name] = communicator


def check_free(session: Session, name: str, members: Sequence[int]) -> None:
    """Checks that a name can be given to a new communicator; all ranks of the session call this.

    Args:
        session: the job's control connections.
        name: of the new communicator.
        members: the job's ranks in this process's group; empty for a process in none.

    Raises:
        ValueError: a process of a group has an open communicator of this name; the same error on
            all ranks.
    """
    # That of a process alone has nothing to lose.
    taken = bool(members) and not isinstance(_communicators.get(name, _ALONE), Alone)
    for rank, said in enumerate(session.exchange(f"communicator {name!r}", b"%d" % taken)):
        if said == b"1":
            where = session.topology.workers[rank] if session.topology.workers else "this process"
            raise ValueError(
                f"A process gives a name to one communicator at a time. Received: {name!r}, which "
                f"{where} has already. Close that one first, or choose another name."
            )


def get(name: str) -> Any:
    """The communicator of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in _communicators:
        known = ", ".join(map(repr, _communicators)) or "none"
        raise ValueError(
            f"There is no communicator {name!r} in this process; there are: {known}. Make a "
            "tfdist strategy with the native collectives, whose communicator is 'workers', or "
            "split one."
        )
    return _communicators[name]


def remove(name: str, communicator: Any) -> None:
    """Forgets a communicator, unless another one has taken its place."""
    if _communicators.get(name) is communicator:
        del _communicators[name]


def forget_alone(name: str) -> None:
    """Forgets the communicator of a process alone, which has joined others."""
    if isinstance(_communicators.get(name), Alone):
        del _communicators[name]


def every() -> list[Any]:
    """All communicators that are known."""
    return list(_communicators.values())
