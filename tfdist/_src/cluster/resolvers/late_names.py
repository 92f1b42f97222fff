"""Waits for names that a cluster gives to its workers only when they run, as Kubernetes does."""

from __future__ import annotations

import functools
import time

from tfdist._src.cluster.net.dns import resolve
from tfdist._src.cluster.net.wait_messages import Announce, WaitMessages
from tfdist._src.cluster.spec.topology import Topology
from tfdist._src.options import Options

_PAUSE_SECONDS = 0.5


def await_names(topology: Topology, options: Options, announce: Announce) -> None:
    """Waits until this worker's name and rank 0's resolve.

    When the time is over it returns all the same: whoever needs the name raises the error.

    Args:
        topology: the workers, with their addresses.
        options: `start_timeout` limits the wait.
        announce: called now and then with a line about it.
    """
    if not topology.workers:
        return
    waits = WaitMessages(topology.me, options.start_timeout, announce)
    end = time.monotonic() + options.start_timeout
    for worker, what in ((topology.me, "its own name"), (topology.chief, str(topology.chief))):
        while not _resolves(worker.address) and time.monotonic() < end:
            waits.report(functools.partial("{} to resolve".format, what))
            time.sleep(_PAUSE_SECONDS)


def _resolves(address: str) -> bool:
    try:
        resolve(address)
    except OSError:
        return False
    return True
