"""The rendezvous on rank 0: listens until all others have arrived, or tells them of a failure."""

from __future__ import annotations

import heapq
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from tfdist._src.cluster.auth.compatibility import clusters_differ, disagreement, duplicate, entries
from tfdist._src.cluster.auth.identity import JOIN, REGROUP, Identity
from tfdist._src.cluster.auth.trust import is_closed
from tfdist._src.cluster.net.dns import NameChecks
from tfdist._src.cluster.net.framing import HELLO_LIMIT, Decoder, Header, WireError, encode
from tfdist._src.cluster.net.sockets import has_ended, send_at_once
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import NAMED, Announce, WaitMessages, named
from tfdist._src.cluster.rendezvous.acceptor import Acceptor, NotHere
from tfdist._src.cluster.session.error_codec import encode_error
from tfdist._src.cluster.spec.topology import Topology
from tfdist._src.options import Options
from tfdist.errors import RendezvousError, TfdistError

STATUS_SECONDS = 2.0
_LINGER_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.2


class _Asked:
    """A worker with another cluster, which was asked for the difference."""

    def __init__(self, sock: socket.socket, hello: Identity) -> None:
        self.sock = sock
        self.hello = hello
        self.decoder = Decoder(HELLO_LIMIT)
        self.deadline = time.monotonic() + _ANSWER_SECONDS


class RendezvousServer:
    """Gathers all workers at rank 0.

    What it sends to each worker does not depend on the number of workers.

    Args:
        topology: the group; this process is rank 0.
        listeners: sockets listening at this process's address; the caller closes them.
        options: `start_timeout` and `secret` are used.
        tls: the TLS contexts; None for connections without TLS.
        announce: called with each line about missing workers.
        check: called several times a second; what it raises ends the wait.
    """

    def __init__(
        self,
        topology: Topology,
        listeners: Sequence[socket.socket],
        options: Options,
        tls: Tls | None,
        announce: Announce,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._topology = topology
        self._check = check
        self._listeners = listeners
        self._timeout = timeout = options.start_timeout
        self._closed_job = is_closed(topology, options)
        self._announce = announce
        self._mine = Identity.of(topology)
        self._progress = WaitMessages(topology.me, timeout, announce)
        self._name_checks = NameChecks()
        self._present: dict[int, tuple[socket.socket, Identity]] = {}
        self._absent = set(range(1, topology.size))
        self._asked: dict[socket.socket, _Asked] = {}
        self._error: TfdistError | None = None
        self._refusal: TfdistError | None = None  # of one that has proven nothing
        self._informed: set[int] = set()  # of the error
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            self._selector,
            self._mine,
            options.secret,
            tls,
            2 * topology.size,
            _screen,
            self._admit,
            announce,
        )

    def run(self) -> dict[int, socket.socket]:
        """Waits for all workers.

        Returns:
            The connection to every other rank.

        Raises:
            ClusterError: a worker has a different cluster or tfdist version, or an invalid or
                duplicate rank. If the job is open to strangers, only that worker fails.
            RendezvousError: some worker did not arrive in time.
        """
        deadline = time.monotonic() + self._timeout
        try:
            for sock in self._listeners:
                sock.setblocking(False)
                accept = partial(self._acceptor.accept, sock)
                self._selector.register(sock, selectors.EVENT_READ, accept)
            self._await_all(deadline)
        except BaseException:
            for sock, _ in self._present.values():
                sock.close()
            raise
        finally:
            self._close()
        for sock, _ in self._present.values():
            send_at_once(sock, encode({"kind": "go"}))
        return {rank: sock for rank, (sock, _) in self._present.items()}

    def _await_all(self, deadline: float) -> None:
        next_status = 0.0
        while self._error is None and self._incomplete():
            self._check()
            self._progress.report(self._waiting)
            self._poll()
            if time.monotonic() >= next_status:
                if next_status:  # most workers arrive before that
                    self._name_checks.begin(self._absent_addresses())
                next_status = time.monotonic() + STATUS_SECONDS
                self._send(self._status(names=True))
            if time.monotonic() >= deadline and self._incomplete():
                self._fail(self._timeout_error())
                break
        if self._error is not None:
            end = min(deadline, time.monotonic() + _LINGER_SECONDS)
            while len(self._informed) < self._topology.size - 1 and time.monotonic() < end:
                self._poll()
            raise self._error

    def _incomplete(self) -> bool:
        if not self._absent:
            for rank, (sock, _) in list(self._present.items()):
                if has_ended(sock):
                    self._drop(rank)
        return bool(self._absent)

    def _status(self, *, names: bool) -> Header:
        some = self._first_absent() if names else []
        return {"kind": "waiting", "missing": len(self._absent), "some": some}

    def _first_absent(self) -> list[int]:
        return heapq.nsmallest(NAMED, self._absent)

    def _waiting(self) -> str:
        return f"{len(self._absent)} of {self._topology.size} workers: {self._names()}"

    def _names(self) -> str:
        some = [self._topology.workers[rank] for rank in self._first_absent()]
        problem = self._name_checks.problem(self._absent_addresses())
        return named(some, len(self._absent)) + (f"; {problem}" if problem else "")

    def _absent_addresses(self) -> list[str]:
        return [self._topology.workers[rank].address for rank in self._first_absent()]

    def _timeout_error(self) -> TfdistError:
        refused = f" Refused meanwhile: {self._refusal}" if self._refusal else ""
        return RendezvousError(
            f"{len(self._absent)} of {self._topology.size} workers did not arrive within "
            f"{self._timeout:g} s: {self._names()}. Start them, check in their logs why they "
            f"exited, or increase TFDIST_START_TIMEOUT.{refused}"
        )

    def _poll(self) -> None:
        """Handles pending events; returns soon, so that signals are handled."""
        for key, _ in self._selector.select(_POLL_SECONDS):
            key.data()
        now = time.monotonic()
        for asked in [one for one in self._asked.values() if now >= one.deadline]:
            self._judge(asked, None)
        self._acceptor.tick()

    def _admit(self, sock: socket.socket, hello: Identity) -> None:
        """Admits or rejects a worker that has proven the secret."""
        rank = hello.rank
        error: TfdistError | None = disagreement(self._topology, self._mine, hello)
        other_cluster = hello.fingerprint != self._mine.fingerprint
        if other_cluster and hello.version == self._mine.version:
            self._ask(sock, hello)
            return
        if error is None:
            known = self._present.get(rank)
            if known and (known[1].nonce == hello.nonce or has_ended(known[0])):
                self._drop(rank)
            elif known or rank == 0:
                error = duplicate(known[1] if known else self._mine, hello)
        if error is not None:
            self._refuse(sock, hello, error)
        elif self._error is not None:
            self._inform(sock, hello, self._error)
        else:
            self._present[rank] = (sock, hello)
            self._absent.discard(rank)
            self._selector.register(sock, selectors.EVENT_READ, partial(self._left, rank, sock))
            # With names for few only: they would have to be looked up for each that arrives.
            status = self._status(names=len(self._absent) <= NAMED)
            if not send_at_once(sock, encode(status)):
                self._drop(rank)

    def _ask(self, sock: socket.socket, hello: Identity) -> None:
        """Sends this cluster to a worker with another one, which answers with the difference."""
        asked = self._asked[sock] = _Asked(sock, hello)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read_answer, asked))
        if not send_at_once(sock, encode({"kind": "cluster", "cluster": entries(self._topology)})):
            self._judge(asked, None)

    def _read_answer(self, asked: _Asked) -> None:
        if asked.sock not in self._asked:
            return
        try:
            data = asked.sock.recv(4096)
            frames = asked.decoder.feed(data)
        except BlockingIOError:
            return
        except (OSError, WireError):
            data, frames = b"", []
        if frames or not data:
            self._judge(asked, frames[0][0] if frames else None)

    def _judge(self, asked: _Asked, answer: Header | None) -> None:
        """Refuses a worker that has another cluster, with its answer where it has given one."""
        del self._asked[asked.sock]
        self._selector.unregister(asked.sock)
        difference = answer.get("difference") if answer else None
        if not isinstance(difference, str) or not difference.isprintable():
            difference = f"that of {asked.hello} is not that of {self._mine}"
        self._refuse(asked.sock, asked.hello, clusters_differ(difference))

    def _refuse(self, sock: socket.socket, hello: Identity, error: TfdistError) -> None:
        """Refuses a worker; unless it may be a stranger, all workers fail."""
        if self._closed_job:
            self._fail(error)
        else:
            self._refusal = error
            self._announce(f"tfdist: refused {hello}: {error}")
        self._inform(sock, hello, self._error or error)

    def _inform(self, sock: socket.socket, hello: Identity, error: TfdistError) -> None:
        send_at_once(sock, encode(encode_error("error", error)))
        sock.close()
        if self._error is not None:
            self._informed.add(hello.rank)

    def _fail(self, error: TfdistError) -> None:
        """Fails the rendezvous with an error, sent to present workers and later arrivals."""
        if self._error is None:
            self._error = error
            self._send(encode_error("error", error))
            self._informed.update(self._present)

    def _send(self, header: Header) -> None:
        frame = encode(header)
        for rank, (sock, _) in list(self._present.items()):
            if not send_at_once(sock, frame):
                self._drop(rank)

    def _left(self, rank: int, sock: socket.socket) -> None:
        """A worker that waits sends nothing: its connection has ended."""
        if rank in self._present and self._present[rank][0] is sock:
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        """Drops a worker that disconnected before all had arrived."""
        sock, hello = self._present.pop(rank)
        self._absent.add(rank)
        self._selector.unregister(sock)
        sock.close()
        if self._error is None:
            self._announce(f"tfdist: {hello} disconnected while waiting for the others")

    def _close(self) -> None:
        self._acceptor.close()
        for sock in self._asked:
            sock.close()
        self._selector.close()


def _screen(hello: Identity) -> None:
    if hello.purpose == REGROUP:  # it asks whether the job runs already
        raise NotHere("this job is starting")
    if hello.purpose != JOIN:
        raise WireError(f"{hello} connected for {hello.purpose!r}, but this is for joining the job")
