"""The rendezvous on all ranks but 0: dials rank 0 until it signals that all have arrived."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from tfdist._src.cluster.auth.compatibility import entries, first_difference
from tfdist._src.cluster.auth.handshake import HELLO_SECONDS, handshake
from tfdist._src.cluster.auth.identity import JOIN, Identity
from tfdist._src.cluster.net.dns import resolve
from tfdist._src.cluster.net.framing import (
    CLUSTER_LIMIT,
    Header,
    WireError,
    encode,
    read_frame,
    readable,
)
from tfdist._src.cluster.net.sockets import connect, why_unreachable
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages, named
from tfdist._src.cluster.rendezvous.server import STATUS_SECONDS
from tfdist._src.cluster.session.error_codec import decode_error
from tfdist._src.cluster.spec.topology import Topology
from tfdist._src.options import Options
from tfdist.errors import RendezvousError

_BACK_OFF = (0.05, 1.0)
_SILENCE_SECONDS = 10 * STATUS_SECONDS
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.2
_MAX_DIFFERENCE = 2000


class RendezvousClient:
    """One worker's attempt to join rank 0.

    Args:
        topology: the group; this process is not rank 0.
        options: `start_timeout` and `secret` are used.
        tls: the TLS contexts; None for a connection without TLS.
        announce: called with each line about missing workers.
        check: called several times a second; what it raises ends the wait.
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
        self._mine = Identity.of(topology)
        self._progress = WaitMessages(topology.me, timeout, announce)
        self._deadline = time.monotonic() + timeout
        self._problem = "has not answered yet"
        self._peer: Identity | None = None
        self._missing: tuple[int, list[int]] | None = None  # how many, and some of them

    def run(self) -> socket.socket:
        """Dials until rank 0 signals that all workers have arrived.

        Returns:
            The connection to rank 0.

        Raises:
            ClusterError: rank 0 found that the workers are incompatible, or has a different secret.
            TlsError: rank 0 and this worker do not trust each other, or only one uses TLS.
            RendezvousError: some worker did not arrive in time.
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
        """Describes what this worker is waiting for."""
        chief = self._topology.chief
        if self._missing is None:
            return f"{chief}, which {self._problem}"
        count, some = self._missing
        names = named([self._topology.workers[rank] for rank in some], count) if some else ""
        return f"{count} of {self._topology.size} workers" + (f": {names}" if names else "")

    def _dial(self) -> socket.socket | None:
        """Makes one attempt; a failure is kept for the progress reports."""
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
                admit=_screen,
                name=str(self._topology.chief),
            )
        except (OSError, WireError) as error:
            self._problem = f"does not answer as a tfdist worker ({error})"
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def _await_go(self, sock: socket.socket) -> bool:
        """Waits until rank 0 says go; returns False if the connection has become unusable."""
        last_heard = time.monotonic()
        # Rank 0 times out at about the same time, and its error names the missing workers better.
        while time.monotonic() < self._deadline + _GRACE_SECONDS:
            self._check()
            self._progress.report(self._waiting)
            if not readable(sock, _POLL_SECONDS):
                if time.monotonic() - last_heard > _SILENCE_SECONDS:
                    self._problem = f"has been silent for {_SILENCE_SECONDS:g} s"
                    break
                continue
            try:
                deadline = time.monotonic() + HELLO_SECONDS
                header, _ = read_frame(sock, CLUSTER_LIMIT, deadline)
                if header["kind"] == "cluster":
                    self._differ(sock, header)
                elif self._is_go(header):
                    return True
            except (OSError, WireError) as error:
                self._problem = f"disconnected ({error})"
                break
            last_heard = time.monotonic()
        else:
            return False
        self._missing = None
        return False

    def _is_go(self, header: Header) -> bool:
        if header["kind"] == "error":
            raise decode_error(header)
        if header["kind"] == "waiting":
            count, some = header.get("missing"), header.get("some")
            known = range(self._topology.size)
            if type(count) is not int or not isinstance(some, list):
                raise WireError("it sent an invalid number of missing workers")
            if any(type(rank) is not int or rank not in known for rank in some):
                raise WireError("it sent an invalid list of missing workers")
            self._missing = (count, some)
        return bool(header["kind"] == "go")

    def _differ(self, sock: socket.socket, header: Header) -> None:
        """Tells rank 0 how the clusters differ; it answers with the error to raise."""
        theirs = header.get("cluster")
        if not isinstance(theirs, list) or not all(map(_is_entry, theirs)):
            raise WireError("it sent an invalid cluster")
        difference = first_difference(theirs, self._peer, entries(self._topology), self._mine)
        sock.sendall(encode({"kind": "difference", "difference": difference[:_MAX_DIFFERENCE]}))


def _screen(hello: Identity) -> None:
    if hello.rank != 0 or hello.purpose != JOIN:
        raise WireError(f"it is {hello}, and does not accept workers of the job")


def _is_entry(value: object) -> bool:
    types = [type(part) for part in value] if isinstance(value, list) else []
    return types == [str, int, str]
