"""Traffic counters of a communicator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """A communicator's traffic so far.

    Attributes:
        collectives: the number of completed collectives and messages.
        shared_bytes: bytes copied into the memory shared by this host's ranks.
        sent_bytes: bytes written to connections with other hosts.
        received_bytes: bytes read from connections with other hosts.
    """

    collectives: int
    shared_bytes: int
    sent_bytes: int
    received_bytes: int


NONE = Traffic(collectives=0, shared_bytes=0, sent_bytes=0, received_bytes=0)
