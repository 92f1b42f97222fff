"""The cause for which a communicator of the core was aborted, as data instead of a message."""

from __future__ import annotations

import json
from dataclasses import dataclass

import tensorflow as tf

OTHER, LOST, SILENT, LEFT, FAILED = "other", "lost", "silent", "left", "failed"
"""What happened, as in csrc/error.h.

A worker is lost if its process has ended or a connection to it has broken. It is silent if it has
shown no sign of life for too long. It has left if it has closed the communicator. It has failed if
it has reported that its step failed, or that its process ends with an error.
"""

# The class of an operation's error, by the `tfdist::Code` of its cause.
_CLASSES = {
    1: tf.errors.InvalidArgumentError,
    2: tf.errors.FailedPreconditionError,
    3: tf.errors.UnavailableError,
    4: tf.errors.FailedPreconditionError,
    5: tf.errors.InternalError,
    6: tf.errors.CancelledError,
}
_UNAVAILABLE = 3


@dataclass(frozen=True)
class Detected:
    """An operation of this process that failed because its communicator was aborted.

    Attributes:
        operation: its description.
        rank: this process's rank in the communicator.
        sequence: the operation's number.
        begun_ns: when it began, on the clock of `time.monotonic_ns`.
        ended_ns: when it failed.
    """

    operation: str
    rank: int
    sequence: int
    begun_ns: int
    ended_ns: int


@dataclass(frozen=True)
class Cause:
    """The event that aborted a communicator; the same on all of its ranks.

    Attributes:
        message: a description for users, a sentence.
        event: one of the constants of this module.
        worker: the worker to which the event happened, as named in messages; "" for none.
        code: the number of a `tfdist::Code`.
        at_ns: when this process learned of it, on the clock of `time.monotonic_ns`.
        detected: the last operation of this process that failed because of it; None for none.

    Example:
        >>> Cause("worker 1 (b:1) is lost: its process has ended.", LOST, "worker 1 (b:1)").is_loss
        True
    """

    message: str
    event: str = OTHER
    worker: str = ""
    code: int = _UNAVAILABLE
    at_ns: int = 0
    detected: Detected | None = None

    @classmethod
    def of(cls, text: bytes) -> Cause | None:
        """Returns the cause that the core describes as JSON, if any."""
        found = json.loads(text)
        if found is None:
            return None
        detected = found.pop("detected")
        return cls(**found, detected=None if detected is None else Detected(**detected))

    @property
    def is_loss(self) -> bool:
        """Whether the core has detected that the worker is gone, without a report from it."""
        return self.event in (LOST, SILENT)

    def explains(self, error: BaseException, since_ns: int = 0) -> bool:
        """Whether this event may have made an operation raise an error.

        Args:
            error: the error.
            since_ns: a `time.monotonic_ns()` from before the operation began.
        """
        return (
            self.detected is not None
            and self.detected.ended_ns >= since_ns
            and isinstance(error, _CLASSES[self.code])
        )
