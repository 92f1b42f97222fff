"""Measures how the preprocessing of the input scales with the number of workers.

    python -m benchmarks.input --workers=1,2 --pipelines=jpeg,text,numpy --json=input.json

The ways to divide the input:

  never  each worker preprocesses all rows (input_division="never")
  auto   each worker preprocesses its own rows (input_division="auto"); the batches are the same
  files  each worker reads a share of the files (the auto-shard policy FILE of TensorFlow); the
         batches are others than in one process

The pipelines:

  jpeg   decodes and resizes JPEG images from TFRecord files
  text   splits and hashes the words of lines
  numpy  scales rows of an array; there is almost nothing to divide

Worker i runs on core i. In each round, all numbers of workers and all ways take some steps, one
after another. Compare two of them by the ratio of their times in the same round. A single worker is
always measured, because the others are compared with it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks.all_reduce.columns import format_rows
from benchmarks.step_time.figures import divide, format_cell, spread
from benchmarks.step_time.members import Members, TeamError
from benchmarks.step_time.team import free_addresses

PIPELINES = ("jpeg", "text", "numpy")
DIVISIONS = ("never", "auto", "files")
BATCH = 64

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", ["1", "2"], "numbers of workers")
flags.DEFINE_list("pipelines", list(PIPELINES), f"any of {', '.join(PIPELINES)}")
flags.DEFINE_list("divisions", list(DIVISIONS), f"any of {', '.join(DIVISIONS)}")
flags.DEFINE_integer("rounds", 5, "rounds", lower_bound=2)
flags.DEFINE_integer("steps", 20, "steps in a round", lower_bound=1)
flags.DEFINE_string("json", None, "file to write the rows to")
flags.register_validator("workers", lambda v: all(n.isdecimal() and int(n) for n in v), "integers")
for _name, _known in (("pipelines", PIPELINES), ("divisions", DIVISIONS)):
    flags.register_validator(
        _name, lambda names, known=_known: set(names) <= set(known), f"any of {', '.join(_known)}"
    )

COLUMNS = {
    "pipeline": "pipeline",
    "workers": "workers",
    "division": "division",
    "rows_per_second": "rows/s",
    "cpu_seconds_per_1000_rows": "CPU s/1000 rows",
    "step_ms": "median ms",
    "waiting_share": "waiting",
    "processed_share": "processed",
    "speedup": "speed-up",
    "cpu_ratio": "CPU/alone",
}

Entry = tuple[int, str]  # the number of workers, and the way to divide the input
Round = list[list[float]]  # the answers of the workers


class Team(Members):
    """Workers that sleep until the driver requests steps."""

    def __init__(self, pipeline: str, folder: str, workers: int) -> None:
        addresses = free_addresses(workers) if workers > 1 else []
        order = {"pipeline": pipeline, "folder": folder, "addresses": addresses}
        command = [sys.executable, "-m", "benchmarks.input.worker"]
        super().__init__(
            [command] * workers, [{**order, "rank": rank} for rank in range(workers)], 300.0
        )


def main(_: list[str]) -> None:
    """Measures all pipelines, prints a table for each, and writes the rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _write_files(folder)
        for pipeline in FLAGS.pipelines:
            try:
                group = make_rows(pipeline, FLAGS.steps, measure(pipeline, folder))
            except TeamError as error:
                raise app.UsageError(f"{pipeline}: {error}") from None
            print(format_rows(group, COLUMNS, format_cell), end="\n\n", flush=True)
            rows += group
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(rows, indent=1))


def _write_files(folder: str) -> None:
    from benchmarks.input import pipelines

    pipelines.write_files(Path(folder))


def measure(pipeline: str, folder: str) -> dict[Entry, list[Round]]:
    """Trains with all numbers of workers and all ways, and returns the rounds of each."""
    counts = sorted({1, *map(int, FLAGS.workers)})
    ways = [way for way in FLAGS.divisions if way != "files" or pipeline != "numpy"]
    entries: list[Entry] = [(1, "never"), *((n, way) for n in counts if n > 1 for way in ways)]
    rounds: dict[Entry, list[Round]] = {entry: [] for entry in entries}
    teams = {}
    try:
        for count in counts:
            teams[count] = Team(pipeline, folder, count)
        for count, way in entries:
            teams[count].ask([way, 2])  # Compiles and warms up.
        for turn in range(FLAGS.rounds):
            for count, way in entries[:: -1 if turn % 2 else 1]:
                rounds[count, way].append(teams[count].ask([way, FLAGS.steps]))
    finally:
        for team in teams.values():
            team.stop()
    return rounds


def make_rows(pipeline: str, steps: int, rounds: dict[Entry, list[Round]]) -> list[dict[str, Any]]:
    """Returns one row for each number of workers and each way to divide the input.

    Args:
        pipeline: the name of the pipeline.
        steps: the number of steps in a round.
        rounds: the answers of the workers in each round; see `worker.work`.

    Returns:
        The rows. Each value is a median over the rounds.

        - `rows_per_second`: the rows of all workers together.
        - `cpu_seconds_per_1000_rows`: the CPU time of all workers together.
        - `step_ms`: the time of a step on the slowest worker.
        - `waiting_share`: the fraction of the time that a worker waited for its input; missing for
          a single worker.
        - `processed_share`: the number of elements that a worker has processed, divided by the rows
          of all workers; missing if the input is not divided.
        - `speedup` and `cpu_ratio`: the rows per second, and the CPU time, divided by those of one
          worker in the same round.
    """
    seconds = {
        entry: [max(a[0] for a in answers) for answers in of] for entry, of in rounds.items()
    }
    cpu = {entry: [sum(a[1] for a in answers) for answers in of] for entry, of in rounds.items()}
    alone = (1, "never")
    rows = []
    for (workers, way), answers in rounds.items():
        entry = (workers, way)
        step = _median(seconds[entry]) / steps
        row: dict[str, Any] = {"pipeline": pipeline, "workers": workers, "division": way}
        row["rows_per_second"] = BATCH / step
        row["cpu_seconds_per_1000_rows"] = 1000 * _median(cpu[entry]) / (steps * BATCH)
        row["step_ms"] = 1e3 * step
        if workers > 1:
            row["waiting_share"] = _median([max(a[3] for a in of_round) for of_round in answers])
        if way == "auto" and workers > 1:
            shares = [max(a[2] for a in of_round) / (steps * BATCH) for of_round in answers]
            row["processed_share"] = _median(shares)
        if entry != alone:
            row["speedup"] = _median(divide(seconds[alone], seconds[entry]))
            row["cpu_ratio"] = _median(divide(cpu[entry], cpu[alone]))
        rows.append(row)
    return rows


def _median(values: Sequence[float]) -> float:
    _, middle, _ = spread(values)
    return middle


if __name__ == "__main__":
    app.run(main)
