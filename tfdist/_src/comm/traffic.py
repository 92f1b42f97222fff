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
        device_bytes: bytes of tensors in collectives and messages between GPUs, by NCCL or kernels,
            which the other counts leave out: what each GPU of this process gave or got, whichever
            is more.
    """

    collectives: int
    shared_bytes: int
    sent_bytes: int
    received_bytes: int
    device_bytes: int


NONE = Traffic(collectives=0, shared_bytes=0, sent_bytes=0, received_bytes=0, device_bytes=0)
