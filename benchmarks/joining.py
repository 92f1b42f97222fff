"""Measures how long a job takes to start, and what that costs rank 0, by the number of ranks.

    python benchmarks/joining.py --ranks=16,64,256,512 --json=joining.json

The ranks run on this machine, several in a process, without TensorFlow: each goes through the
rendezvous, connects with all others, opens a communicator of the native core, and takes part in a
barrier. `--ranks_per_host` of them at a time count as one host. Rank 0 has a process of its own.

For each number of ranks: seconds until all have left the barrier, and of these the rendezvous, the
full mesh, and the core; then what rank 0's process has spent on it: CPU seconds, bytes that its
Python code has sent, peak memory above that of the process before; and its CPU seconds per second
while all ranks are idle.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("ranks", ["16", "64", "256", "512"], "numbers of ranks")
flags.DEFINE_integer("ranks_per_host", 8, "ranks that share memory", lower_bound=1)
flags.DEFINE_integer("processes", 48, "processes at most, beside that of rank 0", lower_bound=1)
flags.DEFINE_float("idle", 5.0, "seconds that the ranks stay idle", lower_bound=0.0)
flags.DEFINE_float("timeout", 300.0, "seconds that a start may take", lower_bound=1.0)
flags.DEFINE_string("json", "", "a file for the results")

ROOT = Path(__file__).parents[1]
# Two sockets for each other rank, in each rank of a process; and some for everything else.
SPARE = 1000


class Sent:
    """Bytes that Python sends on sockets of this process."""

    def __init__(self) -> None:
        self.bytes = 0
        send, sendall = socket.socket.send, socket.socket.sendall

        def counted(one: socket.socket, data: Any, *flags: int) -> int:
            sent = send(one, data, *flags)
            self.bytes += sent
            return sent

        def all_counted(one: socket.socket, data: Any, *flags: int) -> None:
            sendall(one, data, *flags)
            self.bytes += len(data)

        socket.socket.send = counted  # type: ignore[method-assign, assignment]
        socket.socket.sendall = all_counted  # type: ignore[method-assign, assignment]


def cpu_seconds() -> float:
    """Of this process, so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def join(rank: int, task: dict[str, Any], report: dict[int, list[float]]) -> Any:
    """One rank's start; returns what ends it."""
    from tfdist.cluster import connect, from_tf_config, meet
    from tfdist.collective.core_setup import setup_of
    from tfdist.native import load
    from tfdist.options import Options

    core = load().library
    config = {"cluster": {"worker": task["addresses"]}, "task": {"type": "worker", "index": rank}}
    options = Options(
        start_timeout=task["timeout"],
        secret="joining",
        host=f"host {rank // task['ranks_per_host']}",
    )
    times = [time.monotonic()]
    session = meet(from_tf_config(json.dumps(config)), options)
    times.append(time.monotonic())
    mesh = connect(session, "all", range(session.size), options, core.tfd_segment_bytes)
    assert mesh is not None
    times.append(time.monotonic())
    setup, number = setup_of(mesh, options), ctypes.c_int64()
    setup.name = b"all, rank %d" % rank  # Names are those of a process.
    mesh.hand_over()
    if core.tfd_create(ctypes.byref(setup), ctypes.byref(number)):
        raise RuntimeError(core.tfd_error().decode())
    if core.tfd_barrier(number, b""):
        raise RuntimeError(core.tfd_error().decode())
    times.append(time.monotonic())
    report[rank] = [later - earlier for earlier, later in itertools.pairwise(times)]
    return lambda: (core.tfd_close(number), session.close())


def work(task: dict[str, Any]) -> None:
    """Some of the ranks, in threads; talks to the parent on stdin and stdout."""
    from tfdist.native import load

    load()
    sent = Sent()
    threading.stack_size(512 * 1024)
    report: dict[int, list[float]] = {}
    ends: list[Any] = []
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            ends.append(join(rank, task, report))
        except BaseException as error:
            errors.append(error)

    print("READY", flush=True)
    sys.stdin.readline()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = cpu_seconds()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in task["ranks"]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        print(f"FAILED {errors[0]}", flush=True)
        os._exit(1)
    spent = cpu_seconds() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("JOINED", flush=True)
    sys.stdin.readline()
    idle = cpu_seconds()
    time.sleep(task["idle"])
    idle = (cpu_seconds() - idle) / task["idle"] if task["idle"] else 0.0
    found = {
        "times": [max(values) for values in zip(*report.values(), strict=True)],
        "cpu_s": spent,
        "sent_bytes": sent.bytes,
        "memory_kib": peak - memory,
        "idle_cpu": idle,
    }
    print(f"FOUND {json.dumps(found)}", flush=True)
    sys.stdin.readline()
    # Rank 0's process ends last: it is the coordinator.
    leaving = [threading.Thread(target=end, daemon=True) for end in ends]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(20)
    os._exit(0)


def measure(ranks: int) -> dict[str, Any]:
    """Starts so many ranks."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    together = min(max(1, (limit - SPARE) // (4 * ranks)), -(-ranks // FLAGS.processes))
    others = list(range(1, ranks))
    chunks = [[0], *(others[i : i + together] for i in range(0, len(others), together))]
    reserved = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in reserved]
    for one in reserved:
        one.close()
    processes = []
    for chunk in chunks:
        task = {
            "ranks": chunk,
            "addresses": addresses,
            "ranks_per_host": FLAGS.ranks_per_host,
            "idle": FLAGS.idle,
            "timeout": FLAGS.timeout,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "PYTHONPATH": str(ROOT), "TFDIST_JOINING": json.dumps(task)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def until(process: subprocess.Popen[str], word: str) -> str:
        assert process.stdout
        for line in process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
            if line.startswith("FAILED"):
                raise RuntimeError(line.strip())
        raise RuntimeError("a process of ranks has ended")

    def go() -> None:
        for process in processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()

    try:
        for process in processes:
            until(process, "READY")
        begin = time.monotonic()
        go()
        for process in processes:
            until(process, "JOINED")
        seconds = time.monotonic() - begin
        go()
        found = [json.loads(until(process, "FOUND")) for process in processes]
        go()
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    stages = [max(one["times"][i] for one in found) for i in range(3)]
    return {
        "ranks": ranks,
        "processes": len(processes),
        "seconds": seconds,
        "rendezvous_s": stages[0],
        "mesh_s": stages[1],
        "core_s": stages[2],
        **{key: value for key, value in found[0].items() if key != "times"},
    }


def main(_: list[str]) -> None:
    """Prints a line for each number of ranks."""
    rows = []
    print(
        f"{'ranks':>6} {'seconds':>8} {'rendezvous':>10} {'mesh':>7} {'core':>7}   "
        f"rank 0: {'CPU s':>7} {'sent KiB':>9} {'MiB':>7} {'idle CPU':>9}"
    )
    for ranks in map(int, FLAGS.ranks):
        row = measure(ranks)
        rows.append(row)
        print(
            f"{ranks:6} {row['seconds']:8.2f} {row['rendezvous_s']:10.2f} {row['mesh_s']:7.2f} "
            f"{row['core_s']:7.2f}           {row['cpu_s']:7.2f} {row['sent_bytes'] / 1024:9.1f} "
            f"{row['memory_kib'] / 1024:7.1f} {row['idle_cpu']:9.1%}",
            flush=True,
        )
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    if "TFDIST_JOINING" in os.environ:
        work(json.loads(os.environ["TFDIST_JOINING"]))
    else:
        app.run(main)
