"""Shares one memory segment among the ranks of each host, if possible."""

from __future__ import annotations

import errno
from collections.abc import Callable

from tfdist._src.cluster.mesh.colocation import MEMORY
from tfdist._src.cluster.mesh.runs import from_runs
from tfdist._src.cluster.mesh.shm_segment import Segment, open_segment, remedy
from tfdist._src.cluster.mesh.subgroups import SessionPlan, Subgroup
from tfdist._src.cluster.net.descriptors import Descriptor
from tfdist._src.cluster.net.wait_messages import Announce
from tfdist._src.cluster.session.lockstep import Lockstep, Report
from tfdist.errors import ClusterError

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

SegmentBytes = Callable[[int], int]
"""Returns the size in bytes of the memory shared by a number of colocated ranks."""


class HostMemory:
    """The memory of this rank's host: its first rank creates it, the others open it.

    Args:
        group: the group of this process; None if it is in no group.
        segment_bytes: returns the size of the memory.
        announce: called with a line if the memory cannot be created.

    Attributes:
        descriptor: the memory; None if there is none.
        size: its size in bytes; 0 if there is none.
        group: the group; ranks without shared memory count as alone on their hosts.
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
        self._created: Segment | None = None
        self._name: str | None = None

    def share(self, steps: Lockstep, plan: SessionPlan) -> None:
        """Creates and opens the memory, and then unlinks its name.

        Args:
            steps: run with all ranks of the session.
            plan: rank 0's.

        Raises:
            TfdistError: some rank cannot open it; also see `Lockstep.run`.
        """
        try:
            self._read(steps.run("memory", self._create, plan.share))
            steps.run("shared memory", self._open, lambda reports: reports)
        except BaseException:
            self.close()
            raise
        finally:
            if self._created is not None:
                self._created.unlink()

    def close(self) -> None:
        """Closes the memory."""
        if self.descriptor is not None:
            self.descriptor.close()

    def _create(self) -> Report:
        if self.group is None:
            return {}
        colocated = self.group.colocated(self.group.rank)
        if len(colocated) == 1:
            return {}
        self.size = self._segment_bytes(len(colocated))
        if self.size < 1:
            raise ValueError(f"segment_bytes must return a size >= 1. Received: {self.size}.")
        if self.group.rank != colocated[0]:
            return {}
        try:
            self._created = Segment(self.size)
        except OSError as error:
            if error.errno in _OUT_OF_DESCRIPTORS:
                raise
            self._announce(
                f"tfdist: {len(colocated)} workers on this host cannot share {self.size} bytes in "
                f"{MEMORY} ({error.strerror or error}) and use slower TCP instead. {remedy(error)}"
            )
            return {}
        self.descriptor = self._created.descriptor
        return {"name": self._created.name}

    def _read(self, told: Report) -> None:
        """Learns the name of the memory, and which ranks of the group have none."""
        if self.group is None:
            return
        self._name = told["name"]
        self.group = self.group.without_memory(from_runs(told["without"]))
        if self._name is None:
            self.size = 0

    def _open(self) -> Report:
        if self.group is None or self._name is None or self._created is not None:
            return {}
        try:
            self.descriptor = open_segment(self._name, self.size)
        except (OSError, ValueError) as error:
            names, first = self.group.names, self.group.colocated(self.group.rank)[0]
            reason = getattr(error, "strerror", None) or error
            raise ClusterError(
                f"{names[self.group.rank]} cannot open the shared memory of "
                f"{names[first]} ({reason}). Run the same version of tfdist as the same user "
                f"on all workers of a host; if these are different hosts, set TFDIST_HOST to a "
                f"different name on each."
            ) from None
        return {}
