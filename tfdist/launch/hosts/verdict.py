"""How a generation has ended on one host, and what host 0 decides then, as messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tfdist.launch.job.failure import Failure


@dataclass(frozen=True)
class HostEnd:
    """The end of a generation on one host, when its workers are gone.

    Attributes:
        codes: the distinct exit codes of its workers, negative for signals.
        stuck: the workers that SIGKILL did not end, as text; "" if there are none.
        stopped: whether its launcher was told to stop.
    """

    codes: tuple[int, ...]
    stuck: str = ""
    stopped: bool = False

    def to_message(self) -> dict[str, Any]:
        """The end as a message, which JSON can represent."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> HostEnd:
        """The inverse of `to_message`.

        Raises:
            ValueError: the message is not valid.
        """
        try:
            codes = tuple(int(code) for code in message["codes"])
            return cls(codes, str(message["stuck"]), bool(message["stopped"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"sent an invalid end: {error!r}") from error


@dataclass(frozen=True)
class Verdict:
    """What becomes of a job whose generation has failed.

    Attributes:
        failure: the first failure.
        restart: which restart follows; 0 if the job has ended.
        limit: how many there may be.
        delay: seconds until it begins.
        reason: why there is none; "" if nobody asked for one.
        saved: whether the job was preempted, and all workers have saved their state.
    """

    failure: Failure
    restart: int = 0
    limit: int = 0
    delay: float = 0.0
    reason: str = ""
    saved: bool = False

    def to_message(self) -> dict[str, Any]:
        """The verdict as a message, which JSON can represent."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Verdict:
        """The inverse of `to_message`.

        Raises:
            ValueError: the message is not valid.
        """
        try:
            return cls(
                failure=Failure.from_message(message["failure"]),
                restart=int(message["restart"]),
                limit=int(message["limit"]),
                delay=float(message["delay"]),
                reason=str(message["reason"]),
                saved=bool(message["saved"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"sent an invalid verdict: {error!r}") from error


@dataclass(frozen=True)
class Beginning:
    """A generation that begins now.

    Attributes:
        generation: its number.
        secret: its workers' secret; "" for the one that the user has set.
    """

    generation: int
    secret: str = field(default="", repr=False)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Beginning:
        """Reads it from what `dataclasses.asdict` gives.

        Raises:
            ValueError: the message is not valid.
        """
        try:
            return cls(int(message["generation"]), str(message["secret"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"sent an invalid beginning: {error!r}") from error
