"""Compares the loss that training with gradient compression reaches with the exact one's.

    python -m benchmarks.convergence --task=char_lm,digits --codecs=none,int8,topk --json=FILE

Two workers of this machine count as two hosts, so that all that crosses between them is compressed.
For each codec they start from the same weights, see the same batches, and take the same number of
steps, one codec after the other. Each codec has the settings of `recipes.py`: its
defaults and the same learning rate, where that is enough.

`char_lm` is the example of that name, with its Adam; its loss is that on modules which are not
trained on. `digits` is a small convolutional network on scikit-learn's pictures of digits, by SGD
with momentum, with labels that are smoothed; its losses are those on all pictures that are trained
on, and on those held out.
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
flags.DEFINE_integer("steps", None, "of the optimizer; by default the task's own", lower_bound=1)
flags.DEFINE_integer("seeds", 1, "trainings by different seeds", lower_bound=1)
flags.DEFINE_float("timeout", 1800.0, "seconds to wait for a training", lower_bound=1)
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
    """Trains, prints the table, and writes the rows.

    Returns:
        1 where something could not be trained.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that everything is cleaned up.
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
    """Rows of one task for each codec, the exact training first.

    Args:
        team: that trains.
        task: a key of `TASKS`.
        codecs: names.
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
    """Trains once, and tells how it went."""
    start = time.perf_counter()
    outcome = team.train(job)
    text = ", ".join(f"{on} {loss:.4f}" for on, loss in outcome.losses.items())
    seconds = time.perf_counter() - start
    report(f"{job.task}, {job.codec}, seed {job.seed}: {text} ({seconds:.0f} s)")
    return outcome


@contextlib.contextmanager
def ending() -> Iterator[Team]:
    """A team whose workers are ended, whatever happens."""
    team = Team(FLAGS.timeout)
    try:
        yield team
    finally:
        with undisturbed():
            team.stop()


def report(line: str) -> None:
    """Tells how it goes."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
