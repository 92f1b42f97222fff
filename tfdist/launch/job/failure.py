"""What went wrong first: one failure as data, and the choice among several."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

# In the last lines of a worker, these say that another worker was lost before it.
_VICTIM_MARKS = ("PeerLostError", "UnavailableError")
_SIGNAL_BASE = 128


class Doubt(enum.IntEnum):
    """How likely a failure is only the consequence of another one."""

    NONE = 0
    UNSEEN = 1  # Its last lines went to the terminal, so nobody knows.
    VICTIM = 2


@dataclass(frozen=True)
class Failure:
    """One worker, or one node, that ended the job.

    Attributes:
        node: the machine's number.
        who: `"worker 3"`, `"node 1"` or `"this command"`.
        what: what happened to it, as the end of a sentence that begins with `who`.
        code: the exit code for the launcher.
        doubt: how likely another failure is the cause.
        tail: its last lines of output.
        rank: the worker's rank; None for a node or the command.
        log: the path of the worker's whole output on its node; "" if it went to the terminal.
    """

    node: int
    who: str
    what: str
    code: int
    doubt: Doubt = Doubt.NONE
    tail: tuple[str, ...] = ()
    rank: int | None = None
    log: str = ""

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.who} {self.what}."

    def to_message(self) -> dict[str, Any]:
        """The failure as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Failure:
        """The inverse of `to_message`.

        Raises:
            ValueError: the message is not one of `to_message`.
        """
        try:
            failure = cls(
                node=int(message["node"]),
                who=str(message["who"]),
                what=str(message["what"]),
                code=int(message["code"]),
                doubt=Doubt(message["doubt"]),
                tail=tuple(str(line) for line in message["tail"]),
                rank=None if message["rank"] is None else int(message["rank"]),
                log=str(message["log"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a failure: {error!r}") from error
        return replace(failure, code=min(max(failure.code, 1), 255))


def worker_failure(*, node: int, rank: int, status: int, tail: Sequence[str], log: str) -> Failure:
    """Describes a worker that ended badly.

    Args:
        node: its machine.
        rank: its rank in the job.
        status: its exit code, or minus the signal's number.
        tail: its last lines of output.
        log: where its output is; "" if it went to the terminal, where nobody has read it.

    Example:
        >>> failure = worker_failure(node=0, rank=1, status=-11, tail=[], log="worker-1.log")
        >>> failure.who, failure.what, failure.code
        ('worker 1', 'was killed by SIGSEGV', 139)
    """
    if status < 0:
        hint = ", often the kernel's answer to memory running out" if status == -9 else ""
        what, code = f"was killed by {signal_name(-status)}{hint}", _SIGNAL_BASE - status
        doubt = Doubt.NONE  # No lost peer kills a worker by a signal.
    else:
        what, code = f"failed with exit code {status}", status
        text = "\n".join(tail)
        doubt = Doubt.NONE if log else Doubt.UNSEEN
        if any(mark in text for mark in _VICTIM_MARKS):
            doubt = Doubt.VICTIM
    return Failure(
        node=node,
        who=f"worker {rank}",
        what=what,
        code=code,
        doubt=doubt,
        tail=tuple(tail),
        rank=rank,
        log=log,
    )


def stopped_by(node: int, number: signal.Signals) -> Failure:
    """Describes that a launcher was asked to stop."""
    who = "this command" if node == 0 else f"the command on node {node}"
    return Failure(
        node=node, who=who, what=f"was stopped by {number.name}", code=_SIGNAL_BASE + number
    )


def lost_host(node: int, address: str) -> Failure:
    """Describes a node whose launcher, or whose connection, is gone."""
    return Failure(
        node=node,
        who=f"node {node} ({address})",
        what="was lost: its launcher died, or the network to it broke",
        code=1,
    )


class FirstFailure:
    """Chooses the failure that caused the others; it holds no clock.

    A clear failure is the verdict at once. A doubtful one waits for a clearer one; when its time
    is over the least doubtful, and among those the first, is the verdict.

    Args:
        patience: seconds that a doubtful failure waits.
        judges: False where a clear failure, too, has to wait for the judgement of another node.

    Example:
        >>> first = FirstFailure(patience=1.0)
        >>> first.add(lost_host(1, "10.0.0.2"), now=5.0)
        >>> first.verdict(5.0).who
        'node 1 (10.0.0.2)'
    """

    def __init__(self, patience: float, judges: bool = True) -> None:
        self._patience = patience
        self._judges = judges
        self._candidates: list[Failure] = []
        self.deadline: float | None = None

    def add(self, failure: Failure, now: float) -> None:
        """Takes note of a failure, in the order in which they happened."""
        self._candidates.append(failure)
        if failure.doubt == Doubt.NONE and self._judges:
            self.deadline = now if self.deadline is None else min(now, self.deadline)
        elif self.deadline is None:
            self.deadline = now + self._patience

    def verdict(self, now: float) -> Failure | None:
        """The failure to show; None while there is none, or while it is in doubt."""
        if self.deadline is None or now < self.deadline:
            return None
        return self.best()

    def best(self) -> Failure | None:
        """The most likely cause among what is known."""
        return min(self._candidates, key=lambda failure: failure.doubt, default=None)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 77` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
