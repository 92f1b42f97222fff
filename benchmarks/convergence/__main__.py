"""Compares the final losses of training with and without gradient compression.

    python -m benchmarks.convergence --task=char_lm,digits --codecs=none,int8,topk --json=FILE

Exact training is training without compression. The benchmark runs two workers on this machine.
tfdist treats them as workers on two hosts, so it compresses the gradients that they send to each
other. The benchmark trains with one codec after the other, always from the same weights, with the
same batches, and with the same number of steps. Usually, a codec has its default settings, and the
learning rate of the exact training. If a codec would then not reach the loss of the exact training,
it has other settings; see `recipes.py`.

The task `char_lm` is the example with this name. It is trained with Adam, and its loss is computed
on held-out modules of Python's standard library. The task `digits` is a small convolutional network
for scikit-learn's images of digits. It is trained with SGD, momentum and label smoothing, and has
two losses: one on all training images, and one on held-out images.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

from benchmarks.all_reduce.cleanup import undisturbed
from benchmarks.compression.files import has_folder, write_rows
from benchmarks.convergence.figures import format_table, is_beyond, make_rows
from benchmarks.convergence.job import Job, Outcome
from benchmarks.convergence.recipes import NONE, recipe_of
from benchmarks.convergence.tasks import TASKS
from benchmarks.convergence.team import Team
from benchmarks.step_time.members import TeamError
from tfdist.compression import CODECS

ALL = "all"
KNOWN = (NONE, *CODECS)

FLAGS = flags.FLAGS
flags.DEFINE_list("task", list(TASKS), f"any of {', '.join(TASKS)}")
flags.DEFINE_list("codecs", [ALL], f"any of {', '.join(KNOWN)}, or all; none is always trained")
flags.DEFINE_integer(
    "steps", None, "number of optimizer steps; the default depends on the task", lower_bound=1
)
flags.DEFINE_integer("seeds", 1, "number of seeds with which each codec is trained", lower_bound=1)
flags.DEFINE_float("timeout", 1800.0, "seconds to wait for one training run", lower_bound=1)
flags.DEFINE_string("json", None, "file to write the rows to")
flags.register_validator(
    "task", lambda names: names and set(names) <= set(TASKS), f"any of {', '.join(TASKS)}"
)
flags.register_validator(
    "codecs",
    lambda names: names and set(names) <= {ALL, *KNOWN},
    f"any of {', '.join(KNOWN)}, or all",
)
flags.register_validator("json", has_folder, "its folder does not exist")


def main(_: list[str]) -> int:
    """Trains with all codecs, prints the table, and writes the rows.

    Returns:
        The exit code: 1 if a training run failed, else 0.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Runs the cleanups.
    rows: list[dict[str, Any]] = []
    with ending() as team:
        for task in dict.fromkeys(FLAGS.task):
            for some in compare(team, task, KNOWN if ALL in FLAGS.codecs else FLAGS.codecs):
                rows += some
                if FLAGS.json:
                    write_rows(rows, FLAGS.json)
    print(format_table(rows))
    beyond = [f"{row['task']} {row['codec']}" for row in rows if is_beyond(row)]
    if beyond:
        print(f"more than 2 % above: {', '.join(dict.fromkeys(beyond))}")
    return int(any("missing" in row for row in rows))


def compare(team: Team, task: str, codecs: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """Trains a task with each codec, and yields the rows of each codec.

    The exact training is always the first one.

    Args:
        team: the workers.
        task: a key of `TASKS`.
        codecs: the names of the codecs.
    """
    steps = FLAGS.steps or TASKS[task].steps
    exact: list[Outcome] = []
    for codec in dict.fromkeys((NONE, *codecs)):
        settings = str(recipe_of(task, codec))
        names = {"task": task, "codec": codec, "settings": settings, "steps": steps}
        try:
            jobs = [Job(task, codec, steps, seed) for seed in range(FLAGS.seeds)]
            outcomes = [train(team, job) for job in jobs]
        except TeamError as error:
            report(f"{task}, {codec}: {error}")
            yield [{**names, "missing": str(error)}]
            continue
        exact = outcomes if codec == NONE else exact
        yield make_rows(outcomes, exact, names)


def train(team: Team, job: Job) -> Outcome:
    """Runs one training run, prints its losses and its duration, and returns the outcome."""
    start = time.perf_counter()
    outcome = team.train(job)
    text = ", ".join(f"{on} {loss:.4f}" for on, loss in outcome.losses.items())
    seconds = time.perf_counter() - start
    report(f"{job.task}, {job.codec}, seed {job.seed}: {text} ({seconds:.0f} s)")
    return outcome


@contextlib.contextmanager
def ending() -> Iterator[Team]:
    """Yields a team. Stops its workers when the context exits, also after an error."""
    team = Team(FLAGS.timeout)
    try:
        yield team
    finally:
        with undisturbed():
            team.stop()


def report(line: str) -> None:
    """Prints a progress message."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
