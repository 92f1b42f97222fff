"""The first words on a connection between two workers: who each of them is."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import asdict, dataclass, fields

from tfdist._version import __version__
from tfdist.cluster.topology import Topology, Worker
from tfdist.cluster.wire import HELLO_LIMIT, Header, WireError, encode, read_exactly, read_frame

MAGIC = b"tfdist\r\n"
PROTOCOL = 1
HELLO_SECONDS = 5.0


@dataclass(frozen=True)
class Hello:
    """What a worker says of itself.

    Attributes:
        protocol: the version of these frames.
        version: the version of tfdist.
        fingerprint: `Topology.fingerprint()`.
        cluster: every worker as (job, index, address), in rank order.
        rank: the rank that it claims.
        host: its machine's name.
        pid: its process id.
        nonce: differs between any two processes.
    """

    protocol: int
    version: str
    fingerprint: str
    cluster: tuple[tuple[str, int, str], ...]
    rank: int
    host: str
    pid: int
    nonce: str

    @classmethod
    def of(cls, topology: Topology) -> Hello:
        """What this process says of itself."""
        return cls(
            protocol=PROTOCOL,
            version=__version__,
            fingerprint=topology.fingerprint(),
            cluster=tuple((w.task_type, w.task_index, w.address) for w in topology.workers),
            rank=topology.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            nonce=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        worker = f"rank {self.rank}"
        if self.rank < len(self.cluster):
            worker = str(Worker(*self.cluster[self.rank]))
        return f"{worker}, process {self.pid} on {self.host}"


def handshake(sock: socket.socket, mine: Hello, deadline: float, *, first: bool) -> Hello:
    """Exchanges hellos with the process at the other end.

    The one that dials speaks first; the other answers only to a hello, so that a stranger learns
    nothing.

    Args:
        sock: a connection that has just been made.
        mine: what this process says of itself.
        deadline: the `time.monotonic()` at which to give up.
        first: whether this process dialled.

    Returns:
        What the other process says of itself. Nothing of it is checked but its form.

    Raises:
        WireError: the other is no tfdist worker.
        OSError: the connection ended, or the deadline passed.
    """
    words = MAGIC + encode({"kind": "hello", **asdict(mine)})
    if first:
        sock.sendall(words)
    # Byte by byte, so that one who speaks another protocol is found out at once.
    for position in range(len(MAGIC)):
        if read_exactly(sock, 1, deadline) != MAGIC[position : position + 1]:
            raise WireError("it is no tfdist worker")
    theirs = _hello(read_frame(sock, HELLO_LIMIT, deadline)[0])
    if not first:
        sock.sendall(words)
    return theirs


def _hello(header: Header) -> Hello:
    try:
        values = {field.name: header[field.name] for field in fields(Hello)}
        values["cluster"] = tuple(
            (str(job), int(index), str(address)) for job, index, address in values["cluster"]
        )
    except (KeyError, TypeError, ValueError):
        raise WireError("it sent no hello") from None
    numbers = all(type(values[name]) is int and values[name] >= 0 for name in ("rank", "pid"))
    texts = all(type(values[name]) is str for name in ("version", "fingerprint", "host", "nonce"))
    if header["kind"] != "hello" or not numbers or not texts:
        raise WireError("it sent no hello")
    return Hello(**values)
