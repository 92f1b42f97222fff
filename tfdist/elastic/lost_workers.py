"""Whether an error of this worker is the loss of another one."""

from __future__ import annotations

import threading

import tensorflow as tf

from tfdist.cluster import Session
from tfdist.errors import GroupLostError, PeerLostError, TfdistError

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


def is_loss(error: BaseException, session: Session, silence: float) -> bool:
    """Whether an error is that of a group that has lost a worker.

    Args:
        error: raised in `fit`.
        session: the session of the group.
        silence: after how many seconds a worker that does not answer is lost.
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
    return lost.wait(_NOTICE_SECONDS + (silence if names_peer else 0.0))
