"""Steps that all ranks of a session run together; if one fails, all raise its error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tfdist._src.cluster.session.error_codec import decode_error, encode_error
from tfdist._src.cluster.session.exit_reason import describe
from tfdist._src.cluster.session.session import Session
from tfdist.errors import ClusterError, RendezvousError, TfdistError

Report = dict[str, Any]
"""What one rank reports, or is told; JSON-serializable."""

_VARIABLE = "TFDIST_START_TIMEOUT"


class Lockstep:
    """Runs one step after the other; rank 0 decides what each rank is told.

    Args:
        session: the connections to all ranks.
        subject: what the steps are for, in tags and messages.
        timeout: seconds that a step may wait for the other ranks.
    """

    def __init__(self, session: Session, subject: str, timeout: float) -> None:
        self._session = session
        self._subject = subject
        self._timeout = timeout

    def run(
        self,
        step: str,
        work: Callable[[], Report],
        decide: Callable[[list[Report]], Sequence[Report]],
    ) -> Report:
        """Runs this rank's work, and the decision on the reports of all ranks.

        Args:
            step: name of the step, the same on all ranks.
            work: returns this rank's report, or raises an error that all ranks are to raise.
            decide: returns what each rank is told, given the reports of all in rank order, or
                raises an error that all ranks are to raise. Only rank 0 calls it.

        Returns:
            What this rank is told.

        Raises:
            TfdistError: the work failed on some rank (all ranks raise the error of the lowest such
                rank), or the decision failed, or the session has ended.
        """
        failure: Exception | None = None
        try:
            message: Report = {"report": work()}
        except Exception as error:
            failure = error
            message = {"error": encode_error("error", self._error(error))}

        def replies(payloads: list[bytes]) -> list[bytes]:
            messages = [json.loads(payload) for payload in payloads]
            try:
                for message in messages:
                    if "error" in message:
                        return [json.dumps(message).encode()] * len(messages)
                told = decide([message["report"] for message in messages])
                return [json.dumps({"report": one}).encode() for one in told]
            except Exception as error:
                failed = {"error": encode_error("error", self._error(error))}
                return [json.dumps(failed).encode()] * len(messages)

        reply = json.loads(
            self._session.coordinate(
                f"{self._subject}: {step}",
                json.dumps(message).encode(),
                replies,
                self._timeout,
                variable=_VARIABLE,
            )
        )
        if "error" in reply:
            raise decode_error(reply["error"]) from failure
        report: Report = reply["report"]
        return report

    def _error(self, error: Exception) -> TfdistError:
        if isinstance(error, TfdistError):
            return error
        me = self._session.topology.me if self._session.topology.workers else "this process"
        if isinstance(error, ValueError):
            return ClusterError(f"{me}: {self._subject}: {error}")
        return RendezvousError(f"{me}: {self._subject} failed: {describe(error)}")
