"""Measures pipeline parallelism: the time of a training step of a model in stages.

    python -m benchmarks.pipeline --stages=2 --microbatches=8 \\
        --schedules=gpipe,1f1b,zb_h1,zbv --json=pipeline.json
    python -m benchmarks.pipeline --padded --stages=4 --microbatches=8

The benchmark compares this time to the time of one process, of torch's pipelines, and of tfdist's
simulator. The model is a GPT with eight blocks and width 256 for sequences of 128 characters. A
batch has 32 rows. The backends:

  tfdist        fit under tfdist.PipelineStrategy, with one or two stages on each worker
  torch         torch.distributed.pipelining over gloo; pip install torch==2.13.0
  single        plain fit of the whole model in one process
  torch_single  a plain loop with torch's whole model in one process
  tfdist_xla    with --jit: tfdist with jit_compile=True
  single_xla    with --jit: single with jit_compile=True

Every worker has one thread, and a separate core if there are enough cores. The benchmark first
starts the processes of all backends, which then sleep. In each round, each backend takes some steps
while all other backends sleep. If the machine is busy with other work for a while, all backends
become slower by about the same factor. Therefore, compare two backends by the ratio of their times
in the same round.

With --padded, the stages wait instead of computing, so there can be more workers than cores. A pass
of a microbatch through all stages of a worker takes --pass_ms. There are three passes: the forward
pass and the two halves of the backward pass, which compute the input gradients and the weight
gradients. The simulator predicts the time of a step without overhead. The difference to the
measured time is tfdist's overhead. With --pass_ms=0, the measured time consists only of overhead.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator

from absl import app, flags

from benchmarks.all_reduce.job import MissingError
from benchmarks.pipeline.backends import BACKENDS, TORCH_SCHEDULES, Entry, entries
from benchmarks.pipeline.batch import WORKLOADS
from benchmarks.pipeline.figures import format_table, make_rows
from benchmarks.pipeline.simulating import measured, padded, picture, resimulated
from benchmarks.pipeline.team import Team
from benchmarks.step_time.members import TeamError
from tfdist._src.pipeline.schedules import SCHEDULES

FLAGS = flags.FLAGS
flags.DEFINE_list("stages", ["2"], "numbers of workers; some schedules have two stages on each")
flags.DEFINE_list("microbatches", ["8"], "numbers of microbatches per batch")
flags.DEFINE_list("schedules", ["gpipe", "1f1b", "zb_h1", "zbv"], f"any of {', '.join(SCHEDULES)}")
flags.DEFINE_list(
    "backends",
    [name for name, backend in BACKENDS.items() if not backend.compiled],
    f"any of {', '.join(BACKENDS)}",
)
flags.DEFINE_bool("jit", False, "also measure the Keras backends with jit_compile=True")
flags.DEFINE_enum("model", "gpt", list(WORKLOADS), "the model; tiny is for tests")
flags.DEFINE_bool("padded", False, "stages that wait instead of computing; only for tfdist")
flags.DEFINE_float("pass_ms", 50.0, "milliseconds of a pass with --padded", lower_bound=0)
flags.DEFINE_integer("starts", 2, "sets of processes", lower_bound=1)
flags.DEFINE_integer("rounds", 5, "rounds with each set", lower_bound=2)
flags.DEFINE_integer("steps", 2, "steps in a round", lower_bound=1)
flags.DEFINE_string("torch_python", sys.executable, "a Python that has torch")
flags.DEFINE_string("json", None, "file to write the rows to")
flags.DEFINE_string("png", None, "folder for pictures of tfdist's timelines; requires matplotlib")


def are_counts(counts: list[str]) -> bool:
    """Whether all texts are positive integers."""
    return all(count.isdigit() and int(count) for count in counts)


for name in ("stages", "microbatches"):
    flags.register_validator(name, are_counts, "each is a number from 1")
for name, known in (("schedules", SCHEDULES), ("backends", BACKENDS)):
    flags.register_validator(
        name, lambda names, known=known: set(names) <= set(known), f"any of {', '.join(known)}"
    )


def main(_: list[str]) -> None:
    """Measures all backends, prints a table for each number of workers, and writes the rows."""
    rows = []
    for stages in map(int, FLAGS.stages):
        run = Run(stages)
        for start in range(FLAGS.starts):
            run.measure(start)
        group = run.rows()
        print(format_table(group), end="\n\n", flush=True)
        rows += group
    if FLAGS.json:
        with open(FLAGS.json, "w") as file:
            json.dump(rows, file, indent=1)


class Run:
    """The measurement of all backends and schedules with one number of workers.

    Args:
        stages: the number of workers of each pipeline.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        backends = ["tfdist"] if FLAGS.padded else list(FLAGS.backends)
        if FLAGS.jit:
            compiled = (f"{backend}_xla" for backend in backends)
            backends += [name for name in compiled if name in BACKENDS and name not in backends]
        counts = [int(count) for count in FLAGS.microbatches]
        self._times: dict[Entry, list[float]] = {
            entry: [] for entry in entries(backends, FLAGS.schedules, counts)
        }
        self._missing = {
            entry: "torch has no such schedule"
            for entry in self._times
            if entry.backend == "torch" and entry.schedule not in TORCH_SCHEDULES
        }
        self._simulated: dict[Entry, float] = {}
        self._first: dict[Entry, float] = {}

    def measure(self, start: int) -> None:
        """Starts a set of processes, measures several rounds, and stops the processes.

        Args:
            start: the number of this set of processes, starting from 0.
        """
        teams: dict[str, Team] = {}
        order = self._left()
        order = order[start % len(order) :] + order[: start % len(order)]
        try:
            for entry in order:
                with self._noting(entry):
                    if entry.backend not in teams:
                        teams[entry.backend] = self._start(entry.backend)
                    seconds = teams[entry.backend].first_step(entry)
                    self._first.setdefault(entry, seconds)
            for turn in range(FLAGS.rounds):
                for entry in order[:: -1 if turn % 2 else 1]:
                    with self._noting(entry):
                        if entry not in self._missing:
                            seconds = teams[entry.backend].steps(entry, FLAGS.steps)
                            self._times[entry].append(seconds / FLAGS.steps)
            if start == 0:
                self._simulate(teams)
        finally:
            for team in teams.values():
                team.stop()
        print(f"{self._stages} workers, set {start + 1} done", file=sys.stderr)

    def rows(self) -> list[dict[str, object]]:
        """Computes the rows of the table from all measurements so far."""
        times = {entry: self._times[entry] for entry in self._left()}
        return make_rows(self._stages, times, self._missing, self._simulated, self._first)

    def _start(self, backend: str) -> Team:
        seconds = FLAGS.pass_ms / 1e3 if FLAGS.padded else None
        return Team(backend, self._stages, FLAGS.model, seconds, FLAGS.torch_python)

    def _simulate(self, teams: dict[str, Team]) -> None:
        for entry in self._left():
            if not (BACKENDS[entry.backend].in_stages and entry.backend != "torch"):
                continue
            with self._noting(entry):
                timeline = measured(entry, self._stages, teams[entry.backend].timeline(entry))
                if FLAGS.png:
                    picture(timeline, entry, FLAGS.png)
                ideal = padded(entry, self._stages, FLAGS.pass_ms) if FLAGS.padded else None
                self._simulated[entry] = (ideal or resimulated(timeline)).makespan

    def _left(self) -> list[Entry]:
        return [entry for entry in self._times if entry not in self._missing]

    @contextlib.contextmanager
    def _noting(self, entry: Entry) -> Iterator[None]:
        """Catches the failure of an entry, and records the reason.

        All entries of a backend share its processes, so the other entries of the backend fail, too.
        """
        try:
            yield
        except (MissingError, TeamError) as error:
            for other in self._left():
                if other.backend == entry.backend:
                    self._missing[other] = str(error)


if __name__ == "__main__":
    app.run(main)
