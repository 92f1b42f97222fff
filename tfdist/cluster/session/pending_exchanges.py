"""Who has joined which exchange, and when one can no longer complete; holds no communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tfdist.cluster.net.wait_messages import named
from tfdist.cluster.spec.topology import Worker
from tfdist.errors import PeerLostError, ProgramMismatchError, RendezvousError, TfdistError

COLLECTIVE_TIMEOUT = "TFDIST_COLLECTIVE_TIMEOUT"


@dataclass
class _Round:
    """One exchange that some ranks have joined."""

    tag: str
    first: int
    deadline: float
    timeout: float
    variable: str
    payloads: dict[int, bytes] = field(default_factory=dict)
    began: float = 0.0
    warned: float = 0.0  # after how many seconds


class PendingExchanges:
    """Rank 0's record of the exchanges.

    Args:
        workers: the group in rank order; one unnamed process where it is empty.

    Example:
        >>> PendingExchanges(()).join(0, 0, "greeting", b"hello", deadline=1.0, timeout=1.0)
        [b'hello']
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._size = max(1, len(workers))
        self._rounds: dict[int, _Round] = {}
        self._gone: set[int] = set()

    def join(
        self,
        rank: int,
        sequence: int,
        tag: str,
        payload: bytes,
        *,
        deadline: float,
        timeout: float,
        variable: str = COLLECTIVE_TIMEOUT,
    ) -> list[bytes] | None:
        """Records that a rank joins an exchange.

        Args:
            rank: who joins.
            sequence: the number of the exchange on that rank, from 0.
            tag: what that rank calls it.
            payload: what it brings.
            deadline: when it gives up, on the caller's clock.
            timeout: how many seconds after joining that is.
            variable: the environment variable that sets these seconds.

        Returns:
            All payloads in rank order where this was the last rank, else None.

        Raises:
            ProgramMismatchError: another rank calls the exchange otherwise.
        """
        fresh = _Round(tag, rank, deadline, timeout, variable, began=deadline - timeout)
        current = self._rounds.setdefault(sequence, fresh)
        if tag != current.tag:
            raise ProgramMismatchError(
                f"The workers run different programs: exchange {sequence} is {current.tag!r} at "
                f"{self._name(current.first)} and {tag!r} at {self._name(rank)}. Run the same "
                f"script with the same arguments on all workers."
            )
        if deadline < current.deadline:
            current.deadline, current.timeout, current.variable = deadline, timeout, variable
        current.payloads[rank] = payload
        if len(current.payloads) < self._size:
            return None
        del self._rounds[sequence]
        return [current.payloads[number] for number in range(self._size)]

    def leave(self, rank: int) -> None:
        """Records that a rank has ended normally and joins no more."""
        self._gone.add(rank)

    def stuck(self, now: float) -> TfdistError | None:
        """Why an exchange cannot complete; None while all still can.

        Args:
            now: the time on the clock of the deadlines.
        """
        for current in self._rounds.values():
            missing = self._missing(current)
            gone = [rank for rank in missing if rank in self._gone]
            if gone:
                return PeerLostError(
                    f"rank {gone[0]}, {self._name(gone[0])}, has ended and never joins exchange "
                    f"{current.tag!r}. Run the same number of steps on all workers."
                )
            if now >= current.deadline:
                return RendezvousError(
                    f"exchange {current.tag!r} waited {current.timeout:g} s in vain for "
                    f"{self._names(missing)}. See what they do; where they are only slow, set "
                    f"{current.variable} to wait longer."
                )
        return None

    def slow(self, now: float, patience: float) -> list[str]:
        """A line for each exchange that has waited long, and again each time this has doubled.

        Args:
            now: the time on the clock of the deadlines.
            patience: seconds until the first line.
        """
        lines = []
        for current in self._rounds.values():
            waited = now - current.began
            if waited >= max(patience, 2 * current.warned):
                current.warned = waited
                lines.append(
                    f"tfdist: exchange {current.tag!r} has waited {waited:.0f} s for "
                    f"{self._names(self._missing(current))}; it fails after {current.timeout:g} s"
                )
        return lines

    def _missing(self, current: _Round) -> list[int]:
        return [rank for rank in range(self._size) if rank not in current.payloads]

    def _names(self, ranks: Sequence[int]) -> str:
        names = named([self._workers[rank] for rank in ranks])
        return f"{len(ranks)} of {self._size} workers: {names}"

    def _name(self, rank: int) -> str:
        return str(self._workers[rank])
