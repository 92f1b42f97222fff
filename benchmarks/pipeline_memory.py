"""Compares the memory of the workers of a pipeline to the memory of training in one process.

    python -m benchmarks.pipeline_memory --schedules=1f1b,zbv --json=memory.json

The model is a chain of equal dense layers. It is trained with few rows, so almost all memory holds
weights, gradients and the optimizer's slots. The sum of their sizes is the needed memory. The peak
is the maximum resident memory of a process, minus its resident memory after it has trained a tiny
model. A row of the table describes the worker with the highest peak.

The row `single` describes one process that trains only as many layers as one worker of the
pipeline. Its peak may be lower than the needed memory: it can free a gradient before it computes
the next one. A worker of a pipeline must keep all gradients to accumulate them over the
microbatches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.step_time.members import Members, TeamError
from benchmarks.step_time.team import free_addresses
from tfdist._src.pipeline.schedules import SCHEDULES

FLAGS = flags.FLAGS
flags.DEFINE_integer("stages", 2, "number of workers", lower_bound=2)
flags.DEFINE_integer("layers", 48, "number of layers of all workers together", lower_bound=2)
flags.DEFINE_integer(
    "width", 2500, "units of a layer, which has width x width weights", lower_bound=8
)
flags.DEFINE_integer("rows", 32, "number of rows in a batch", lower_bound=1)
flags.DEFINE_integer("microbatches", 4, "number of microbatches per batch", lower_bound=1)
flags.DEFINE_list("schedules", ["1f1b"], f"any of {', '.join(SCHEDULES)}")
flags.DEFINE_string("optimizer", "adam", "name of a Keras optimizer")
flags.DEFINE_integer("timeout", 600, "maximum seconds for each schedule", lower_bound=1)
flags.DEFINE_string("json", None, "file to write the rows to")
flags.register_validator(
    "schedules", lambda names: set(names) <= set(SCHEDULES), f"any of {', '.join(SCHEDULES)}"
)

SIZE = ("stages", "layers", "width", "rows", "microbatches")


def main(_: list[str]) -> None:
    """Measures one process and all schedules, prints a table, and writes the rows."""
    print(f"{'schedule':>15}  needed MiB  peak MiB  peak/needed")
    rows: list[dict[str, Any]] = []
    for schedule in ("single", *FLAGS.schedules):
        try:
            found = max(measure(schedule), key=lambda one: one["peak_mib"])
        except TeamError as error:
            raise app.UsageError(f"{schedule}: {error}") from None
        needed, peak = found["needed_mib"], found["peak_mib"]
        rows.append({"schedule": schedule, **found, "peak/needed": peak / needed})
        print(f"{schedule:>15}  {needed:10.0f}  {peak:8.0f}  {peak / needed:11.2f}", flush=True)
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1))


def measure(schedule: str) -> list[dict[str, float]]:
    """Trains with a schedule, and returns the needed memory and the peak of each worker."""
    addresses = [] if schedule == "single" else free_addresses(FLAGS.stages)
    order = {
        "schedule": schedule,
        "optimizer": FLAGS.optimizer,
        "addresses": addresses,
        "size": {name: FLAGS[name].value for name in SIZE},
    }
    ranks = range(max(1, len(addresses)))
    members = Members(
        [[sys.executable, "-m", "benchmarks.pipeline.peak"] for _ in ranks],
        [{**order, "rank": rank} for rank in ranks],
        FLAGS.timeout,
    )
    try:
        return members.ask("train")
    finally:
        members.stop()


if __name__ == "__main__":
    app.run(main)
