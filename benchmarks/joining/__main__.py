"""Measures the time to start a job, and the cost of the start for rank 0.

    python -m benchmarks.joining --ranks=16,64,256,512 --json=joining.json

The ranks are processes of this machine. All imports have ended before the clock starts. The
backends:

  native  tfdist without TensorFlow: each rank performs the rendezvous, connects to all other ranks,
          creates a communicator of the native core, and calls a barrier; tfdist treats each group
          of --ranks_per_host consecutive ranks as one host
  gloo    torch.distributed.init_process_group with Gloo, and a barrier
  mpi     MPI_Init of Open MPI, and a barrier

The table has one line for each backend and number of ranks:

  seconds       the seconds until all ranks have left the barrier
  rendezvous_s  the seconds of the rendezvous, on the slowest rank
  mesh_s        the seconds in which a rank connects to all other ranks, on the slowest rank
  core_s        the seconds to create the communicator and call the barrier, on the slowest rank
  cpu_s         the CPU seconds that rank 0 uses for the start
  sent_bytes    the bytes that Python code of rank 0 sends during the start
  memory_kib    the additional memory of rank 0 after the start
  idle_cpu      the share of a core that rank 0 uses while all ranks are idle
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.all_reduce.backends.mpi import AS_ROOT, find, launcher
from benchmarks.all_reduce.compiling import build
from benchmarks.all_reduce.job import MissingError
from benchmarks.all_reduce.python import ENVIRONMENT, require

FLAGS = flags.FLAGS
flags.DEFINE_list("ranks", ["16", "64", "256"], "numbers of ranks")
flags.DEFINE_list("backends", ["native", "gloo", "mpi"], "the backends to measure")
flags.DEFINE_integer(
    "ranks_per_host", 8, "consecutive ranks that share memory, for native", lower_bound=1
)
flags.DEFINE_float("idle", 5.0, "seconds for which the ranks stay idle", lower_bound=0.0)
flags.DEFINE_float("timeout", 600.0, "maximum seconds of a start", lower_bound=1.0)
flags.DEFINE_string("torch_python", sys.executable, "a Python with torch, for Gloo")
flags.DEFINE_string("json", "", "a file for the results")

FOLDER = Path(__file__).parent
COLUMNS = {
    "seconds": "{:.2f}",
    "rendezvous_s": "{:.2f}",
    "mesh_s": "{:.2f}",
    "core_s": "{:.2f}",
    "cpu_s": "{:.2f}",
    "sent_bytes": "{:.0f}",
    "memory_kib": "{:.0f}",
    "idle_cpu": "{:.1%}",
}


def python(backend: str, interpreter: str, ranks: int) -> dict[str, Any]:
    """Measures a backend with ranks that are forks of one Python process.

    Args:
        backend: the name of the backend's module in this package.
        interpreter: the Python interpreter to start.
        ranks: the number of ranks.
    """
    arguments = map(str, (ranks, FLAGS.ranks_per_host, FLAGS.idle, FLAGS.timeout))
    with subprocess.Popen(
        [interpreter, "-m", f"benchmarks.joining.{backend}", *arguments],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        return row(process)


def native(ranks: int) -> dict[str, Any]:
    """Measures tfdist."""
    return python("native", sys.executable, ranks)


def gloo(ranks: int) -> dict[str, Any]:
    """Measures Gloo, which torch contains."""
    require(FLAGS.torch_python, "torch", "name a Python that has it by --torch_python")
    return python("gloo", FLAGS.torch_python, ranks)


def mpi(ranks: int) -> dict[str, Any]:
    """Measures Open MPI. The clock starts after `mpirun` has started all processes."""
    mpirun, mpicc = find()
    with tempfile.TemporaryDirectory() as folder:
        program = build(mpicc, [FOLDER / "mpi.c"], Path(folder) / "program")
        control = Path(folder) / "control"
        control.mkdir()
        os.mkfifo(control / "go")
        with subprocess.Popen(
            [*launcher(mpirun, ranks), str(program), str(control)],
            env={**os.environ, **AS_ROOT},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            deadline = time.monotonic() + FLAGS.timeout
            while len(os.listdir(control)) <= ranks and process.poll() is None:
                if time.monotonic() > deadline:
                    process.terminate()
                time.sleep(0.1)
            time.sleep(0.5)  # So that the last rank can open the named pipe.
            try:
                go = os.open(control / "go", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                raise RuntimeError("mpirun has not started the ranks") from None
            try:
                return row(process)
            finally:
                os.close(go)


def row(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits until a process prints its result, and returns the result."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith("ROW "):
            found: dict[str, Any] = json.loads(line.removeprefix("ROW "))
            return found
    raise RuntimeError("the ranks have ended without a result")


BACKENDS = {"native": native, "gloo": gloo, "mpi": mpi}


def main(_: list[str]) -> None:
    """Measures all backends, and prints a line for each backend and number of ranks."""
    if unknown := set(FLAGS.backends) - set(BACKENDS):
        raise app.UsageError(f"--backends: {', '.join(sorted(unknown))}; there are {[*BACKENDS]}")
    rows = []
    heading = "".join(f"{name:>13}" for name in COLUMNS)
    print(f"{'backend':8}{'ranks':>6}{heading}")
    for ranks in map(int, FLAGS.ranks):
        for backend in FLAGS.backends:
            try:
                found = BACKENDS[backend](ranks)
            except (MissingError, RuntimeError) as error:
                print(f"{backend:8}{ranks:6}  {error}", flush=True)
                continue
            rows.append({"backend": backend, **found})
            cells = (
                form.format(found[name]) if name in found else "" for name, form in COLUMNS.items()
            )
            print(f"{backend:8}{ranks:6}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    app.run(main)
