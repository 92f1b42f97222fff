"""Tracks which ranks joined which exchange, and when one can no longer complete; does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tfdist._src.cluster.net.wait_messages import named
from tfdist._src.cluster.session.crossed_waits import CrossedWait, crossed_waits
from tfdist._src.cluster.spec.topology import Worker
from tfdist.errors import PeerLostError, ProgramMismatchError, RendezvousError, TfdistError

COLLECTIVE_TIMEOUT = "TFDIST_COLLECTIVE_TIMEOUT"

Decision = Callable[[list[bytes]], list[bytes]]
"""What rank 0 replies to each rank, given the payloads of all; it must not raise or block."""


@dataclass
class Exchange:
    """One exchange that some ranks have joined.

    Attributes:
        decide: rank 0's decision; None if all ranks get all payloads.
        payloads: of the ranks that have joined.
    """

    tag: str
    first: int
    deadline: float
    timeout: float
    variable: str
    payloads: dict[int, bytes] = field(default_factory=dict)
    decide: Decision | None = None
    started: float = 0.0
    warned: float = 0.0  # seconds waited at the last warning

    def in_rank_order(self) -> list[bytes]:
        """The payloads in rank order, once all ranks have joined."""
        return [self.payloads[rank] for rank in range(len(self.payloads))]


class PendingExchanges:
    """The exchanges that rank 0 has yet to complete.

    Args:
        workers: the group in rank order; empty for a single process.

    Example:
        >>> exchanges = PendingExchanges(())
        >>> exchanges.join(0, 1, "greeting", b"hello", deadline=1.0, timeout=1.0).in_rank_order()
        [b'hello']
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._size = max(1, len(workers))
        self._pending: dict[int, Exchange] = {}
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
        decide: Decision | None = None,
    ) -> Exchange | None:
        """Records that a rank joins an exchange.

        Args:
            rank: the joining rank.
            sequence: number of the exchange on that rank, from 1.
            tag: that rank's tag for it.
            payload: that rank's payload.
            deadline: when that rank gives up, on the caller's clock.
            timeout: seconds from joining to the deadline.
            variable: the environment variable that sets the timeout.
            decide: rank 0's decision, if there is one.

        Returns:
            The exchange once the last rank has joined, else None.

        Raises:
            ProgramMismatchError: another rank used a different tag.
        """
        new = Exchange(tag, rank, deadline, timeout, variable, started=deadline - timeout)
        current = self._pending.setdefault(sequence, new)
        if tag != current.tag:
            raise ProgramMismatchError(
                f"The workers run different programs: exchange {sequence} is {current.tag!r} at "
                f"{self._name(current.first)} and {tag!r} at {self._name(rank)}. Run the same "
                f"script with the same arguments on all workers, and train and predict in one "
                f"thread."
            )
        if deadline < current.deadline:
            current.deadline, current.timeout, current.variable = deadline, timeout, variable
        current.payloads[rank] = payload
        current.decide = current.decide or decide
        if len(current.payloads) < self._size:
            return None
        return self._pending.pop(sequence)

    def leave(self, rank: int) -> None:
        """Records that a rank has left normally and joins no more exchanges."""
        self._gone.add(rank)

    def stuck(self, now: float) -> TfdistError | None:
        """The reason why an exchange cannot complete; None while all can.

        Args:
            now: the current time, on the clock of the deadlines.
        """
        for current in self._pending.values():
            # Called whenever a rank joins, so it does not look at all ranks.
            if gone := self._gone.difference(current.payloads):
                first = min(gone)
                return PeerLostError(
                    f"rank {first}, {self._name(first)}, has left the job without joining "
                    f"exchange {current.tag!r}. Run the same number of steps on all workers."
                )
            if now >= current.deadline:
                return RendezvousError(
                    f"exchange {current.tag!r} timed out after {current.timeout:g} s waiting for "
                    f"{self._names(self._missing(current))}. Check what they are doing; if they "
                    f"are only slow, increase {current.variable}."
                )
        return None

    def slow(self, now: float, stall_warning: float) -> list[str]:
        """Warnings for stalled exchanges, repeated each time the wait has doubled.

        Args:
            now: the current time, on the clock of the deadlines.
            stall_warning: seconds until the first warning.
        """
        lines = []
        for current in self._pending.values():
            waited = now - current.started
            if waited >= max(stall_warning, 2 * current.warned):
                current.warned = waited
                lines.append(
                    f"exchange {current.tag!r} has waited {waited:.0f} s for "
                    f"{self._names(self._missing(current))}; it fails after {current.timeout:g} s"
                )
        return lines

    def waited(self, now: float) -> float:
        """For how long an exchange has waited, in seconds; 0 without one."""
        return max((now - current.started for current in self._pending.values()), default=0.0)

    def crossed_waits(self, reports: Mapping[int, bytes]) -> set[CrossedWait]:
        """The ranks that wait for one that is in an exchange, instead of joining it.

        Args:
            reports: what the ranks say of themselves, as JSON.
        """
        names = {rank: str(worker) for rank, worker in enumerate(self._workers)}
        return set().union(
            *(
                crossed_waits(sequence, current.tag, set(current.payloads), reports, names)
                for sequence, current in self._pending.items()
            )
        )

    def _missing(self, current: Exchange) -> list[int]:
        return [rank for rank in range(self._size) if rank not in current.payloads]

    def _names(self, ranks: Sequence[int]) -> str:
        names = named([self._workers[rank] for rank in ranks])
        return f"{len(ranks)} of {self._size} workers: {names}"

    def _name(self, rank: int) -> str:
        return str(self._workers[rank])
