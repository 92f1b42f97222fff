"""How a generation has ended on one host, and what host 0 decides then, as messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from tfdist.launch.job.failure import Failure

_MOST_DELAY = 3600.0


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

    def __post_init__(self) -> None:
        if self.restart < 0 or self.limit < 0 or not 0 <= self.delay <= _MOST_DELAY:
            raise ValueError("it sent an invalid verdict")


@dataclass(frozen=True)
class Beginning:
    """A generation that begins now.

    Attributes:
        generation: its number.
        secret: its workers' secret; "" for the one that the user has set.
    """

    generation: int
    secret: str = field(default="", repr=False)
