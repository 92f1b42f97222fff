"""PMIx, the key-value store of the launchers of Open MPI: passes a text of rank 0 on to all.

The interface is that of the PMIx standard (https://pmix.org), of which five functions are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
from collections.abc import Iterator
from typing import Any

from tfdist.errors import ClusterError

_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_KEY = b"tfdist.rank0"
_GLOBAL, _STRING = 3, 3  # PMIX_GLOBAL, PMIX_STRING
_LONGEST_NAMESPACE = 255


class _Process(ctypes.Structure):
    """`pmix_proc_t`."""

    _fields_ = (("nspace", ctypes.c_char * (_LONGEST_NAMESPACE + 1)), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    """`pmix_value_t`, as far as it is a string; its union is larger."""

    _fields_ = (
        ("type", ctypes.c_uint16),
        ("string", ctypes.c_char_p),
        ("rest", ctypes.c_byte * 64),
    )


def share(text: str) -> str:
    """Passes a text on from rank 0 to all processes; called by all of them.

    Args:
        text: rank 0's; of the others, it is ignored.

    Raises:
        ClusterError: the library is missing, or the launcher does not answer.
    """
    library = _load()
    me, found = _Process(), ctypes.POINTER(_Value)()
    _check(library, "PMIx_Init", ctypes.byref(me), None, ctypes.c_size_t(0))
    with _finalizing(library):
        if me.rank == 0:
            value = _Value(_STRING, text.encode())
            _check(library, "PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
            _check(library, "PMIx_Commit")
        _check(library, "PMIx_Fence", None, ctypes.c_size_t(0), None, ctypes.c_size_t(0))
        first = _Process(me.nspace, 0)
        arguments = ctypes.byref(first), _KEY, None, ctypes.c_size_t(0), ctypes.byref(found)
        _check(library, "PMIx_Get", *arguments)
        return bytes(found.contents.string).decode()


def _load() -> Any:
    for name in (*_LIBRARIES, ctypes.util.find_library("pmix")):
        with contextlib.suppress(OSError):
            if name:
                return ctypes.CDLL(name)
    raise ClusterError(
        "The library of PMIx, by which processes of Open MPI find one another, is not on this "
        "host (libpmix.so.2). Install it (Debian: libpmix2), or tell where rank 0 is: mpirun -x "
        "MASTER_ADDR=HOST -x MASTER_PORT=29500."
    )


def _check(library: Any, function: str, *arguments: Any) -> None:
    status = getattr(library, function)(*arguments)
    if status:
        raise ClusterError(
            f"The launcher of Open MPI does not answer: {function} returned {status}. Start the "
            "processes with mpirun, or tell where rank 0 is: mpirun -x MASTER_ADDR=HOST -x "
            "MASTER_PORT=29500."
        )


@contextlib.contextmanager
def _finalizing(library: Any) -> Iterator[None]:
    """Otherwise mpirun takes the end of the process for a failure."""
    try:
        yield
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))
