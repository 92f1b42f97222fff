"""Gives the ranks of each host one piece of memory, or notes that they have none."""

from __future__ import annotations

import errno
from collections.abc import Callable

from tfdist.cluster.mesh.colocation import MEMORY
from tfdist.cluster.mesh.shm_segment import Segment, open_segment, remedy
from tfdist.cluster.mesh.subgroups import Subgroup
from tfdist.cluster.net.descriptors import Descriptor
from tfdist.cluster.net.wait_messages import Announce
from tfdist.cluster.session.lockstep import Lockstep, Said
from tfdist.errors import ClusterError

_OWN_FAULT = (errno.EMFILE, errno.ENFILE)

SegmentBytes = Callable[[int], int]
"""How much memory this many ranks of one host share, in bytes."""


class HostMemory:
    """The memory of this rank's host: its first rank makes it, the others open it.

    Args:
        group: the group of this process; None where it is in none.
        segment_bytes: how much memory they share.
        announce: takes a line where there is none.

    Attributes:
        descriptor: the memory; None for a rank without.
        size: its bytes; 0 without.
        group: the group; ranks without memory count as alone on their hosts.
    """

    def __init__(
        self,
        group: Subgroup | None,
        segment_bytes: SegmentBytes,
        announce: Announce,
    ) -> None:
        self.group = group
        self.descriptor: Descriptor | None = None
        self.size = 0
        self._announce = announce
        self._segment_bytes = segment_bytes
        self._made: Segment | None = None
        self._name: str | None = None
        self._first = 0

    def share(self, steps: Lockstep) -> None:
        """Makes and opens the memory, which then has no name any more.

        Args:
            steps: taken with all ranks of the session.

        Raises:
            TfdistError: some rank cannot open it, or as `Lockstep.take`.
        """
        try:
            self._read(steps.take("memory", self._make))
            steps.take("shared memory", self._open)
        except BaseException:
            self.close()
            raise
        finally:
            if self._made is not None:
                self._made.unlink()

    def close(self) -> None:
        """Gives the memory back."""
        if self.descriptor is not None:
            self.descriptor.close()

    def _make(self) -> Said:
        if self.group is None:
            return {}
        local = self.group.neighbours(self.group.rank)
        if len(local) == 1:
            return {}
        self.size = self._segment_bytes(len(local))
        if self.size < 1:
            raise ValueError(f"segment_bytes must return one byte or more. Received: {self.size}.")
        if self.group.rank != local[0]:
            return {}
        try:
            self._made = Segment(self.size)
        except OSError as error:
            if error.errno in _OWN_FAULT:
                raise
            self._announce(
                f"tfdist: {len(local)} workers on this machine cannot share {self.size} bytes in "
                f"{MEMORY} ({error.strerror or error}) and use slower TCP instead. {remedy(error)}"
            )
            return {}
        self.descriptor = self._made.descriptor
        return {"name": self._made.name}

    def _read(self, said: list[Said]) -> None:
        """Learns the name of the memory, and which ranks of the group have none."""
        if self.group is None:
            return
        names = [said[member].get("name") for member in self.group.members]
        firsts = [self.group.neighbours(rank)[0] for rank in range(self.group.size)]
        self._first = firsts[self.group.rank]
        self._name = names[self._first]
        without = [rank for rank, first in enumerate(firsts) if names[first] is None]
        self.group = self.group.without_memory(without)
        if self._name is None:
            self.size = 0

    def _open(self) -> Said:
        if self.group is None or self._name is None or self._made is not None:
            return {}
        try:
            self.descriptor = open_segment(self._name, self.size)
        except (OSError, ValueError) as error:
            names = self.group.names
            reason = getattr(error, "strerror", None) or error
            raise ClusterError(
                f"{names[self.group.rank]} cannot open the memory that {names[self._first]} "
                f"shares with it ({reason}). Run the same version of tfdist as the same user on "
                f"one machine; where these are two machines, set TFDIST_HOST to a name of its own "
                f"on each."
            ) from None
        return {}
