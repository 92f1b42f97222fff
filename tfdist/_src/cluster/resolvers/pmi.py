"""PMI-1, the key-value store of Hydra, MPICH's launcher: passes a text of rank 0 on to all.

Commands and answers are lines of `key=value` over an inherited socket: the wire protocol of the
"simple" implementation of PMI in MPICH.
"""

from __future__ import annotations

import os
import socket
from typing import TextIO

from tfdist.errors import ClusterError

_KEY = "tfdist-rank0"


def share(rank: int, descriptor: int, text: str) -> str:
    """Passes a text on from rank 0 to all processes; called by all of them.

    Args:
        rank: of this process.
        descriptor: of the connection to the launcher (PMI_FD).
        text: rank 0's, without spaces; of the others, it is ignored.

    Raises:
        ClusterError: the launcher does not answer.
    """
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
        with connection, connection.makefile("rw") as stream:
            return _share(stream, rank, text)
    except (OSError, KeyError, ValueError) as error:
        raise ClusterError(
            f"MPICH's launcher does not answer at PMI_FD={descriptor}: {error}. Start the "
            "processes with its mpiexec, or set MASTER_ADDR and MASTER_PORT."
        ) from error


def _share(stream: TextIO, rank: int, text: str) -> str:
    _ask(stream, "init pmi_version=1 pmi_subversion=1")
    store = _ask(stream, "get_my_kvsname")["kvsname"]
    if rank == 0:
        _ask(stream, f"put kvsname={store} key={_KEY} value={text}")
    _ask(stream, "barrier_in")
    value = _ask(stream, f"get kvsname={store} key={_KEY}")["value"]
    _ask(stream, "finalize")
    return value


def _ask(stream: TextIO, command: str) -> dict[str, str]:
    stream.write(f"cmd={command}\n")
    stream.flush()
    line = stream.readline()
    answer = dict(part.split("=", 1) for part in line.split())
    if answer.get("rc", "0") != "0":
        raise ValueError(line.strip())
    if not answer:
        raise ConnectionError("the connection is closed")
    return answer
