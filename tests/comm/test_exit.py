"""A process that ends leaves all groups at once, and the others hear of it, and why."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap

from tests.cluster.conftest import tf_config
from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive
from tfdist._src.launch.job.ports import Reservation

PROGRAM = textwrap.dedent(
    """
    import sys, threading
    import tensorflow as tf
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    if tfdist.collective.communicator().rank == 1:
        threading.Thread(target=tfdist.collective.barrier, daemon=True).start()
    sys.stdin.readline()
    if tfdist.collective.communicator().rank == 1:
        raise ValueError("out of luck")
    tfdist.collective.barrier()
    """
)


TWO_GROUPS = textwrap.dedent(
    """
    import sys, threading
    import tfdist

    strategy = tfdist.MultiWorkerMirroredStrategy()
    second = tfdist.collective.communicator().split("second", [0, 1])
    if second.rank == 1:
        waiting = threading.Thread(
            target=tfdist.collective.barrier, kwargs={"communicator": "second"}, daemon=True
        )
        waiting.start()
        sys.stdin.readline()
    else:
        tfdist.collective.barrier()
    """
)


def start(addresses, index, program=PROGRAM):
    more = {
        "TF_CONFIG": tf_config(addresses, index),
        "TFDIST_COLLECTIVE_TIMEOUT": str(FAR),
        "TFDIST_HEARTBEAT_TIMEOUT": str(FAR),
        "TFDIST_STALL_WARNING": "1",
    }
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | more, stdin=pipe, stderr=pipe, text=True)


@exhaustive
def test_an_uncaught_exception_while_a_collective_waits():
    with Reservation(2) as ports, contextlib.ExitStack() as stack:
        addresses = [f"127.0.0.1:{port}" for port in ports.ports]
        other, failing = (stack.enter_context(start(addresses, index)) for index in range(2))
        for process in (other, failing):
            stack.callback(process.kill)
        while "barrier" not in (line := failing.stderr.readline()):
            assert line, "It ended before it waited."
        _, last = failing.communicate("\n")
        assert "ValueError: out of luck" in last
        _, said = other.communicate("\n")
    assert other.returncode == 1
    assert "worker 1 (" in said
    assert "failed: ValueError: out of luck" in said


@exhaustive
def test_what_waits_in_one_group_does_not_keep_it_in_another():
    """Rank 1 ends; it is in a collective of the second group, and rank 0 in one of the first."""
    with Reservation(2) as ports, contextlib.ExitStack() as stack:
        addresses = [f"127.0.0.1:{port}" for port in ports.ports]
        ranks = [stack.enter_context(start(addresses, index, TWO_GROUPS)) for index in range(2)]
        for process in ranks:
            stack.callback(process.kill)
        for process in ranks:
            while "barrier" not in (line := process.stderr.readline()):
                assert line, "It ended before it waited."
        ranks[1].communicate("\n")
        _, said = ranks[0].communicate()
    assert (ranks[0].returncode, ranks[1].returncode) == (1, 0)
    assert "worker 1 (" in said and "has left the group" in said
