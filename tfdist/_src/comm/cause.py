"""Describes why a communicator of the native core was aborted."""

from __future__ import annotations

import json
from dataclasses import dataclass

import tensorflow as tf

OTHER, LOST, SILENT, LEFT, FAILED = "other", "lost", "silent", "left", "failed"
"""The events that can happen to a worker, as in csrc/error.h.

A worker is lost if its process has ended or a connection to it has broken. It is silent if it has
shown no sign of life for too long. It has left if it has closed the communicator. It has failed if
it has reported that its step failed, or that its process ends with an error.
"""

# The class of the error that an operation raises, for each value of `tfdist::Code`.
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
        operation: the operation's description.
        rank: this process's rank in the communicator.
        sequence: the number of the operation in the communicator.
        begun_ns: the time when the operation began, on the clock of `time.monotonic_ns`.
        ended_ns: the time when the operation failed, on the same clock.
    """

    operation: str
    rank: int
    sequence: int
    begun_ns: int
    ended_ns: int


@dataclass(frozen=True)
class Cause:
    """The event that aborted a communicator.

    Attributes:
        message: a sentence that describes the event to users.
        event: the kind of event, one of the constants of this module.
        worker: the name of the worker to which the event happened, as in messages; "" if the event
            does not concern a particular worker.
        code: the value of the `tfdist::Code` with which operations fail.
        at_ns: the time when this process learned of the event, on the clock of `time.monotonic_ns`.
        detected: the last operation of this process that failed because of the event; None if no
            operation has failed.

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
        """Parses the core's description of a cause, a JSON object or "null"."""
        found = json.loads(text)
        if found is None:
            return None
        detected = found.pop("detected")
        return cls(**found, detected=None if detected is None else Detected(**detected))

    @property
    def is_loss(self) -> bool:
        """Whether the core itself detected the loss of the worker.

        False if the worker reported its own failure or closed the communicator.
        """
        return self.event in (LOST, SILENT)

    def explains(self, error: BaseException, since_ns: int = 0) -> bool:
        """Whether this event may be the reason why an operation raised an error.

        Args:
            error: the error that the operation raised.
            since_ns: a value of `time.monotonic_ns()` from before the operation began.
        """
        return (
            self.detected is not None
            and self.detected.ended_ns >= since_ns
            and isinstance(error, _CLASSES[self.code])
        )
