"""Measures how much longer a training step takes if tfdist's monitoring watches it.

    python -m benchmarks.observing --workers=2 --models=mlp,gpt --json=observing.json

The ways to watch:

  none        without the core's recorder, and without the operations in the graph that report to
              it; this is possible only in this benchmark
  none_again  the same once more, which shows how much two measurements of equal steps differ
  recorder    with the recorder; this is the default of tfdist
  throughput  with the recorder and tfdist.callbacks.ThroughputLogger()
  straggler   with the recorder and tfdist.callbacks.StragglerMonitor(every=10)
  timeline    with the recorder and tfdist.callbacks.Timeline; all timed steps are in its window
  metrics     with the recorder and TFDIST_METRICS_PORT; the metrics are read once a second
  all         all of these; the steps are not in the window of the Timeline

In each round, the workers take some steps with each way to watch. All steps of a worker belong to
one call of `fit` in one process. So it does not matter that two processes may differ in speed by
some percent. If the machine is busy with other work for a while, all ways to watch become slower by
about the same factor. Therefore, compare two ways by the ratio of their times in the same round.
Every other round has the reverse order. `none` is always measured, because the other ways are
compared with it.

The training step is traced twice, once with the operations that report to the recorder and once
without. Both versions use the same weights.

On a machine with other work, compare the quick steps: the 10th percentile of all steps. It does not
show work that a callback does in few steps only.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from absl import app, flags

from benchmarks.all_reduce.job import MissingError
from benchmarks.all_reduce.python import require
from benchmarks.observing.figures import format_table, make_rows
from benchmarks.observing.team import Team
from benchmarks.observing.watches import WATCHES
from benchmarks.step_time.members import TeamError
from benchmarks.step_time.models import MODELS

MIN_STEPS = 10  # So that the StragglerMonitor compares the workers in every round.

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 2, "number of workers", lower_bound=1)
flags.DEFINE_list("models", ["mlp", "gpt"], f"any of {', '.join(MODELS)}")
flags.DEFINE_list("watch", list(WATCHES), f"any of {', '.join(WATCHES)}")
flags.DEFINE_integer("starts", 2, "sets of processes", lower_bound=1)
flags.DEFINE_integer("rounds", 10, "rounds with each set", lower_bound=2)
flags.DEFINE_integer(
    "steps", None, f"steps in a round; the default depends on the model, at least {MIN_STEPS}"
)
flags.DEFINE_string("json", None, "file to write the rows to")
for name, known in (("models", MODELS), ("watch", WATCHES)):
    flags.register_validator(
        name, lambda names, known=known: set(names) <= set(known), f"any of {', '.join(known)}"
    )


def main(_: list[str]) -> None:
    """Measures all ways to watch, prints a table for each model, and writes the rows."""
    watches = list(dict.fromkeys(["none", *FLAGS.watch]))
    missing: dict[str, str] = {}
    if scraped := [watch for watch in watches if WATCHES[watch].scraped]:
        try:
            require(sys.executable, "prometheus_client", "pip install 'tfdist[metrics]'")
        except MissingError as error:
            missing = dict.fromkeys(scraped, str(error))
    rows = []
    for model in FLAGS.models:
        try:
            times, recorded = measure(model, [w for w in watches if w not in missing])
        except TeamError as error:
            raise app.UsageError(f"{model}: {error}") from None
        group = make_rows(model, FLAGS.workers, times, recorded, missing)
        print(format_table(group), end="\n\n", flush=True)
        rows += group
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1))


def measure(
    model: str, watches: list[str]
) -> tuple[dict[str, list[list[float]]], dict[str, float]]:
    """Trains a model with all ways to watch.

    Returns:
        Two dictionaries. Their keys are the ways to watch. The first one contains a list of the
        rounds; a round is a list of the times of its steps in seconds. The second one contains the
        number of inputs and collectives per step that the recorder has counted in the last round.
    """
    steps = FLAGS.steps or max(MIN_STEPS, MODELS[model].steps)
    metrics = any(WATCHES[watch].scraped for watch in watches)
    times: dict[str, list[list[float]]] = {watch: [] for watch in watches}
    recorded: dict[str, float] = {}
    for start in range(FLAGS.starts):
        began = time.monotonic()
        team = Team(model, FLAGS.workers, metrics)
        try:
            for watch in watches:
                team.steps(watch, steps)  # Compiles and warms up.
            for turn in range(FLAGS.rounds):
                for watch in watches[:: -1 if turn % 2 else 1]:
                    taken, counted = team.steps(watch, steps)
                    times[watch].append(taken)
                    recorded[watch] = counted / steps
        finally:
            team.stop()
        spent = time.monotonic() - began
        print(f"{model}, set {start + 1}: {spent:.0f} s", file=sys.stderr)
    return times, recorded


if __name__ == "__main__":
    app.run(main)
