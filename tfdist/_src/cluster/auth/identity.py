"""The identity that a worker sends at the start of a connection."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, fields

from tfdist._src.cluster.net.framing import Header, WireError
from tfdist._src.cluster.spec.topology import Topology
from tfdist._version import __version__

PROTOCOL = 3
JOIN = "join"
"""The purpose of a connection to rank 0 that becomes part of a session."""

OBSERVE = "observe"
"""The purpose of a connection to rank 0 that asks how the job goes."""

REGROUP = "regroup"
"""The purpose of a connection between workers that form a new group, or that want to join one."""

LAUNCH = "launch"
"""The purpose of a connection between the launchers of several hosts."""

PRINT = "print"
"""The purpose of a connection to a driver that shows what a worker prints."""

_MAX_LENGTH = 512


@dataclass(frozen=True)
class Identity:
    """One end of a connection. Its size does not depend on the number of workers.

    Attributes:
        protocol: the protocol version.
        version: the tfdist version.
        fingerprint: `Topology.fingerprint()`.
        rank: the claimed rank.
        worker: what messages call it, `"worker 1 (10.0.0.2:2222)"`.
        host: the host name.
        pid: the process id.
        nonce: random; tells a process that reconnects from a second one with its rank.
        purpose: what the connection is for.
        attempt: the number of earlier attempts to open it.
    """

    protocol: int
    version: str
    fingerprint: str
    rank: int
    worker: str
    host: str
    pid: int
    nonce: str
    purpose: str = JOIN
    attempt: int = 0

    @classmethod
    def of(cls, topology: Topology, purpose: str = JOIN) -> Identity:
        """The identity of this process."""
        return cls(
            protocol=PROTOCOL,
            version=__version__,
            fingerprint=topology.fingerprint(),
            rank=topology.rank,
            worker=str(topology.me),
            host=socket.gethostname(),
            pid=os.getpid(),
            nonce=secrets.token_hex(8),
            purpose=purpose,
        )

    @classmethod
    def of_other(cls, name: str, purpose: str, number: int = 0) -> Identity:
        """The identity of this process if it is no worker; the cluster is unknown to it.

        Args:
            name: what messages call it.
            purpose: what the connection is for.
            number: its number among processes of its kind.
        """
        return cls(
            protocol=PROTOCOL,
            version=__version__,
            fingerprint="",
            rank=number,
            worker=name,
            host=socket.gethostname(),
            pid=os.getpid(),
            nonce=secrets.token_hex(8),
            purpose=purpose,
        )

    @classmethod
    def from_header(cls, header: Header) -> Identity:
        """Decodes a hello; only its form is checked.

        Raises:
            WireError: it is not a hello.
        """
        try:
            hello = cls(**{field.name: header[field.name] for field in fields(cls)})
        except KeyError:
            raise WireError("it sent no hello") from None
        numbers = (hello.protocol, hello.rank, hello.pid, hello.attempt)
        texts = (hello.version, hello.fingerprint, hello.worker, hello.host, hello.nonce)
        valid = all(type(number) is int and number >= 0 for number in numbers)
        if (
            header["kind"] != "hello"
            or not valid
            or not all(map(_is_text, (*texts, hello.purpose)))
        ):
            raise WireError("it sent no hello")
        return hello

    @property
    def kind(self) -> str:
        """What processes of its kind are called."""
        return "hosts" if self.purpose == LAUNCH else "workers"

    def __str__(self) -> str:
        return f"{self.worker}, process {self.pid} on {self.host}"


def _is_text(value: object) -> bool:
    """Whether a value is safe to log: a stranger's text must not inject lines into the log."""
    return type(value) is str and len(value) <= _MAX_LENGTH and value.isprintable()
