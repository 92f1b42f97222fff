"""Steps that all ranks of a session run together; if one fails, all raise its error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tfdist.cluster.session.error_codec import decode_error, encode_error
from tfdist.cluster.session.exit_reason import describe
from tfdist.cluster.session.session import Session
from tfdist.errors import ClusterError, RendezvousError, TfdistError

Report = dict[str, Any]
"""What one rank reports to the others; JSON-serializable."""

_VARIABLE = "TFDIST_START_TIMEOUT"


class Lockstep:
    """Runs one step after the other.

    Args:
        session: the connections to all ranks.
        subject: what the steps are for, in tags and messages.
        timeout: seconds that a step may wait for the other ranks.
    """

    def __init__(self, session: Session, subject: str, timeout: float) -> None:
        self._session = session
        self._subject = subject
        self._timeout = timeout

    def run(self, step: str, work: Callable[[], Report]) -> list[Report]:
        """Runs this rank's work and exchanges the results.

        Args:
            step: name of the step, the same on all ranks.
            work: returns this rank's report, or raises an error that all ranks are to raise.

        Returns:
            The reports of all ranks, in rank order.

        Raises:
            TfdistError: the work failed on some rank (all ranks raise the error of the lowest such
                rank), or the session has ended.
        """
        failure: Exception | None = None
        try:
            message: Report = {"report": work()}
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
        return [message["report"] for message in messages]

    def _error(self, error: Exception) -> TfdistError:
        if isinstance(error, TfdistError):
            return error
        me = self._session.topology.me if self._session.topology.workers else "this process"
        if isinstance(error, ValueError):
            return ClusterError(f"{me}: {self._subject}: {error}")
        return RendezvousError(f"{me}: {self._subject} failed: {describe(error)}")
