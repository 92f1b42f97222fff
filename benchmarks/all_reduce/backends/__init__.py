"""What is compared: for each backend a function from a `Job` to the processes to start."""

from __future__ import annotations

from collections.abc import Callable

from reducing.backends.gloo import gloo
from reducing.backends.impi import impi
from reducing.backends.memcpy import memcpy
from reducing.backends.mpi import mpi
from reducing.backends.native import native
from reducing.backends.native_op import native_op
from reducing.backends.tf_ring import tf_ring
from reducing.job import Job, Process

BACKENDS: dict[str, Callable[[Job], list[Process]]] = {
    "native": native,
    "native_op": native_op,
    "gloo": gloo,
    "mpi": mpi,
    "impi": impi,
    "tf_ring": tf_ring,
    "memcpy": memcpy,
}
