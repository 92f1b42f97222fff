"""The backends: each is a function that takes a `Job` and returns the processes to start."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.all_reduce.backends.gloo import gloo
from benchmarks.all_reduce.backends.impi import impi
from benchmarks.all_reduce.backends.memcpy import memcpy
from benchmarks.all_reduce.backends.mpi import mpi
from benchmarks.all_reduce.backends.native import native
from benchmarks.all_reduce.backends.native_op import native_op
from benchmarks.all_reduce.backends.tf_ring import tf_ring
from benchmarks.all_reduce.job import Job, Process

BACKENDS: dict[str, Callable[[Job], list[Process]]] = {
    "native": native,
    "native_op": native_op,
    "gloo": gloo,
    "mpi": mpi,
    "impi": impi,
    "tf_ring": tf_ring,
    "memcpy": memcpy,
}
