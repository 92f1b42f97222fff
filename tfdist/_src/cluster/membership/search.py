"""Finds the members of a running job, by asking some addresses."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterable, Sequence

from tfdist._src.cluster.membership.calls import Calls
from tfdist._src.cluster.membership.view import Member, decode_member, decode_view
from tfdist._src.cluster.net.framing import Header, WireError
from tfdist.errors import TfdistError

_ASK_SECONDS = 3.0
_PAUSE_SECONDS = 1.0
_AT_ONCE = 8


class Found(Exception):
    """There is a running job.

    Attributes:
        members: its members; the first one has answered.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(str(members[0]))
        self.members = members


class Search:
    """Asks a few addresses every second, one after the other, while this process does other things.

    Args:
        calls: how to ask.
        addresses: those of workers that may become members of a running job.
    """

    def __init__(self, calls: Calls, addresses: Sequence[str]) -> None:
        self._calls = calls
        self._addresses = list(addresses)
        self._found: Sequence[Member] = ()
        self._stopped = threading.Event()
        if addresses:
            threading.Thread(target=self._run, name="tfdist-search", daemon=True).start()

    def check(self) -> None:
        """Raises what it has found, once it has.

        Raises:
            Found: one of them is a member of a running job.
        """
        if self._found:
            raise Found(self._found)

    def stop(self) -> None:
        """Asks no more."""
        self._stopped.set()

    def _run(self) -> None:
        turns = itertools.cycle(self._addresses)
        count = min(_AT_ONCE, len(self._addresses))
        while not (self._found or self._stopped.wait(_PAUSE_SECONDS)):
            self._found, _ = find(self._calls, list(itertools.islice(turns, count)))


def find(calls: Calls, addresses: Iterable[str]) -> tuple[Sequence[Member], TfdistError | None]:
    """Asks all addresses at once, until a member of a running job answers.

    Args:
        calls: how to ask.
        addresses: those of workers that may be members of a running job.

    Returns:
        The members of its job, of which the first one has answered; none if nobody is in a job, and
        possibly why nobody can tell.
    """
    answers: queue.Queue[Sequence[Member] | TfdistError] = queue.Queue()

    def ask(address: str) -> None:
        try:
            header = calls.ask(address, {"kind": "who"}, _ASK_SECONDS)
            running = header["kind"] == "member" and header.get("view") is not None
            answers.put(_members(header) if running else ())
        except TfdistError as error:
            answers.put(error)
        except (OSError, WireError, KeyError):
            answers.put(())

    addresses = list(addresses)
    for address in addresses:
        threading.Thread(target=ask, args=(address,), name="tfdist-find", daemon=True).start()
    failure: TfdistError | None = None
    deadline = time.monotonic() + 2 * _ASK_SECONDS
    for _ in addresses:
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(answer, TfdistError):
            failure = failure or answer
        elif answer:
            return answer, None
    return (), failure


def _members(header: Header) -> Sequence[Member]:
    """The members that an answer names; first the one that it is from."""
    first = decode_member(header.get("member"))
    others = decode_view(header.get("view")).members
    return (first, *(one for one in others if one.incarnation != first.incarnation))
