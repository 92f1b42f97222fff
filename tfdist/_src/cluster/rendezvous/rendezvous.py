"""Lets all ranks meet at the address of rank 0.

Either all ranks arrive, or the ranks that have arrived raise an error that names the reason.
"""

import heapq
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

from tfdist._src.cluster.auth import identity
from tfdist._src.cluster.auth.handshake import HELLO_SECONDS, check_security, handshake, is_closed
from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.net import framing
from tfdist._src.cluster.net.dns import NameChecks, check_resolvable, resolve
from tfdist._src.cluster.net.listener import claim, explain
from tfdist._src.cluster.net.sockets import (
    allow_descriptors,
    connect,
    has_ended,
    send_at_once,
    why_unreachable,
)
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import NAMED, Announce, WaitMessages, named
from tfdist._src.cluster.rendezvous.acceptor import Acceptor, CannotServe
from tfdist._src.cluster.session.session import Session
from tfdist._src.cluster.session.shared_state import decode_error, encode_error
from tfdist._src.log import logger
from tfdist._src.options import Options
from tfdist.errors import RendezvousError, TfdistError

STATUS_SECONDS = 2.0
_LINGER_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_ACCEPT_POLL_SECONDS = 0.2


class _Asked:
    """A worker with a different cluster; rank 0 has asked it how the clusters differ."""

    def __init__(self, sock: socket.socket, hello: identity.Identity) -> None:
        self.sock = sock
        self.hello = hello
        self.decoder = framing.Decoder(framing.HELLO_LIMIT)
        self.deadline = time.monotonic() + _ANSWER_SECONDS


class RendezvousServer:
    """Rank 0's part of the rendezvous: accepts connections until all workers have arrived.

    The amount of data sent to each worker does not depend on the number of workers.

    Args:
        topology: the workers of the group. This process must be rank 0.
        listeners: sockets that listen at the address of this process. The caller must close them.
        options: the job's options. `start_timeout`, `secret` and the TLS options are used.
        tls: the TLS contexts; None if the job does not use TLS.
        announce: called with each message about missing workers.
        warn: called with each message about a rejected connection or a refused worker.
        check: called several times a second. An error that it raises ends the wait.
    """

    def __init__(
        self,
        topology: Topology,
        listeners: Sequence[socket.socket],
        options: Options,
        tls: Tls | None,
        announce: Announce,
        warn: Announce,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._topology = topology
        self._check = check
        self._listeners = listeners
        self._timeout = timeout = options.start_timeout
        self._closed_job = is_closed(topology, options)
        self._warn = warn
        self._mine = identity.Identity.of(topology)
        self._progress = WaitMessages(topology.me, timeout, announce)
        self._name_checks = NameChecks()
        self._present: dict[int, tuple[socket.socket, identity.Identity]] = {}
        self._absent = set(range(1, topology.size))
        self._asked: dict[socket.socket, _Asked] = {}
        self._error: TfdistError | None = None
        self._refusal: TfdistError | None = None  # the latest reason why a worker was refused
        self._informed: set[int] = set()  # the ranks that know the error
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            self._selector,
            self._mine,
            options.secret,
            tls,
            2 * topology.size,
            _screen_client,
            self._admit,
            warn,
        )

    def run(self) -> dict[int, socket.socket]:
        """Waits for all workers.

        Returns:
            The connection to each other rank, by rank.

        Raises:
            ClusterError: a worker has a different cluster or a different version of tfdist, or an
                invalid or duplicate rank. If the job is not protected (see `is_closed`), only that
                worker fails, because it may not belong to the job.
            RendezvousError: a worker has not arrived in time.
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
            send_at_once(sock, framing.encode({"kind": "go"}))
        return {rank: sock for rank, (sock, _) in self._present.items()}

    def _await_all(self, deadline: float) -> None:
        next_status = 0.0
        while self._error is None and self._incomplete():
            self._check()
            self._progress.report(self._waiting)
            self._poll()
            if time.monotonic() >= next_status:
                if next_status:  # not at the first status, because workers are still arriving
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

    def _status(self, *, names: bool) -> framing.Header:
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
        """Handles pending events; returns after a short time, so that signals can be handled."""
        for key, _ in self._selector.select(_ACCEPT_POLL_SECONDS):
            key.data()
        now = time.monotonic()
        for asked in [one for one in self._asked.values() if now >= one.deadline]:
            self._judge(asked, None)
        self._acceptor.tick()

    def _admit(self, sock: socket.socket, hello: identity.Identity) -> None:
        """Admits or rejects a worker that has proven the secret."""
        rank = hello.rank
        error: TfdistError | None = identity.disagreement(self._topology, self._mine, hello)
        other_cluster = hello.fingerprint != self._mine.fingerprint
        if other_cluster and hello.version == self._mine.version:
            self._ask(sock, hello)
            return
        if error is None:
            known = self._present.get(rank)
            if known and (known[1].nonce == hello.nonce or has_ended(known[0])):
                self._drop(rank)
            elif known or rank == 0:
                error = identity.duplicate(known[1] if known else self._mine, hello)
        if error is not None:
            self._refuse(sock, hello, error)
        elif self._error is not None:
            self._inform(sock, hello, self._error)
        else:
            self._present[rank] = (sock, hello)
            self._absent.discard(rank)
            self._selector.register(sock, selectors.EVENT_READ, partial(self._left, rank, sock))
            # Name the missing ranks only if they are few. Otherwise, this would take much time,
            # because it happens each time that a worker arrives.
            status = self._status(names=len(self._absent) <= NAMED)
            if not send_at_once(sock, framing.encode(status)):
                self._drop(rank)

    def _ask(self, sock: socket.socket, hello: identity.Identity) -> None:
        """Asks a worker with a different cluster how it differs from this process's cluster."""
        asked = self._asked[sock] = _Asked(sock, hello)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._read_answer, asked))
        if not send_at_once(
            sock, framing.encode({"kind": "cluster", "cluster": identity.entries(self._topology)})
        ):
            self._judge(asked, None)

    def _read_answer(self, asked: _Asked) -> None:
        if asked.sock not in self._asked:
            return
        try:
            data = asked.sock.recv(4096)
            frames = asked.decoder.feed(data)
        except BlockingIOError:
            return
        except (OSError, framing.WireError):
            data, frames = b"", []
        if frames or not data:
            self._judge(asked, frames[0][0] if frames else None)

    def _judge(self, asked: _Asked, answer: framing.Header | None) -> None:
        """Refuses a worker with a different cluster; the error describes the difference."""
        del self._asked[asked.sock]
        self._selector.unregister(asked.sock)
        difference = answer.get("difference") if answer else None
        if not isinstance(difference, str) or not difference.isprintable():
            difference = f"{asked.hello} and {self._mine} differ"
        self._refuse(asked.sock, asked.hello, identity.clusters_differ(difference))

    def _refuse(self, sock: socket.socket, hello: identity.Identity, error: TfdistError) -> None:
        """Refuses a worker. If the job is protected (see `is_closed`), all other workers fail too.

        If the job is not protected, the worker may not belong to the job, so the others keep
        waiting.
        """
        if self._closed_job:
            self._fail(error)
        else:
            self._refusal = error
            self._warn(f"refused {hello}: {error}")
        self._inform(sock, hello, self._error or error)

    def _inform(self, sock: socket.socket, hello: identity.Identity, error: TfdistError) -> None:
        send_at_once(sock, framing.encode(encode_error("error", error)))
        sock.close()
        if self._error is not None:
            self._informed.add(hello.rank)

    def _fail(self, error: TfdistError) -> None:
        """Ends the rendezvous with an error, which is also sent to workers that arrive later."""
        if self._error is None:
            self._error = error
            self._send(encode_error("error", error))
            self._informed.update(self._present)

    def _send(self, header: framing.Header) -> None:
        frame = framing.encode(header)
        for rank, (sock, _) in list(self._present.items()):
            if not send_at_once(sock, frame):
                self._drop(rank)

    def _left(self, rank: int, sock: socket.socket) -> None:
        """Drops a waiting worker when its socket is readable.

        Waiting workers send no data, so a readable socket means that the worker has disconnected.
        """
        if rank in self._present and self._present[rank][0] is sock:
            self._drop(rank)

    def _drop(self, rank: int) -> None:
        """Drops a worker that has disconnected before all workers had arrived."""
        sock, hello = self._present.pop(rank)
        self._absent.add(rank)
        self._selector.unregister(sock)
        sock.close()
        if self._error is None:
            self._warn(f"{hello} disconnected while waiting for the others")

    def _close(self) -> None:
        self._acceptor.close()
        for sock in self._asked:
            sock.close()
        self._selector.close()


def _screen_client(hello: identity.Identity) -> None:
    if hello.purpose == identity.REGROUP:  # the worker asks whether the job is already running
        raise CannotServe("this job is starting")
    if hello.purpose != identity.JOIN:
        raise framing.WireError(
            f"{hello} connected for {hello.purpose!r}, but this is for joining the job"
        )


_BACK_OFF = (0.05, 1.0)
_SILENCE_SECONDS = 10 * STATUS_SECONDS
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.2
_MAX_DIFFERENCE = 2000


class RendezvousClient:
    """The other ranks' part of the rendezvous: connects to rank 0 and waits for all workers.

    Args:
        topology: the workers of the group. This process must not be rank 0.
        options: the job's options. `start_timeout` and `secret` are used.
        tls: the TLS contexts; None if the job does not use TLS.
        announce: called with each message about missing workers.
        check: called several times a second. An error that it raises ends the wait.
    """

    def __init__(
        self,
        topology: Topology,
        options: Options,
        tls: Tls | None,
        announce: Announce,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self._topology = topology
        self._tls = tls
        self._secret = options.secret
        self._timeout = timeout = options.start_timeout
        self._check = check
        self._mine = identity.Identity.of(topology)
        self._progress = WaitMessages(topology.me, timeout, announce)
        self._deadline = time.monotonic() + timeout
        self._problem = "has not answered yet"
        self._peer: identity.Identity | None = None
        # The number of missing workers, and the ranks of some of them.
        self._missing: tuple[int, list[int]] | None = None

    def run(self) -> socket.socket:
        """Connects to rank 0, and retries until rank 0 reports that all workers have arrived.

        Returns:
            The connection to rank 0.

        Raises:
            ClusterError: rank 0 reports that the workers are incompatible, or rank 0 has a
                different secret.
            TlsError: rank 0 and this worker do not trust each other, or only one of them uses TLS.
            RendezvousError: a worker has not arrived in time.
        """
        pause = _BACK_OFF[0]
        while time.monotonic() < self._deadline:
            self._check()
            sock = self._dial()
            if sock is not None:
                pause = _BACK_OFF[0]
                try:
                    if self._await_go(sock):
                        return sock
                except BaseException:
                    sock.close()
                    raise
                sock.close()
            self._progress.report(self._waiting)
            time.sleep(max(0.0, min(pause, self._deadline - time.monotonic())))
            pause = min(2 * pause, _BACK_OFF[1])
        raise RendezvousError(
            f"{self._topology.me} timed out after {self._timeout:g} s waiting for "
            f"{self._waiting()}. Start the missing workers, check in their logs why they exited, "
            f"or increase TFDIST_START_TIMEOUT."
        )

    def _waiting(self) -> str:
        """Returns a description of the workers for which this worker waits."""
        chief = self._topology.chief
        if self._missing is None:
            return f"{chief}, which {self._problem}"
        count, some = self._missing
        names = named([self._topology.workers[rank] for rank in some], count) if some else ""
        return f"{count} of {self._topology.size} workers" + (f": {names}" if names else "")

    def _dial(self) -> socket.socket | None:
        """Tries once to connect to rank 0; a failure is only recorded for the progress messages."""
        self._missing = None
        try:
            endpoints = resolve(self._topology.chief.address)
            sock = connect(endpoints, self._deadline)
            if self._tls:
                sock = self._tls.wrap(sock, dialed=True)
        except OSError as error:
            self._problem = f"cannot be reached: {why_unreachable(error)}"
            return None
        try:
            deadline = min(self._deadline, time.monotonic() + HELLO_SECONDS)
            self._peer = handshake(
                sock,
                self._mine,
                self._secret,
                deadline,
                first=True,
                admit=_screen_server,
                name=str(self._topology.chief),
            )
        except (OSError, framing.WireError) as error:
            self._problem = f"does not answer as a tfdist worker ({error})"
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def _await_go(self, sock: socket.socket) -> bool:
        """Waits until rank 0 sends "go"; returns False if the connection has become unusable."""
        last_heard = time.monotonic()
        # Rank 0 times out at about the same time. Wait a little longer for its error, because it
        # describes the missing workers better than an error of this process.
        while time.monotonic() < self._deadline + _GRACE_SECONDS:
            self._check()
            self._progress.report(self._waiting)
            if not framing.readable(sock, _POLL_SECONDS):
                if time.monotonic() - last_heard > _SILENCE_SECONDS:
                    self._problem = f"has been silent for {_SILENCE_SECONDS:g} s"
                    break
                continue
            try:
                deadline = time.monotonic() + HELLO_SECONDS
                header, _ = framing.read_frame(sock, framing.CLUSTER_LIMIT, deadline)
                if header["kind"] == "cluster":
                    self._differ(sock, header)
                elif self._is_go(header):
                    return True
            except (OSError, framing.WireError) as error:
                self._problem = f"disconnected ({error})"
                break
            last_heard = time.monotonic()
        else:
            return False
        self._missing = None
        return False

    def _is_go(self, header: framing.Header) -> bool:
        if header["kind"] == "error":
            raise decode_error(header)
        if header["kind"] == "waiting":
            count, some = header.get("missing"), header.get("some")
            known = range(self._topology.size)
            if type(count) is not int or not isinstance(some, list):
                raise framing.WireError("it sent an invalid number of missing workers")
            if any(type(rank) is not int or rank not in known for rank in some):
                raise framing.WireError("it sent an invalid list of missing workers")
            self._missing = (count, some)
        return bool(header["kind"] == "go")

    def _differ(self, sock: socket.socket, header: framing.Header) -> None:
        """Tells rank 0 how the clusters differ. Rank 0 then replies with the error to raise."""
        theirs = header.get("cluster")
        if not isinstance(theirs, list) or not all(map(_is_entry, theirs)):
            raise framing.WireError("it sent an invalid cluster")
        difference = identity.first_difference(
            theirs, self._peer, identity.entries(self._topology), self._mine
        )
        sock.sendall(
            framing.encode({"kind": "difference", "difference": difference[:_MAX_DIFFERENCE]})
        )


def _screen_server(hello: identity.Identity) -> None:
    if hello.rank != 0 or hello.purpose != identity.JOIN:
        raise framing.WireError(f"it is {hello}, and does not accept workers of the job")


def _is_entry(value: object) -> bool:
    types = [type(part) for part in value] if isinstance(value, list) else []
    return types == [str, int, str]


_BACKLOG = 512


def meet(
    topology: Topology,
    options: Options,
    *,
    announce: Announce = logger.info,
    warn: Announce = logger.warning,
    check: Callable[[], object] = lambda: None,
) -> Session:
    """Waits until all workers of the group have arrived, and connects them to rank 0.

    First, each worker checks that it can listen at its own address. Then rank 0 listens at its
    address, and the other workers connect to it. When this function returns, all workers have
    arrived and have authenticated with the job's secret. All workers have the same cluster and the
    same version of tfdist, and TensorFlow's server can use the address of each worker. The
    connections to rank 0 stay open until the session ends. They use TLS if the options enable it.

    Args:
        topology: the workers of the group, and the rank of this process.
        options: the job's options. `start_timeout` is the number of seconds to wait. `secret`
            authenticates the workers. `tls_certificate`, `tls_key` and `tls_ca` enable TLS. Other
            options are passed to the session.
        announce: called with each message about missing workers; prints to stderr by default.
        warn: called with each warning: if the job is not protected (see `is_closed`), if a
            connection is rejected, or if a worker is refused. Prints to stderr by default.
        check: called several times a second. An error that it raises ends the wait.

    Returns:
        The session. For a single process, the session has no connections.

    Raises:
        ClusterError: the job is not protected although `TFDIST_SECURITY=required` is set, an
            address cannot be used, the workers are incompatible, or rank 0 has a different secret.
        TlsError: the certificate of this worker cannot be used, rank 0 and this worker do not trust
            each other, or only one of them uses TLS.
        RendezvousError: a worker has not arrived in time.

    Example:
        >>> meet(Topology(), Options()).exchange("greeting", b"hello")
        [b'hello']
    """
    if topology.size == 1:
        return Session(topology, {}, options)
    check_security(topology, options, warn)
    tls = Tls.load(options)
    # If the workers have not exchanged their addresses yet, this worker may have no address. Such a
    # worker only connects to rank 0.
    known = bool(topology.me.address)
    claimed = claim(topology.me.address, name=str(topology.me)) if known else []
    try:
        if topology.rank == 0:
            _listen(topology, claimed)
            allow_descriptors(topology.size)
            sockets = RendezvousServer(topology, claimed, options, tls, announce, warn, check).run()
        else:
            check_resolvable(topology.chief.address, name=str(topology.chief))
            sockets = {0: RendezvousClient(topology, options, tls, announce, check).run()}
    finally:
        for sock in claimed:
            sock.close()
    return Session(topology, sockets, options)


def _listen(topology: Topology, claimed: list[socket.socket]) -> None:
    for sock in claimed:
        try:
            sock.listen(_BACKLOG)
        except OSError as error:
            raise explain(error, topology.me.address, str(topology.me)) from None
