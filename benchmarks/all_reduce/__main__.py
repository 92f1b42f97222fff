"""Compares the float32 all-reduce of tfdist's core with the all-reduces of other libraries.

    python -m benchmarks.all_reduce --ranks=2 --sizes=1KiB,1MiB,64MiB --json=all_reduce.json

The benchmark first starts the ranks of all backends. The ranks then sleep until the benchmark sends
a command. For each size, the benchmark runs several short rounds. In each round, the backends are
measured one after the other, and only the ranks of one backend are awake at a time. If the machine
is busy with other work for a while, all backends become slower by about the same factor. Therefore,
compare two backends by the ratio of their times in the same round. The backends:

  native     tfdist's core, called through its C API
  native_op  tfdist's core as a TensorFlow operation, in a tf.function
  gloo       torch.distributed over gloo          pip install torch==2.13.0
  mpi        Open MPI                             apt-get install openmpi-bin libopenmpi-dev
  impi       Intel MPI                            pip install impi-rt impi-devel
  tf_ring    TensorFlow's RING collectives
  memcpy     no all-reduce: all ranks copy memory at the same time, for comparison

The table has one line for each size and backend:

  time us   the time of one all-reduce: the median over the rounds
  algbw     size / time
  busbw     algbw * 2 (n - 1) / n on n ranks; for memcpy, the same as algbw
  best      busbw in the fastest round
  #wrong    the number of wrong elements in the results
  ratio     busbw divided by native's busbw, or by the first backend's if native is not measured
  cores ns  the time in which a write by one core becomes visible to another core, measured before
            the rounds of this size

All bandwidths are in 10^9 bytes per second. If a backend cannot run, the benchmark prints the
reason.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.all_reduce.backends import BACKENDS
from benchmarks.all_reduce.cleanup import undisturbed
from benchmarks.all_reduce.distance import measure_distance
from benchmarks.all_reduce.figures import format_table, make_rows
from benchmarks.all_reduce.hosts import Hosts, make_hosts, parse_hosts
from benchmarks.all_reduce.job import Job, MissingError
from benchmarks.all_reduce.plot import INSTALL, can_plot, plot
from benchmarks.all_reduce.rounds import take_rounds
from benchmarks.all_reduce.sizes import format_size, parse_size
from benchmarks.all_reduce.team import Team, TeamError

FLAGS = flags.FLAGS
flags.DEFINE_list("ranks", ["2"], "numbers of ranks, each 2 or more")
flags.DEFINE_list(
    "sizes",
    ["1KiB", "4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB"],
    "sizes of the float32 vector: bytes, KiB, MiB or GiB",
)
flags.DEFINE_list("backends", list(BACKENDS), f"any of {', '.join(BACKENDS)}")
flags.DEFINE_integer("rounds", 10, "rounds for each size", lower_bound=1)
flags.DEFINE_string(
    "hosts",
    "",
    "netns:N distributes the ranks over N network namespaces that are connected by a bridge; this "
    "requires root and iproute2; if empty, all ranks run on this host",
)
flags.DEFINE_string(
    "rate", "", "maximum send rate of each host in the notation of tc: 1gbit; if empty, unlimited"
)
flags.DEFINE_string("torch_python", sys.executable, "a Python that has torch, for gloo")
flags.DEFINE_string(
    "impi_root",
    "",
    "folder of Intel MPI; by default the environment of this Python or of --torch_python",
)
flags.DEFINE_bool(
    "in_place",
    True,
    "reduce in place; with --noin_place, native, mpi and impi write the result to another buffer",
)
flags.DEFINE_float("timeout", 120.0, "seconds to wait for a rank's answer", lower_bound=1)
flags.DEFINE_string("json", None, "file to write the rows to")
flags.DEFINE_string("plot", None, "picture to draw, such as a .png file; requires matplotlib")


def at_least_two(counts: list[str]) -> bool:
    """Whether all texts are integers, and each is at least 2."""
    return all(count.isdigit() and int(count) >= 2 for count in counts)


def all_known(names: list[str]) -> bool:
    """Whether all names are names of backends."""
    return set(names) <= set(BACKENDS)


flags.register_validator("ranks", at_least_two, "each is a number from 2")
flags.register_validator("backends", all_known, f"any of {', '.join(BACKENDS)}")


def main(_: list[str]) -> int:
    """Measures all backends, prints a table for each number of ranks, and writes the files.

    Returns:
        The exit code: 1 if any all-reduce had a wrong element, else 0.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Runs the cleanups.
    try:
        sizes = list(map(parse_size, FLAGS.sizes))
        hosts = parse_hosts(FLAGS.hosts)
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    if FLAGS.plot and not can_plot():
        print(INSTALL, file=sys.stderr)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="all_reduce_") as folder,
        make_hosts(hosts, FLAGS.rate) as made,
    ):
        for ranks in map(int, FLAGS.ranks):
            group = measure(ranks, sizes, made, Path(folder))
            print(f"{ranks} ranks", format_table(group), sep="\n", end="\n\n", flush=True)
            rows += group
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1) + "\n")
    if FLAGS.plot and can_plot():
        plot(rows, FLAGS.plot)
    return int(any(row.get("wrong") for row in rows))


def measure(ranks: int, sizes: list[int], hosts: Hosts, folder: Path) -> list[dict[str, Any]]:
    """Measures all sizes with one number of ranks, and returns the rows of all backends.

    A backend that cannot run, or that fails, has a row with the reason under `missing`. These rows
    follow the rows with figures.

    Args:
        ranks: the number of ranks of each backend.
        sizes: the numbers of bytes to reduce.
        hosts: the hosts that the ranks run on.
        folder: the folder for compiled programs and for the files of the ranks.
    """
    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    with start_teams(ranks, hosts, folder, missing) as teams:

        def drop(backend: str, reason: str) -> None:
            report(f"{backend}: {reason}")
            missing[backend] = reason
            teams.pop(backend).stop()

        for backend, team in list(teams.items()):
            try:
                team.gather()
            except TeamError as error:
                drop(backend, str(error))
        for size in sizes:
            start = time.monotonic()
            cores_ns = measure_distance(folder)
            times = take_rounds(dict(teams), size, FLAGS.rounds, drop)
            group = make_rows(ranks, size, times, cores_ns)
            figures = "  ".join(f"{r['backend']} {r['busbw_gbps']:.3g}" for r in group)
            spent = time.monotonic() - start
            report(f"{ranks} ranks, {format_size(size)}, {spent:.0f} s, GB/s: {figures}")
            rows += group
    for backend, reason in missing.items():
        rows.append({"backend": backend, "ranks": ranks, "missing": reason})
    return rows


@contextlib.contextmanager
def start_teams(
    ranks: int, hosts: Hosts, folder: Path, missing: dict[str, str]
) -> Iterator[dict[str, Team]]:
    """Starts the ranks of all backends, and yields a dictionary of their teams.

    When the context exits, it stops all teams that are still in the dictionary. A caller that stops
    a team earlier must remove the team from the dictionary.

    Args:
        ranks: the number of ranks of each backend.
        hosts: the hosts that the ranks run on.
        folder: the folder for compiled programs and for the files of the ranks.
        missing: a dictionary to which the reason is added for each backend that cannot run.
    """
    teams: dict[str, Team] = {}
    try:
        for backend in FLAGS.backends:
            own = folder / f"{backend}_{ranks}"
            own.mkdir()
            job = Job(
                ranks=ranks,
                hosts=hosts,
                control=own / "control",
                folder=own,
                builds=folder,
                torch_python=FLAGS.torch_python,
                impi_root=FLAGS.impi_root,
                in_place=FLAGS.in_place,
            )
            try:
                processes = BACKENDS[backend](job)
            except MissingError as error:
                report(f"{backend}: {error}")
                missing[backend] = str(error)
                continue
            report(f"{backend}: starting {ranks} ranks")
            teams[backend] = Team(job, processes, FLAGS.timeout)
        yield teams
    finally:
        with undisturbed():
            for team in teams.values():
                team.stop()


def report(line: str) -> None:
    """Prints a progress message."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
