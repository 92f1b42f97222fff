"""Status queries: rank 0 reports the state of the job to observers.

An observer is a process that does not belong to the job, such as `tfdist doctor`.
"""

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tfdist._src.cluster.auth.handshake import HELLO_SECONDS, handshake, is_closed
from tfdist._src.cluster.auth.identity import OBSERVE, Identity
from tfdist._src.cluster.net import framing
from tfdist._src.cluster.net.dns import resolve
from tfdist._src.cluster.net.sockets import CONNECT_SECONDS, connect, send_at_once, why_unreachable
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.rendezvous.shared_listener import Wake, shared_listener_of
from tfdist._src.cluster.session.connections import REPORT_LIMIT, Gathering, Presence
from tfdist._src.cluster.session.session import Session
from tfdist._src.log import logger
from tfdist._src.options import Options
from tfdist.errors import ClusterError, RendezvousError

_MAX_TEXT = 2000


@dataclass(frozen=True)
class RankState:
    """The state of a rank, as it is known to rank 0.

    Attributes:
        rank: the rank.
        worker: the name of the rank in messages.
        silence: the number of seconds since rank 0 last received data from the rank. None if the
            rank is not connected.
        gone: the reason why the rank is not connected, such as "has left the job". "" if the rank
            is connected.
        report: the report of the rank. None if the rank did not answer in time.
    """

    rank: int
    worker: str
    silence: float | None
    gone: str
    report: dict[str, Any] | None


def encode_answer(
    workers: Sequence[str], presences: Sequence[Presence], reports: dict[int, bytes]
) -> bytes:
    """Returns the frame that answers an observer. The reports become the payload of the frame.

    Args:
        workers: the name of each rank in messages.
        presences: for each rank, whether it is connected to rank 0.
        reports: the reports of the ranks that have answered, by rank.
    """
    ranks = [
        [worker, presence.silence, presence.gone, len(reports.get(rank, b""))]
        for rank, (worker, presence) in enumerate(zip(workers, presences, strict=True))
    ]
    payload = b"".join(reports.get(rank, b"") for rank in range(len(workers)))
    return framing.encode({"kind": "answer", "ranks": ranks}, payload)


def decode_answer(header: framing.Header, payload: bytes) -> list[RankState]:
    """Decodes the frame that answers an observer; returns the states in rank order.

    Raises:
        WireError: the frame is not a valid answer.
    """
    ranks = header.get("ranks")
    if header["kind"] != "answer" or not isinstance(ranks, list) or not ranks:
        raise framing.WireError("it sent no answer")
    seen: list[RankState] = []
    for entry in ranks:
        if not isinstance(entry, list) or not _is_entry(*entry[:5]):
            raise framing.WireError("it sent a malformed answer")
        worker, silence, gone, size = entry
        if not 0 <= size <= min(len(payload), REPORT_LIMIT):
            raise framing.WireError("it sent a malformed answer")
        report, payload = payload[:size], payload[size:]
        worker, gone = framing.printable(worker[:_MAX_TEXT]), framing.printable(gone[:_MAX_TEXT])
        seen.append(RankState(len(seen), worker, silence, gone, _report(report)))
    return seen


def _is_entry(*values: Any) -> bool:
    kinds = [type(value) for value in values]
    return kinds in ([str, float, str, int], [str, type(None), str, int])


def _report(text: bytes) -> dict[str, Any] | None:
    """Decodes the report of a rank, which may be malformed; None if the rank sent no report."""
    if not text:
        return None
    try:
        report = json.loads(text.decode())
    except (ValueError, RecursionError):
        report = None
    return report if isinstance(report, dict) else {"error": "its report is malformed"}


PATIENCE_SECONDS = 3.0
"""The time limit for the reports of the ranks."""

_SEND_SECONDS = 10.0
_MAX_OBSERVERS = 4
"""The maximum number of observers answered at the same time."""
_CHUNK = 64 * 1024


class _Reply:
    """An answer that has not been sent completely yet."""

    def __init__(self, sock: socket.socket, frame: bytes) -> None:
        self.sock = sock
        self.deadline = time.monotonic() + _SEND_SECONDS
        self._rest = memoryview(frame)

    def advance(self) -> bool:
        """Sends as much as possible without blocking; returns whether the answer is complete."""
        with contextlib.suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[self.sock.send(self._rest[:_CHUNK]) :]
        return not self._rest


class ObservationServer:
    """Answers observers in the thread of the listener.

    The listener creates a new server each time that it starts to listen. An observer sends no
    request. After the handshake, it receives an answer, and the connection is closed. To compute an
    answer, rank 0 requests the reports of all ranks. Observers that connect while rank 0 waits for
    these reports receive the same answer.

    Args:
        selector: the selector of the listening thread. The data of each registered connection is
            the function to call when the connection is ready.
        session: the session of rank 0.
        wake: wakes the listening thread; can be called in any thread.
    """

    def __init__(
        self, selector: selectors.BaseSelector, session: Session, wake: Callable[[], object]
    ) -> None:
        self.identity = Identity.of(session.topology, OBSERVE)
        self._selector = selector
        self._session = session
        self._wake = wake
        self._waiting: list[socket.socket] = []
        self._replies: list[_Reply] = []
        self._gathering: Gathering | None = None
        self._own = b""
        self._deadline = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether any observer still waits for its answer."""
        return bool(self._waiting or self._replies)

    def tick(self) -> None:
        """Sends the answers that are ready, and drops slow observers; call it after every wait."""
        now = time.monotonic()
        if self._gathering and (self._gathering.is_complete or now >= self._deadline):
            frame = self._answer(self._gathering.reports)
            self._gathering = None
            waiting, self._waiting = self._waiting, []
            for sock in waiting:
                reply = _Reply(sock, frame)
                self._replies.append(reply)
                self._selector.register(sock, selectors.EVENT_WRITE, partial(self._send, reply))
                self._send(reply)
        for reply in [one for one in self._replies if now >= one.deadline]:
            self._end(reply)

    def close(self) -> None:
        """Closes all connections."""
        for reply in list(self._replies):
            self._end(reply)
        for sock in self._waiting:
            sock.close()

    def admit(self, sock: socket.socket, hello: Identity) -> None:
        """Accepts an observer; requests the reports of the ranks if no request is pending."""
        if len(self._waiting) + len(self._replies) >= _MAX_OBSERVERS:
            send_at_once(sock, framing.encode({"kind": "busy"}))
            sock.close()
            return
        self._waiting.append(sock)
        if self._gathering is None:
            self._deadline = time.monotonic() + PATIENCE_SECONDS
            self._own = self._session.report.encoded()
            self._gathering = self._session.gather(self._wake)

    def _answer(self, reports: dict[int, bytes]) -> bytes:
        session = self._session
        presences = [session.presence(rank) for rank in range(1, session.size)]
        workers = [str(worker) for worker in session.topology.workers]
        return encode_answer(workers, [Presence(0.0), *presences], {0: self._own, **reports})

    def _send(self, reply: _Reply) -> None:
        if reply in self._replies:
            try:
                ended = reply.advance()
            except OSError:  # the observer has closed the connection
                ended = True
            if ended:
                self._end(reply)

    def _end(self, reply: _Reply) -> None:
        self._replies.remove(reply)
        self._selector.unregister(reply.sock)
        reply.sock.close()


_ANSWER_SECONDS = PATIENCE_SECONDS + 10.0
_ME = "tfdist doctor"


def ask(address: str, options: Options) -> list[RankState]:
    """Requests the state of a running job from rank 0, without disturbing the job.

    Args:
        address: the `"host:port"` of rank 0 in the workers' cluster.
        options: the options of the job. `secret` and the TLS options must be the same as those of
            the workers.

    Returns:
        The states of the ranks, in rank order.

    Raises:
        ClusterError: the address is invalid, or the job has a different secret or a different
            version of tfdist.
        TlsError: the two ends do not trust each other, or only one of them uses TLS.
        RendezvousError: no process answers at the address, or the process is not rank 0 of a job.

    Example:
        >>> ask("10.0.0.1:8470", Options(secret="..."))[0].report["steps"]  # doctest: +SKIP
        1200
    """
    tls = Tls.load(options)
    mine = Identity.of_other(_ME, OBSERVE)
    name = f"rank 0 ({address})"
    now = time.monotonic()
    try:
        sock = connect(resolve(address), now + CONNECT_SECONDS)
    except OSError as error:
        raise RendezvousError(
            f"{address} cannot be queried: {why_unreachable(error)}. Pass the address of rank 0, "
            "the first in TF_CONFIG, of a job that is training with the native collectives and "
            "has a secret, TLS certificates, or loopback addresses only."
        ) from None
    try:
        if tls:
            sock = tls.wrap(sock, dialed=True)
        admit = _screen
        handshake(
            sock, mine, options.secret, now + HELLO_SECONDS, first=True, admit=admit, name=name
        )
        header, payload = framing.read_frame(
            sock, framing.FRAME_LIMIT, time.monotonic() + _ANSWER_SECONDS
        )
        if header["kind"] == "busy":
            raise RendezvousError(f"{name} is answering other queries: try again.")
        return decode_answer(header, payload)
    except framing.WireError as error:
        raise RendezvousError(
            f"{address} is not rank 0 of a job that can be queried: {error}. Pass the address of "
            "rank 0, the first in TF_CONFIG; jobs that use TensorFlow's collectives cannot be "
            "queried, because TensorFlow's server has that port."
        ) from None
    except OSError as error:
        raise RendezvousError(
            f"{address} did not answer as rank 0 of a running job: {error}. It cannot be queried "
            "while the workers connect to one another; try again, or see its log."
        ) from None
    finally:
        sock.close()


def _screen(theirs: Identity) -> None:
    mine = Identity.of_other(_ME, OBSERVE).version
    if theirs.version != mine:
        raise ClusterError(
            f"{theirs} runs tfdist {theirs.version}, but this is tfdist {mine}: run `tfdist "
            "doctor` of that version."
        )
    if theirs.rank != 0 or theirs.purpose != OBSERVE:
        raise framing.WireError(f"it is {theirs}, which does not answer observers")


def observe(session: Session, options: Options, announce: Announce = logger.warning) -> None:
    """Makes rank 0 answer observers at its address, except while the workers need that address.

    This function has no effect on other ranks, or if it has already been called on rank 0. It also
    has no effect if the job is not protected (see `is_closed`), because any process could then read
    the state of the job.

    Args:
        session: the session of this process.
        options: the job's options. `secret` and the TLS options authenticate the observers in the
            same way as the workers.
        announce: called with each message about a rejected connection; prints to stderr by default.

    Example:
        >>> from tfdist._src.cluster import Topology, meet
        >>> observe(meet(Topology(), Options()), Options())  # alone, there is nobody to ask
    """
    if session.rank != 0 or session.size == 1 or not is_closed(session.topology, options):
        return
    what = "`tfdist doctor --job` cannot query this job"
    listener = shared_listener_of(session, options, what, announce)
    if listener.serves(OBSERVE):
        return

    def answering(selector: selectors.BaseSelector, wake: Wake) -> ObservationServer:
        return ObservationServer(selector, session, wake)

    listener.serve(OBSERVE, answering, _MAX_OBSERVERS)
    session.address.let(listener)
