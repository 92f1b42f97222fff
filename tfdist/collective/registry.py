"""The communicators of this process, by the names of their groups."""

from __future__ import annotations

from typing import Any

_communicators: dict[str, Any] = {}


def put(name: str, communicator: Any) -> None:
    """Makes a communicator known; it takes the place of an older one of the same name."""
    _communicators[name] = communicator


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


def every() -> list[Any]:
    """All communicators that are known."""
    return list(_communicators.values())
