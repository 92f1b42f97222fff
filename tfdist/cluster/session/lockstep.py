"""Steps that all ranks of a session take together, where the error of one is that of all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tfdist.cluster.session.error_codec import decode_error, encode_error
from tfdist.cluster.session.exit_reason import describe
from tfdist.cluster.session.session import Session
from tfdist.errors import ClusterError, RendezvousError, TfdistError

Said = dict[str, Any]
"""What one rank tells the others, as JSON can hold it."""

_VARIABLE = "TFDIST_START_TIMEOUT"


class Lockstep:
    """Takes one step after the other.

    Args:
        session: the connections to all ranks.
        subject: what the steps are for; in tags and messages.
        timeout: seconds that one step may wait for the others.
    """

    def __init__(self, session: Session, subject: str, timeout: float) -> None:
        self._session = session
        self._subject = subject
        self._timeout = timeout

    def take(self, step: str, work: Callable[[], Said]) -> list[Said]:
        """Does this rank's work, and tells the others what came of it.

        Args:
            step: what is done, the same on all ranks.
            work: returns what the others are to know, or raises what they are to raise too.

        Returns:
            What every rank has to say, in rank order.

        Raises:
            TfdistError: the work failed on some rank; the same on all ranks, that of the first
                one. Or the session has ended.
        """
        failure: Exception | None = None
        try:
            message: Said = {"said": work()}
        except Exception as error:
            failure = error
            message = {"error": encode_error("error", self._error(error))}
        tag = f"{self._subject}: {step}"
        payload = json.dumps(message).encode()
        answers = self._session.exchange(tag, payload, self._timeout, variable=_VARIABLE)
        messages = [json.loads(answer) for answer in answers]
        for message in messages:
            if "error" in message:
                raise decode_error(message["error"]) from failure
        return [message["said"] for message in messages]

    def _error(self, error: Exception) -> TfdistError:
        if isinstance(error, TfdistError):
            return error
        me = self._session.topology.me if self._session.topology.workers else "this process"
        if isinstance(error, ValueError):
            return ClusterError(f"{me}: {self._subject}: {error}")
        return RendezvousError(f"{me}: {self._subject} failed: {describe(error)}")
