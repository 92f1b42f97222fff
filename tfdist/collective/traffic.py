"""What crosses the links of a communicator, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """What has crossed a communicator's links so far.

    Attributes:
        collectives: collectives and messages that have ended.
        shared_bytes: copied into the memory that this host's ranks share.
        sent_bytes: written to the connections with other hosts.
        received_bytes: read from them.
    """

    collectives: int
    shared_bytes: int
    sent_bytes: int
    received_bytes: int
