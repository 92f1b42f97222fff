"""Measures what being able to recover costs the steps of a training, in turns.

    python benchmarks/recovery.py --json=recovery.json

The features:

  none        a step that fails leaves whatever it has written: for this benchmark only
  none_again  the same once more: by how much equal steps differ
  agreement   as tfdist always runs with several workers: a step counts, or leaves no trace
  snapshots   besides, `BackupAndRestore` saves once in each round, whose time includes the writing

One `fit` of the same worker processes takes some steps of one kind, then of another, round after
round, so that a disturbance of the machine hits all alike, and processes that differ by some
percent do not matter. The order is reversed in every other round. `none` is always measured. All
kinds use the same weights. What counts is the ratio in the same round; on a machine with other
work, the ratio of the quick steps (the 10th percentile of all single ones), and that of the time
that the workers' processors have spent.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags
from recovering.features import FEATURES
from recovering.figures import format_table, make_rows
from stepping.members import Members, TeamError
from stepping.team import free_addresses

MODELS = ("mlp", "batchnorm", "tiny")
TIMEOUT = 300.0  # seconds to wait for an answer

FLAGS = flags.FLAGS
flags.DEFINE_integer("workers", 2, "number of workers", lower_bound=2)
flags.DEFINE_list("models", ["mlp", "batchnorm"], f"any of {', '.join(MODELS)}")
flags.DEFINE_list("features", list(FEATURES), f"any of {', '.join(FEATURES)}")
flags.DEFINE_integer("starts", 2, "sets of processes", lower_bound=1)
flags.DEFINE_integer("rounds", 40, "rounds with each set", lower_bound=2)
flags.DEFINE_integer("steps", 20, "steps in a round", lower_bound=1)
flags.DEFINE_string("json", None, "file to write the rows to")
for name, known in (("models", MODELS), ("features", FEATURES)):
    flags.register_validator(
        name, lambda names, known=known: set(names) <= set(known), f"any of {', '.join(known)}"
    )


def main(_: list[str]) -> None:
    """Measures, prints a table for each model, and writes the rows."""
    features = list(dict.fromkeys(["none", *FLAGS.features]))
    rows = []
    for model in FLAGS.models:
        try:
            group = make_rows(model, *measure(model, features))
        except TeamError as error:
            raise app.UsageError(f"{model}: {error}") from None
        print(format_table(group), end="\n\n", flush=True)
        rows += group
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1))


def measure(
    model: str, features: list[str]
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Trains a model with the features in turns.

    Returns:
        For each feature the seconds of each step in each round, of the slower worker; and in each
        round the seconds of processors per step, of all workers.
    """
    times: dict[str, list[list[float]]] = {feature: [] for feature in features}
    used: dict[str, list[float]] = {feature: [] for feature in features}
    for start in range(FLAGS.starts):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            for feature, steps, spent in turns(model, features, folder):
                times[feature].append(steps)
                used[feature].append(spent)
        print(f"{model}, set {start + 1}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return times, used


def turns(model: str, features: list[str], folder: str) -> Iterator[tuple[str, list[float], float]]:
    """Trains a model in one set of processes.

    Yields:
        A feature, the seconds of each of its steps in a round, and of processors per step.
    """
    order = {"model": model, "addresses": free_addresses(FLAGS.workers), "folder": folder}
    orders = [{**order, "rank": rank} for rank in range(FLAGS.workers)]
    command = [sys.executable, "-m", "recovering.worker"]
    team = Members([command] * FLAGS.workers, orders, TIMEOUT)
    try:
        for feature in features:
            team.ask([feature, FLAGS.steps])  # Compiles and warms up.
        for turn in range(FLAGS.rounds):
            for feature in features[:: -1 if turn % 2 else 1]:
                team.ask(["agreement" if feature == "snapshots" else feature, 1])
                answers = team.ask([feature, FLAGS.steps])
                slower = max((taken for taken, _ in answers), key=sum)
                yield feature, slower, sum(spent for _, spent in answers) / FLAGS.steps
    finally:
        team.stop()


if __name__ == "__main__":
    app.run(main)
