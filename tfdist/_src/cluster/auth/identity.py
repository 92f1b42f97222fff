"""The identities of workers, and functions that check if two workers belong to the same job."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields

from tfdist._src.cluster.cluster_spec import Topology
from tfdist._src.cluster.net.framing import Header, WireError
from tfdist._version import __version__
from tfdist.errors import ClusterError

PROTOCOL = 3
JOIN = "join"
"""The purpose of a connection to rank 0 that becomes part of a session."""

OBSERVE = "observe"
"""The purpose of a connection to rank 0 that requests the status of the job."""

REGROUP = "regroup"
"""The purpose of a connection between workers that form a new group, or that want to join it."""

LAUNCH = "launch"
"""The purpose of a connection between the launchers of several hosts."""

PRINT = "print"
"""The purpose of a connection to a driver that shows a worker's output."""

_MAX_LENGTH = 512


@dataclass(frozen=True)
class Identity:
    """The identity that one end of a connection presents to the other end.

    The size of an identity does not depend on the number of workers.

    Attributes:
        protocol: the version of tfdist's wire protocol.
        version: the version of tfdist.
        fingerprint: `Topology.fingerprint()`.
        rank: the rank that the process claims to have.
        worker: the name of the process in messages, such as `"worker 1 (10.0.0.2:2222)"`.
        host: the host name.
        pid: the process id.
        nonce: a random text. If two connections claim the same rank with different nonces, two
            processes claim that rank. If the nonces are equal, the same process has connected
            again.
        purpose: the purpose of the connection, such as `JOIN`.
        attempt: the number of earlier attempts of the process to open this connection.
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
        """Returns the identity of this process."""
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
        """Returns the identity of a process that is not a worker and does not know the cluster.

        Args:
            name: the name of this process in messages.
            purpose: the purpose of the connection.
            number: the number that stands in for the rank. It distinguishes this process from other
                processes with the same purpose.
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
        """Decodes the identity in the header of a "hello" frame, the first frame of a handshake.

        This checks only the types and ranges of the fields. It does not check if the fields are
        true.

        Raises:
            WireError: the header is not the header of a "hello" frame.
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
        """The noun by which messages refer to all processes with this purpose, in the plural."""
        return "hosts" if self.purpose == LAUNCH else "workers"

    def __str__(self) -> str:
        return f"{self.worker}, process {self.pid} on {self.host}"


def _is_text(value: object) -> bool:
    """Whether a value that a peer has sent is a short, printable text, which is safe to log.

    A text with line breaks could add forged lines to the log.
    """
    return type(value) is str and len(value) <= _MAX_LENGTH and value.isprintable()


Entry = tuple[str, int, str]
"""A worker in a cluster: its job, its index within that job, and its address."""


def disagreement(topology: Topology, mine: Identity, theirs: Identity) -> ClusterError | None:
    """Checks whether two processes can belong to the same job.

    Args:
        topology: this process's cluster.
        mine: the identity of this process.
        theirs: the identity of the process that connected.

    Returns:
        The error that both processes raise; None if they can belong to the same job.
    """
    if mine.version != theirs.version:
        return _different("versions", mine, mine.version, theirs, theirs.version)
    if error := protocols_differ(mine, theirs):
        return error
    if mine.fingerprint != theirs.fingerprint:
        return clusters_differ(f"{mine} and {theirs} differ")
    if theirs.rank >= topology.size:
        return ClusterError(
            f"{theirs}: no such rank among {topology.size} workers. Correct the task index."
        )
    return None


def protocols_differ(mine: Identity, theirs: Identity) -> ClusterError | None:
    """Returns the error for different protocol versions; None if the versions are equal.

    Two processes with different protocol versions cannot authenticate each other.
    """
    if mine.protocol == theirs.protocol:
        return None
    return _different("protocols", mine, mine.protocol, theirs, theirs.protocol)


def duplicate(one: Identity, other: Identity) -> ClusterError:
    """Returns the error for two processes that claim the same rank."""
    return ClusterError(
        f"Two processes claim to be {one.worker}: process {one.pid} on {one.host} and "
        f"process {other.pid} on {other.host}. Give each process its own task index, or stop the "
        f"stale process."
    )


def clusters_differ(difference: str) -> ClusterError:
    """Returns the error for two processes with different clusters."""
    return ClusterError(
        f"The workers have different clusters: {difference}. "
        f'Give all workers the same "cluster" in TF_CONFIG.'
    )


def entries(topology: Topology) -> list[Entry]:
    """Returns an entry for each worker in rank order, and one for the generation if it is not 0.

    The generation is 0 until the group has changed for the first time.
    """
    workers = [(w.task_type, w.task_index, w.address) for w in topology.workers]
    generation = topology.generation
    return [*workers, ("generation", generation, "of the group")] if generation else workers


def first_difference(
    mine: Sequence[Entry], me: object, theirs: Sequence[Entry], them: object
) -> str:
    """Returns a description of the first entry that differs between two clusters.

    Args:
        mine: the entries of one cluster.
        me: the name of the process with this cluster.
        theirs: the entries of the other cluster.
        them: the name of the process with the other cluster.

    Example:
        >>> first_difference([("worker", 0, "a:1")], "x", [("worker", 0, "b:1")], "y")
        '"worker"[0] is "a:1" at x; "b:1" at y'
    """
    here = {(job, index): address for job, index, address in mine}
    there = {(job, index): address for job, index, address in theirs}
    for job, index in [*here, *there]:
        ours, others = here.get((job, index)), there.get((job, index))
        if ours != others:
            return f'"{job}"[{index}] is {_entry(ours)} at {me}; {_entry(others)} at {them}'
    return f"the order of the entries at {me} differs from that at {them}"


def _different(
    what: str, mine: Identity, here: object, theirs: Identity, there: object
) -> ClusterError:
    return ClusterError(
        f"The workers run different {what} of tfdist: {here} at {mine}; {there} at {theirs}. "
        f"Install the same version of tfdist everywhere."
    )


def _entry(address: str | None) -> str:
    return "absent" if address is None else f'"{address}"'
