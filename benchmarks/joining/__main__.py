"""Measures the time to start a job, and its cost for rank 0, for several numbers of ranks.

    python -m benchmarks.joining --ranks=16,64,256,512 --json=joining.json

The ranks are processes of this machine. tfdist's ranks, without TensorFlow, perform the rendezvous,
connect to all other ranks, open a communicator of the native core, and call a barrier.
`--ranks_per_host` consecutive ranks count as one host. The other libraries do the same: Gloo by
`torch.distributed.init_process_group` and a barrier, Open MPI by `MPI_Init` and a barrier. The
ranks have completed their imports before the clock starts.

The table shows, for each number of ranks, the seconds until all ranks have left the barrier, and
the parts of this time for the rendezvous, the full mesh, and the core. Further columns show the
cost for rank 0: CPU seconds, bytes that its Python code has sent, additional memory, and its share
of a core while all ranks are idle.
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
flags.DEFINE_list("backends", ["native", "gloo", "mpi"], "what to start")
flags.DEFINE_integer("ranks_per_host", 8, "ranks that share memory", lower_bound=1)
flags.DEFINE_float("idle", 5.0, "seconds that the ranks stay idle", lower_bound=0.0)
flags.DEFINE_float("timeout", 600.0, "seconds that a start may take", lower_bound=1.0)
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
    """Starts ranks that are forks of one Python process."""
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
    """Measures Gloo, by torch."""
    require(FLAGS.torch_python, "torch", "name a Python that has it by --torch_python")
    return python("gloo", FLAGS.torch_python, ranks)


def mpi(ranks: int) -> dict[str, Any]:
    """Measures Open MPI; its launcher has started all processes before the clock starts."""
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
            time.sleep(0.5)  # so that the last rank can open the pipe
            try:
                go = os.open(control / "go", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                raise RuntimeError("mpirun has not started the ranks") from None
            try:
                return row(process)
            finally:
                os.close(go)


def row(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the result row that a program prints."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith("ROW "):
            found: dict[str, Any] = json.loads(line.removeprefix("ROW "))
            return found
    raise RuntimeError("the ranks have ended without a result")


BACKENDS = {"native": native, "gloo": gloo, "mpi": mpi}


def main(_: list[str]) -> None:
    """Prints a line for each backend and number of ranks."""
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
