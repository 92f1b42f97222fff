"""Measures the cost of fault tolerance in each step, and the time to recover from a fault.

    python -m benchmarks.recovery --json=recovery.json
    python -m benchmarks.recovery --workers=2,3 --faults=kill,stop --json=faults.json

The features, which may make each step slower:

  none        a failed step may update only some variables; this is possible only in this benchmark
  none_again  the same once more, which shows how much two measurements of equal steps differ
  agreement   the workers agree on the end of each step, so that a failed step has no effect; this
              is the default of tfdist with several workers
  snapshots   agreement, and `BackupAndRestore` saves a snapshot in each round; the time of the
              round includes the time to write the snapshot
  elastic     agreement and `Elastic`, so that training continues when workers are lost or join
  sharded     elastic with `shard_optimizer=True`
  copies      sharded with `Elastic(copies=1)`: each worker keeps a copy of another worker's shards

In each round, the workers take some steps with each feature. All steps of a worker belong to one
call of `fit` in one process. So it does not matter that two processes may differ in speed by some
percent. The last three features are exceptions: each applies to a whole call of `fit`, and so has
separate processes. If the machine is busy with other work for a while, all features become slower
by about the same factor. Therefore, compare two features by the ratio of their times in the same
round. Every other round has the reverse order. `none` is always measured, because the other
features are compared with it.

On a machine with other work, compare the quick steps (the 10th percentile of all steps) and the CPU
time of the workers.

With --faults, the benchmark sends SIGKILL (kill) or SIGSTOP (stop) to a worker after a certain
step. Training then continues with one of these backends:

  elastic   tfdist.callbacks.Elastic under `tfdist run --elastic`; the other workers continue in the
            same processes
  restart   tfdist.callbacks.BackupAndRestore under `tfdist run --max-restarts 1`
  torchrun  torch's DistributedDataParallel over gloo under torchrun, which restarts all workers;
            the new processes load the state that rank 0 has saved; pip install torch==2.13.0

The other workers detect a stopped worker after at most --silence seconds. This flag sets
TFDIST_HEARTBEAT_TIMEOUT, and the timeout of torch's process group. In each round, each backend runs
one new job. If a backend cannot run, the benchmark prints the reason.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from absl import app, flags

from benchmarks.all_reduce.job import MissingError
from benchmarks.compression.files import has_folder, write_rows
from benchmarks.recovery.cases import BACKENDS, FAULTS, RESPAWN, VICTIMS, Case, cases
from benchmarks.recovery.fault_figures import format_table as format_faults
from benchmarks.recovery.fault_figures import make_row
from benchmarks.recovery.faults import Experiment, Results, check, strike, turns
from benchmarks.recovery.features import ALONE, FEATURES
from benchmarks.recovery.figures import format_table, make_rows
from benchmarks.step_time.members import Members, TeamError
from benchmarks.step_time.team import free_addresses

MODELS = ("mlp", "batchnorm", "pipeline", "tiny")
TIMEOUT = 300.0  # The maximum time to wait for an answer of a worker, in seconds.

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", ["2"], "numbers of workers")
flags.DEFINE_list("models", ["mlp", "batchnorm"], f"any of {', '.join(MODELS)}; for --features")
flags.DEFINE_list(
    "features",
    None,
    f"features to measure, any of {', '.join(FEATURES)}; by default all, but with --faults no "
    "features are measured by default",
)
flags.DEFINE_integer("starts", 2, "sets of processes, for --features", lower_bound=1)
flags.DEFINE_integer(
    "rounds",
    None,
    "rounds; by default 40 with each set of processes, and 3 with each fault",
    lower_bound=1,
)
flags.DEFINE_integer("steps", 20, "steps in a round, for --features", lower_bound=1)
flags.DEFINE_list("faults", [], f"faults to cause, any of {', '.join(FAULTS)}")
flags.DEFINE_list("backends", list(BACKENDS), f"any of {', '.join(BACKENDS)}; for --faults")
flags.DEFINE_list(
    "respawn",
    ["yes"],
    "for the backend elastic; yes: the launcher replaces a lost worker; no: fewer workers "
    "continue; yes,no: both are measured",
)
flags.DEFINE_enum("victim", "last", list(VICTIMS), "worker with the fault: the last rank or rank 0")
flags.DEFINE_enum("fault_model", "mlp", ["mlp", "tiny"], "the model to train, for --faults")
flags.DEFINE_integer("fault_step", 90, "the step after which a fault occurs", lower_bound=1)
flags.DEFINE_integer("save_every", 50, "steps between two saved states", lower_bound=1)
flags.DEFINE_float(
    "silence", 5.0, "seconds after which an unresponsive worker counts as lost", lower_bound=1
)
flags.DEFINE_float("timeout", 300.0, "seconds to wait until training continues", lower_bound=1)
flags.DEFINE_string("torch_python", sys.executable, "a Python that has torch, for torchrun")
flags.DEFINE_string("json", None, "file to write the rows to")


def are_counts(counts: list[str]) -> bool:
    """Whether all texts are integers, and each is at least 2."""
    return bool(counts) and all(count.isdigit() and int(count) > 1 for count in counts)


flags.register_validator("workers", are_counts, "each is a number from 2")
for name, known in (
    ("models", MODELS),
    ("features", FEATURES),
    ("faults", FAULTS),
    ("backends", BACKENDS),
    ("respawn", RESPAWN),
):
    rule = f"any of {', '.join(known)}"
    flags.register_validator(name, lambda names, known=known: set(names or ()) <= set(known), rule)
flags.register_validator("json", has_folder, "its folder does not exist")
flags.register_multi_flags_validator(
    ["rounds", "features", "faults"],
    lambda values: values["rounds"] != 1 or (values["faults"] and not values["features"]),
    "--rounds is 2 or more, but for faults alone",
)


def main(_: list[str]) -> None:
    """Measures, prints a table for each model and each fault, and writes the rows."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Runs the cleanups.
    rows: list[dict[str, Any]] = []
    for group, table in measurements():
        print(table, end="\n\n", flush=True)
        rows += group
        if FLAGS.json:
            write_rows(rows, FLAGS.json)


def measurements() -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Runs the measurements that the flags select, and yields the rows and the table of each."""
    asked = FLAGS.features if FLAGS.features is not None else [] if FLAGS.faults else FEATURES
    for workers in map(int, FLAGS.workers):
        for model in FLAGS.models if asked else ():
            try:
                times = measure(model, workers, list(dict.fromkeys(["none", *asked])))
            except TeamError as error:
                raise app.UsageError(f"{model}: {error}") from None
            rows = [row | {"workers": workers} for row in make_rows(model, *times)]
            yield rows, format_table(rows)
    missing = find_missing() if FLAGS.faults else {}
    for workers in map(int, FLAGS.workers):
        for fault in FLAGS.faults:
            rows = strike_all(fault, workers, missing)
            yield rows, format_faults(rows)


def measure(
    model: str, workers: int, features: list[str]
) -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Trains a model with all features, with several sets of processes.

    Returns:
        Two dictionaries. Their keys are the features. The first one contains a list of the rounds;
        a round is a list of the times of its steps in seconds, on the slowest worker. The second
        one contains a list of the CPU seconds per step in each round, summed over the workers.
    """
    times: dict[str, list[list[float]]] = {feature: [] for feature in features}
    used: dict[str, list[float]] = {feature: [] for feature in features}
    for start in range(FLAGS.starts):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            for feature, steps, spent in feature_turns(model, workers, features, folder):
                times[feature].append(steps)
                used[feature].append(spent)
        report(f"{model}, set {start + 1}: {time.monotonic() - began:.0f} s")
    return times, used


def feature_turns(
    model: str, workers: int, features: list[str], folder: str
) -> Iterator[tuple[str, list[float], float]]:
    """Trains a model with all features, with one set of processes.

    Yields:
        For each round and each feature: the feature, the time of each step in seconds on the
        slowest worker, and the CPU seconds per step, summed over the workers.
    """
    teams: dict[str, Members] = {}
    alone = {feature: feature if feature in ALONE else "" for feature in features}
    try:
        for name in sorted(set(alone.values())):
            teams[name] = start_team(model, workers, f"{folder}/of {name}", name)
        for feature in features:
            teams[alone[feature]].ask([feature, FLAGS.steps])  # Compiles and warms up.
        for turn in range(FLAGS.rounds or 40):
            for feature in features[:: -1 if turn % 2 else 1]:
                team = teams[alone[feature]]
                team.ask(["agreement" if feature == "snapshots" else feature, 1])
                answers = team.ask([feature, FLAGS.steps])
                slower = max((taken for taken, _ in answers), key=sum)
                yield feature, slower, sum(spent for _, spent in answers) / FLAGS.steps
    finally:
        for team in teams.values():
            team.stop()


def start_team(model: str, workers: int, folder: str, alone: str) -> Members:
    """Starts the workers of a training run; see `benchmarks.recovery.worker`."""
    order = {
        "model": model,
        "addresses": free_addresses(workers),
        "folder": folder,
        "alone": alone,
    }
    orders = [{**order, "rank": rank} for rank in range(workers)]
    return Members(
        [[sys.executable, "-m", "benchmarks.recovery.worker"]] * workers, orders, TIMEOUT
    )


def find_missing() -> dict[Case, str]:
    """Returns a dictionary of the cases that cannot run here, with the reason for each."""
    missing = {}
    for case in cases(FLAGS.backends, FLAGS.respawn):
        try:
            check(case, FLAGS.torch_python)
        except MissingError as error:
            missing[case] = str(error)
            report(f"{case.backend} is skipped: {error}")
    return missing


def strike_all(fault: str, workers: int, missing: dict[Case, str]) -> list[dict[str, Any]]:
    """Measures all cases with one fault, and returns a row for each case.

    Args:
        fault: a key of `FAULTS`.
        workers: the number of workers.
        missing: the cases that cannot run, with the reason for each.
    """
    results = {case: Results() for case in cases(FLAGS.backends, FLAGS.respawn)}
    experiment = Experiment(
        FLAGS.fault_model,
        FLAGS.victim,
        FLAGS.fault_step,
        FLAGS.save_every,
        FLAGS.silence,
        FLAGS.timeout,
        FLAGS.torch_python,
    )
    for case in missing:
        results[case].failures.append(missing[case])
    for case in turns([case for case in results if case not in missing], FLAGS.rounds or 3):
        try:
            found = strike(case, fault, workers, experiment)
        except TeamError as error:
            results[case].failures.append(str(error))
            report(f"{case.backend}, {workers} workers, {fault}: {error}")
        else:
            results[case].recoveries.append(found)
            report(f"{case.backend}, {workers} workers, {fault}: {found}")
    return [make_row(case, fault, workers, results[case]) for case in results]


def report(line: str) -> None:
    """Prints a progress message."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app.run(main)
