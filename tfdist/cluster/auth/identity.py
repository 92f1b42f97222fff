"""What a worker says of itself at the start of a connection."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields

from tfdist._version import __version__
from tfdist.cluster.net.framing import Header, WireError
from tfdist.cluster.spec.topology import Topology, Worker

PROTOCOL = 2
JOIN = "join"
"""The purpose of the connections to rank 0 that become a session."""

_LONGEST = 512


@dataclass(frozen=True)
class Identity:
    """One end of a connection.

    Attributes:
        protocol: the version of these frames.
        version: the version of tfdist.
        fingerprint: `Topology.fingerprint()`.
        cluster: every worker as (job, index, address), in rank order.
        rank: the rank that it claims.
        host: its machine's name.
        pid: its process id.
        nonce: differs between any two processes.
        purpose: what the connection is for.
    """

    protocol: int
    version: str
    fingerprint: str
    cluster: tuple[tuple[str, int, str], ...]
    rank: int
    host: str
    pid: int
    nonce: str
    purpose: str = JOIN

    @classmethod
    def of(cls, topology: Topology, purpose: str = JOIN) -> Identity:
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
            purpose=purpose,
        )

    @classmethod
    def from_header(cls, header: Header) -> Identity:
        """Reads a frame; nothing of it is checked but its form.

        Raises:
            WireError: it is no hello.
        """
        try:
            values = {field.name: header[field.name] for field in fields(cls)}
            values["cluster"] = tuple(
                (str(job), int(index), str(address)) for job, index, address in values["cluster"]
            )
            hello = cls(**values)
        except (KeyError, TypeError, ValueError):
            raise WireError("it sent no hello") from None
        numbers = all(type(number) is int and number >= 0 for number in (hello.rank, hello.pid))
        if header["kind"] != "hello" or not numbers or not all(map(_is_text, hello._texts())):
            raise WireError("it sent no hello")
        return hello

    def _texts(self) -> Iterator[object]:
        yield from (self.version, self.fingerprint, self.host, self.nonce, self.purpose)
        for job, _, address in self.cluster:
            yield from (job, address)

    def __str__(self) -> str:
        worker = f"rank {self.rank}"
        if self.rank < len(self.cluster):
            worker = str(Worker(*self.cluster[self.rank]))
        return f"{worker}, process {self.pid} on {self.host}"


def _is_text(value: object) -> bool:
    """Whether a value may stand in a log: a stranger's text must not be able to write lines."""
    return type(value) is str and len(value) <= _LONGEST and value.isprintable()
