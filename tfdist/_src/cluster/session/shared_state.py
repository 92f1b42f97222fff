"""The state of a session in one process: results, notices, and the error that has ended it."""

import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tfdist._src.cluster.net.framing import Header, WireError, encode
from tfdist._src.log import logger
from tfdist.errors import (
    ClusterError,
    PeerLostError,
    ProgramMismatchError,
    RendezvousError,
    TfdistError,
    TlsError,
    UnsupportedError,
)


@dataclass(frozen=True)
class PendingWait:
    """The exchange or the notice for which this process waits.

    Attributes:
        sequence: for an exchange, the number of the exchange. It is the same on all ranks and
            starts at 1. For a notice, the number of notices with this key that must arrive.
        tag: the purpose of the exchange, or the key of the notice.
        since_ns: the `time.monotonic_ns()` at which this process began to wait.
        is_notice: whether this process waits for a notice. Only rank 0 posts notices.
    """

    sequence: int
    tag: str
    since_ns: int
    is_notice: bool = False

    @property
    def what(self) -> str:
        """A description of the exchange or of the notice for messages."""
        return f"{'notice' if self.is_notice else 'exchange'} {self.tag!r}"


class ExchangeRecorder(Protocol):
    """Records the waits of a session. The methods must not block or raise errors."""

    def on_exchange_begin(self, awaited: PendingWait) -> None:
        """Called when this process joins an exchange or begins to wait for a notice."""

    def on_exchange_end(self, awaited: PendingWait, failed: bool) -> None:
        """Called when the result or the notice has arrived, or when the wait has failed."""

    def on_stall(self, message: str) -> None:
        """Called when this rank or another rank has waited for a long time.

        Args:
            message: a description of the wait, with the ranks that are missing.
        """


_TYPES: dict[str, type[TfdistError]] = {
    error.__name__: error
    for error in (
        ClusterError,
        PeerLostError,
        ProgramMismatchError,
        RendezvousError,
        TlsError,
        UnsupportedError,
    )
}


def encode_error(kind: str, error: TfdistError) -> Header:
    """Encodes an error as the header of a frame of the given kind."""
    return {"kind": kind, "type": type(error).__name__, "message": str(error)}


def decode_error(header: Header) -> TfdistError:
    """Decodes an error from the header of a frame.

    Raises:
        WireError: the header does not contain an error of a known type.
    """
    kind, message = header.get("type"), header.get("message")
    if kind not in _TYPES or not isinstance(message, str):
        raise WireError("it sent an invalid error")
    return _TYPES[kind](message)


def encode_result(sequence: int, payloads: Sequence[bytes]) -> bytes:
    """Encodes the payloads of all ranks as a frame.

    The frame contains equal payloads only once. In most cases, its size therefore does not depend
    on the number of ranks.

    Args:
        sequence: the number of the exchange.
        payloads: the payloads of all ranks, in rank order.

    Example:
        >>> len(encode_result(0, [b"same"] * 1000)) < 100
        True
    """
    numbers: dict[bytes, int] = {}
    runs: list[list[int]] = []
    for payload in payloads:
        number = numbers.setdefault(payload, len(numbers))
        if runs and runs[-1][0] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    sizes = [len(payload) for payload in numbers]
    header = {"kind": "result", "sequence": sequence, "sizes": sizes, "runs": runs}
    return encode(header, b"".join(numbers))


def decode_result(header: Header, payload: bytes, ranks: int) -> list[bytes]:
    """Decodes the payloads of all ranks from a frame; returns them in rank order.

    Raises:
        LookupError, TypeError, ValueError: the frame is malformed.
    """
    if sum(count for _, count in header["runs"]) != ranks:
        raise ValueError(header["runs"])
    distinct, start = [], 0
    for size in header["sizes"]:
        distinct.append(payload[start : start + size])
        start += size
    return [distinct[number] for number, count in header["runs"] for _ in range(count)]


_POLL_SECONDS = 0.5
_T = TypeVar("_T")


@dataclass(frozen=True)
class Notice:
    """A notice that rank 0 has posted.

    Attributes:
        text: the content of the notice.
        received_ns: the `time.time_ns()` at which the notice arrived.
    """

    text: str
    received_ns: int


@dataclass(frozen=True)
class Loss:
    """The loss of a worker.

    Attributes:
        worker: the name of the lost worker, as it is used in messages.
        message: a sentence that describes the loss.
        silent: whether the worker is considered lost because it has been silent for too long. It
            may then still be alive.
    """

    worker: str
    message: str
    silent: bool = False


class SessionState:
    """The state of a session, which the connection thread updates and other threads wait for.

    Attributes:
        awaited: the exchange for which a thread of this process waits, if any.
        awaited_notice: the notice for which a thread of this process waits, if any.
        recorder: the object that records these waits, if any.
        lost_ranks: the ranks that are known to be lost.
        silent_ranks: the ranks that are considered lost because they were silent for too long.
        chief_has_left: whether rank 0 has left normally, which ends the session.
    """

    def __init__(self) -> None:
        self.awaited: PendingWait | None = None
        self.awaited_notice: PendingWait | None = None
        self.recorder: ExchangeRecorder | None = None
        self.lost_ranks: set[int] = set()
        self.silent_ranks: set[int] = set()
        self.chief_has_left = False
        self._changed = threading.Condition()
        self._exchanges = 0
        self._results: dict[int, list[bytes]] = {}
        self._notices: defaultdict[str, list[Notice]] = defaultdict(list)
        self._error: TfdistError | None = None
        self._lost: str | None = None
        self._callbacks: list[Callable[[str], object]] = []
        self._left: list[str] = []
        self._left_callbacks: list[Callable[[str], object]] = []

    def check(self) -> None:
        """Raises the error that has ended the session, if any."""
        with self._changed:
            self._check()

    @property
    def failure(self) -> str | None:
        """The message of the error that has ended the session; None if it has not ended."""
        with self._changed:
            return None if self._error is None else str(self._error)

    def expect(self, tag: str) -> int:
        """Starts a new exchange and returns its number; drops the results of earlier exchanges."""
        with self._changed:
            self._exchanges += 1
            self.awaited = exchange = PendingWait(self._exchanges, tag, time.monotonic_ns())
            self._results.clear()
        if self.recorder is not None:
            self.recorder.on_exchange_begin(exchange)
        return exchange.sequence

    def deliver(self, sequence: int, payloads: list[bytes]) -> None:
        """Stores the result of an exchange, for which a thread waits in `result`."""
        with self._changed:
            if self.awaited and sequence == self.awaited.sequence:
                self._results[sequence] = payloads
                self._changed.notify_all()

    def notice(self, key: str, text: str) -> None:
        """Stores a notice that has arrived."""
        with self._changed:
            self._notices[key].append(Notice(text, time.time_ns()))
            self._changed.notify_all()

    def stall(self, message: str) -> None:
        """Tells the recorder that this rank or another rank has waited for a long time."""
        if self.recorder is not None:
            self.recorder.on_stall(message)

    def fail(self, error: TfdistError) -> None:
        """Ends the session with an error; only the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def lose(self, message: str, rank: int | None = None, *, silent: bool = False) -> None:
        """Ends the session because a worker is lost; the first loss calls the callbacks."""
        if rank is not None:
            self.lost_ranks.add(rank)
            self.silent_ranks |= {rank} if silent else set()
        self.fail(PeerLostError(message))
        with self._changed:
            if self._lost is not None:
                return
            self._lost = message
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, message)

    def on_lost(self, callback: Callable[[str], object]) -> None:
        """Registers a callback for the first loss; calls it now if a worker is already lost."""
        with self._changed:
            if self._lost is None:
                self._callbacks.append(callback)
                return
        _call(callback, self._lost)

    def leave(self, message: str) -> None:
        """Tells the callbacks that a worker has left normally."""
        with self._changed:
            self._left.append(message)
            callbacks = list(self._left_callbacks)
        for callback in callbacks:
            _call(callback, message)

    def on_left(self, callback: Callable[[str], object]) -> None:
        """Registers a callback for workers that leave; calls it now for workers that have left."""
        with self._changed:
            self._left_callbacks.append(callback)
            left = list(self._left)
        for message in left:
            _call(callback, message)

    def result(self, sequence: int, deadline: float, timeout_error: TfdistError) -> list[bytes]:
        """Waits for the result of an exchange and returns it; raises an error at the deadline.

        Args:
            sequence: the number of the exchange, as returned by `expect`.
            deadline: the `time.monotonic()` at which the wait fails.
            timeout_error: the error to raise at the deadline.
        """
        failed = True
        try:
            got = self._wait(lambda: self._results.pop(sequence, None), deadline, timeout_error)
            failed = False
            return got
        finally:
            exchange, self.awaited = self.awaited, None
            if self.recorder is not None and exchange is not None:
                self.recorder.on_exchange_end(exchange, failed)

    def notices(
        self,
        key: str,
        count: int,
        deadline: float,
        timeout_error: TfdistError,
        warning: tuple[float, str],
        tell: Callable[[str], object],
    ) -> list[Notice]:
        """Waits until `count` notices with this key have arrived; returns all of them.

        Args:
            key: the topic of the notices.
            count: the number of notices to wait for.
            deadline: the `time.monotonic()` at which the wait fails.
            timeout_error: the error to raise at the deadline.
            warning: the `time.monotonic()` at which to log a warning, and the text of the warning.
            tell: called with the text of the warning; sends it to the other ranks without blocking.
        """

        def enough() -> list[Notice] | None:
            notices = self._notices[key]
            return list(notices) if len(notices) >= count else None

        def warn(line: str) -> None:
            logger.warning(line)
            self.stall(line)
            tell(line)

        notice = PendingWait(count, key, time.monotonic_ns(), is_notice=True)
        failed, self.awaited_notice = True, notice
        if self.recorder is not None:
            self.recorder.on_exchange_begin(notice)
        try:
            notices = self._wait(enough, deadline, timeout_error, (*warning, warn))
            failed = False
            return notices
        finally:
            self.awaited_notice = None
            if self.recorder is not None:
                self.recorder.on_exchange_end(notice, failed)

    def _wait(
        self,
        get: Callable[[], _T | None],
        deadline: float,
        timeout_error: TfdistError,
        warning: tuple[float, str, Callable[[str], object]] | None = None,
    ) -> _T:
        with self._changed:
            while (value := get()) is None:
                self._check()
                now = time.monotonic()
                left = deadline - now
                if left <= 0:
                    raise timeout_error
                if warning is not None and now >= warning[0]:
                    _, line, warn = warning
                    warning = None
                    warn(line)
                # Wait for a short time only. If another thread has received a signal, the main
                # thread can run the Python handler of the signal only between two waits.
                self._changed.wait(min(left, _POLL_SECONDS))
            return value

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))


def _call(callback: Callable[[str], object], message: str) -> None:
    try:
        callback(message)
    except Exception:  # an error must not end the thread of the connections
        traceback.print_exc()
