"""Whether an error of this worker is the loss of another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import tensorflow as tf

from tfdist._src.cluster import Session
from tfdist.errors import GroupLostError, PeerLostError, TfdistError

_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 10.0
"""How long after the failure of a step it may take to learn that a worker is lost."""

# What an operation raises when it is another worker that has failed.
_FAILURES = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnknownError,
)


def is_loss(
    error: BaseException, session: Session, silence: float, check: Callable[[], object]
) -> bool:
    """Whether an error is that of a group that has lost a worker.

    Args:
        error: raised in `fit`.
        session: the session of the group.
        silence: after how many seconds a worker that does not answer is lost.
        check: called again and again while this waits; may raise.
    """
    if not isinstance(error, (*_FAILURES, TfdistError)) or isinstance(error, GroupLostError):
        return False
    try:
        session.check()
    except PeerLostError:
        return True
    except TfdistError:
        return False
    lost = threading.Event()
    session.on_peer_lost(lambda _: lost.set())
    # Rank 0, which tells of losses, may itself be silent.
    names_peer = isinstance(error, tf.errors.UnavailableError)
    deadline = time.monotonic() + _NOTICE_SECONDS + (silence if names_peer else 0.0)
    while not lost.wait(_POLL_SECONDS) and time.monotonic() < deadline:
        check()
    return lost.is_set()
