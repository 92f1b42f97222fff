"""Open MPI and MPICH: the processes that `mpirun` or `mpiexec` has started.

With MPICH, a process inherits a socket that connects it to the launcher. Commands and answers on
this socket are lines of `key=value` pairs, the wire protocol of MPICH's "simple" PMI. With Open
MPI, this module calls a few functions of the PMIx standard (https://pmix.org).
"""

import contextlib
import ctypes
import ctypes.util
import functools
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from tfdist._src.cluster.resolvers.found import (
    AddressExchange,
    ResolvedJob,
    number,
    numbered,
    rank_and_size,
)
from tfdist._src.cluster.resolvers.torchrun import master
from tfdist.errors import ClusterError

_PMI_KEY = "tfdist-rank0"


def share_by_pmi(rank: int, descriptor: int, text: str) -> str:
    """Sends a text from rank 0 to all processes, which must all call this (MPICH).

    Args:
        rank: the rank of this process.
        descriptor: the file descriptor of the socket to the launcher (PMI_FD).
        text: the text to send, without spaces. It is ignored on all ranks but 0.

    Returns:
        The text of rank 0.

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
        _ask(stream, f"put kvsname={store} key={_PMI_KEY} value={text}")
    _ask(stream, "barrier_in")
    value = _ask(stream, f"get kvsname={store} key={_PMI_KEY}")["value"]
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


_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_PMIX_KEY = b"tfdist.rank0"
_GLOBAL, _STRING = 3, 3  # PMIX_GLOBAL, PMIX_STRING
_MAX_NAMESPACE = 255


class _Process(ctypes.Structure):
    """`pmix_proc_t`."""

    _fields_ = (("nspace", ctypes.c_char * (_MAX_NAMESPACE + 1)), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    """`pmix_value_t` with a string. `rest` reserves space for the larger members of its union."""

    _fields_ = (
        ("type", ctypes.c_uint16),
        ("string", ctypes.c_char_p),
        ("rest", ctypes.c_byte * 64),
    )


def share_by_pmix(text: str) -> str:
    """Sends a text from rank 0 to all processes, which must all call this (Open MPI).

    Args:
        text: the text to send. It is ignored on all ranks but 0.

    Returns:
        The text of rank 0.

    Raises:
        ClusterError: the PMIx library is missing, or the launcher does not answer.
    """
    library = _load()
    me, found = _Process(), ctypes.POINTER(_Value)()
    _check(library, "PMIx_Init", ctypes.byref(me), None, ctypes.c_size_t(0))
    with _finalizing(library):
        if me.rank == 0:
            value = _Value(_STRING, text.encode())
            _check(library, "PMIx_Put", ctypes.c_uint8(_GLOBAL), _PMIX_KEY, ctypes.byref(value))
            _check(library, "PMIx_Commit")
        _check(library, "PMIx_Fence", None, ctypes.c_size_t(0), None, ctypes.c_size_t(0))
        first = _Process(me.nspace, 0)
        arguments = ctypes.byref(first), _PMIX_KEY, None, ctypes.c_size_t(0), ctypes.byref(found)
        _check(library, "PMIx_Get", *arguments)
        return bytes(found.contents.string).decode()


def _load() -> Any:
    for name in (*_LIBRARIES, ctypes.util.find_library("pmix")):
        with contextlib.suppress(OSError):
            if name:
                return ctypes.CDLL(name)
    raise ClusterError(
        "The PMIx library (libpmix.so.2), which Open MPI's processes use to find one another, is "
        "not on this host. Install it (Debian: libpmix2), or pass the address of rank 0: mpirun -x "
        "MASTER_ADDR=HOST -x MASTER_PORT=29500."
    )


def _check(library: Any, function: str, *arguments: Any) -> None:
    status = getattr(library, function)(*arguments)
    if status:
        raise ClusterError(
            f"The launcher of Open MPI does not answer: {function} returned {status}. Start the "
            "processes with mpirun, or pass the address of rank 0: mpirun -x MASTER_ADDR=HOST -x "
            "MASTER_PORT=29500."
        )


@contextlib.contextmanager
def _finalizing(library: Any) -> Iterator[None]:
    """Finalizes PMIx at the end of a `with` block.

    If a process exits without finalizing PMIx, mpirun reports a failure.
    """
    try:
        yield
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))


def resolve_mpich(environ: Mapping[str, str]) -> ResolvedJob | None:
    """Returns the job of this process; None if MPICH's launcher Hydra has not started it.

    Raises:
        ClusterError: the variables contradict each other.
    """
    # A Slurm plugin sets the same variables for steps that srun has started without Hydra.
    if "PMI_SIZE" not in environ or "SLURM_MPI_TYPE" in environ:
        return None
    rank, size = rank_and_size(environ, "PMI_RANK", "PMI_SIZE")
    local = number(environ, "MPI_LOCALNRANKS") if "MPI_LOCALNRANKS" in environ else 0
    store = None
    if not master(environ) and size > 1:
        store = functools.partial(share_by_pmi, rank, number(environ, "PMI_FD"))
    exchange = AddressExchange(meeting=master(environ), share=store, one_host=local == size)
    return numbered("MPICH", rank, size, exchange)


def resolve_open_mpi(environ: Mapping[str, str]) -> ResolvedJob | None:
    """Returns the job of this process; None if Open MPI has not started it.

    Raises:
        ClusterError: the variables contradict each other.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    rank, size = rank_and_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    exchange = AddressExchange(
        meeting=master(environ),
        share=None if master(environ) else share_by_pmix,
        one_host=number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") == size,
    )
    return numbered("Open MPI", rank, size, exchange)
