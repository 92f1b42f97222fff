"""Measures how much longer training steps take if they are watched, in turns.

    python -m benchmarks.observing --workers=2 --models=mlp,gpt --json=observing.json

The ways to watch:

  none        the recorder is off, and its marks are left out of the step: for this benchmark only
  none_again  the same again, which shows by how much equal steps differ
  recorder    as tfdist always runs
  throughput  with tfdist.callbacks.ThroughputLogger()
  straggler   with tfdist.callbacks.StragglerMonitor(every=10)
  timeline    the steps inside the window of a tfdist.callbacks.Timeline
  metrics     with TFDIST_METRICS_PORT; the metrics are read once a second
  all         all of these together, with a timeline outside its window

One `fit` of the same worker processes takes some steps that are watched in one way, then in
another, round after round. So a disturbance of the machine affects all ways alike, and differences
of some percent between processes do not matter. The order is reversed in every other round. `none`
is always measured. The step is traced twice, with the recorder's marks and without; both versions
use the same weights. The meaningful figure is the ratio within the same round. On a machine with
other work, it is the ratio of the quick steps (the 10th percentile of all steps), which excludes
work that a callback does in few steps only.
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

MIN_STEPS = 10  # so that a StragglerMonitor compares in every round

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 2, "number of workers", lower_bound=1)
flags.DEFINE_list("models", ["mlp", "gpt"], f"any of {', '.join(MODELS)}")
flags.DEFINE_list("watch", list(WATCHES), f"any of {', '.join(WATCHES)}")
flags.DEFINE_integer("starts", 2, "sets of processes", lower_bound=1)
flags.DEFINE_integer("rounds", 10, "rounds with each set", lower_bound=2)
flags.DEFINE_integer(
    "steps", None, f"steps in a round; by default the model's own number, at least {MIN_STEPS}"
)
flags.DEFINE_string("json", None, "file to write the rows to")
for name, known in (("models", MODELS), ("watch", WATCHES)):
    flags.register_validator(
        name, lambda names, known=known: set(names) <= set(known), f"any of {', '.join(known)}"
    )


def main(_: list[str]) -> None:
    """Measures, prints a table for each model, and writes the rows."""
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
    """Trains a model that is watched in all ways in turns.

    Returns:
        For each way to watch, the seconds of each step in each round, and the number of recorded
        inputs and collectives per step.
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
