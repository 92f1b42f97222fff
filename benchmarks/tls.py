"""Compares a float32 all-reduce between hosts with TLS to the same all-reduce without TLS.

    python -m benchmarks.tls --ranks=2 --sizes=1KiB,4MiB,64MiB

The ranks are processes of this machine. tfdist treats each rank as a separate host, so the ranks
send all data over the loopback interface. Each rank has two communicators, one with TLS and one
without. In each round, both are measured one after the other. For each size and each communicator,
the table shows the median time over the rounds, and the bus bandwidth at this time:
size / time * 2 (n - 1) / n, in 10^9 bytes per second.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.all_reduce.sizes import format_size, parse_size

FLAGS = flags.FLAGS
flags.DEFINE_integer("ranks", 2, "number of ranks", lower_bound=2)
flags.DEFINE_list("sizes", ["1KiB", "4MiB", "64MiB"], "sizes of the float32 vector")
flags.DEFINE_integer("rounds", 15, "rounds for each size", lower_bound=1)
flags.DEFINE_float("seconds", 0.2, "approximate duration of a round in seconds")
flags.DEFINE_string(
    "certificates",
    str(Path(__file__).parents[1] / "tests" / "certificates"),
    "a folder with worker.pem, worker.key and ca.pem",
)

FLOAT32, SUM = 7, 0


class Group:
    """A communicator of this process that contains all ranks.

    Args:
        session: the session of the job.
        name: the name of the communicator's group.
        options: tfdist's options. They determine whether the communicator uses TLS.
    """

    def __init__(self, session: Any, name: str, options: Any) -> None:
        from tfdist._src.cluster import connect
        from tfdist._src.comm.native_communicator import setup_of
        from tfdist._src.native import load

        self._core = load().library
        mesh = connect(session, name, range(session.size), options, self._core.tfd_segment_bytes)
        assert mesh
        setup, number = setup_of(mesh, options), ctypes.c_int64()
        mesh.hand_over()
        self._check(self._core.tfd_create(ctypes.byref(setup), ctypes.byref(number)))
        self._number = number

    def round(self, memory: Any, count: int, times: int) -> float:
        """Runs several all-reduces, and returns the time of one all-reduce in seconds."""
        self._check(self._core.tfd_barrier(self._number, b""))
        begin = time.perf_counter()
        for _ in range(times):
            self._check(
                self._core.tfd_all_reduce(self._number, b"", memory, memory, count, FLOAT32, SUM)
            )
        return (time.perf_counter() - begin) / times

    def close(self) -> None:
        """Leaves the group."""
        self._check(self._core.tfd_close(self._number))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(self._core.tfd_error().decode())


def work() -> None:
    """Runs the program of a rank. Rank 0 prints the measurements."""
    from tfdist._src.cluster import from_environment, meet
    from tfdist._src.options import Options

    options = Options.from_environment()
    session = meet(from_environment(), options)
    plain = dataclasses.replace(options, tls_certificate="", tls_key="", tls_ca="")
    groups = {"clear": Group(session, "clear", plain), "TLS": Group(session, "TLS", options)}
    scale = 2 * (session.size - 1) / session.size
    if session.rank == 0:
        print(f"{'size':>8}  {'clear':>20}  {'TLS':>20}  {'busbw TLS / clear':>18}")
    for size in map(parse_size, FLAGS.sizes):
        memory = (ctypes.c_float * (size // 4))()
        once = max(group.round(memory, size // 4, 3) for group in groups.values())
        mine = str(max(1, int(FLAGS.seconds / once))).encode()
        times = int(session.exchange(format_size(size), mine)[0])
        found: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(FLAGS.rounds):
            for name, group in groups.items():
                found[name].append(group.round(memory, size // 4, times))
        if session.rank == 0:
            medians = {name: statistics.median(values) for name, values in found.items()}
            cells = [f"{m * 1e6:9.1f} us {size / m * scale / 1e9:5.2f}" for m in medians.values()]
            ratio = medians["clear"] / medians["TLS"]
            line = "  ".join(f"{cell:>20}" for cell in cells)
            print(f"{format_size(size):>8}  {line}  {ratio:18.2f}", flush=True)
    for group in groups.values():
        group.close()
    session.close()


def main(arguments: list[str]) -> None:
    """Starts the ranks. If this process is a rank that `main` has started, runs its program."""
    if "TF_CONFIG" in os.environ:
        return work()
    reserved = [socket.create_server(("127.0.0.1", 0)) for _ in range(FLAGS.ranks)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in reserved]
    for one in reserved:
        one.close()
    base = Path(FLAGS.certificates)
    command = [sys.executable, "-m", "benchmarks.tls", *sys.argv[1:]]
    processes = []
    for rank in range(FLAGS.ranks):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(task),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TFDIST_HOST": str(rank),
            "TFDIST_TLS_CERTIFICATE": str(base / "worker.pem"),
            "TFDIST_TLS_KEY": str(base / "worker.key"),
            "TFDIST_TLS_CA": str(base / "ca.pem"),
        }
        processes.append(subprocess.Popen(command, env=environment))
    sys.exit(max(abs(process.wait(600)) for process in processes))


if __name__ == "__main__":
    app.run(main)
