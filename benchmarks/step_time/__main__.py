"""Compares the time of a training step with tfdist to the time with other ways to train.

    python -m benchmarks.step_time --workers=1,2 --models=mlp,cnn,gpt --json=step_time.json

The backends:

  tfdist             fit under tfdist.MultiWorkerMirroredStrategy
  tfdist_loop        a custom loop under the same strategy; several workers only
  tfdist_replica_statistics  tfdist with TFDIST_BATCH_STATISTICS=replica; several workers only
  tfdist_mse         tfdist with the mean squared error as the loss; several workers only
  tfdist_rmse        tfdist with the root mean squared error; several workers only
  tfdist_dice        tfdist with the Dice loss of the batch; several workers only
  tfdist_f1          tfdist with the mean squared error, and F1 as a metric; several workers only
  tfdist_xla         tfdist with jit_compile=True
  tfdist_tensorflow  tfdist with TensorFlow's collectives; several workers only
  tfdist_sharded     tfdist with shard_optimizer=True; several workers only
  keras              plain fit, the limit of one worker
  stock              a loop under TensorFlow's MultiWorkerMirroredStrategy; several workers only
  unconnected        plain fit in each worker concurrently, the limit of several workers
  keras_xla          keras with jit_compile=True
  unconnected_xla    unconnected with jit_compile=True
  ddp                torch's DistributedDataParallel over gloo; pip install torch==2.13.0
  ddp_unconnected    the same loop in each worker without communication, the limit of ddp
  jax                fit of Keras on JAX with DataParallel; pip install jax keras
  jax_unconnected    the same in each worker without communication, the limit of jax

The limit of a backend is the same training without communication. The table shows the limit's time
divided by the backend's time, and the backend's time divided by that of its peer, another way to
train the same model.

Every worker has a separate core, if there are enough cores. The number of rows per worker does not
depend on the number of workers. The benchmark first starts the processes of all backends, which
then sleep. In each round, each backend takes some steps while all other backends sleep. If the
machine is busy with other work for a while, all backends become slower by about the same factor.
Therefore, compare two backends by the ratio of their times in the same round.

Two processes that run the same program may differ in speed by some percent. Therefore, the
benchmark repeats the rounds with several sets of processes. The processes that are started first
compute 1 to 2 % slower. Therefore, each set starts the backends in a different order.

If a backend cannot run, the benchmark prints the reason. With --rate, each worker runs in a
separate network namespace that sends at this rate. This requires root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator

from absl import app, flags

from benchmarks.all_reduce.hosts import HERE, Hosts, make_hosts
from benchmarks.all_reduce.job import MissingError
from benchmarks.step_time.backends import BACKENDS, limit, peer, possible
from benchmarks.step_time.figures import format_table, make_rows
from benchmarks.step_time.models import MODELS, OPTIMIZERS
from benchmarks.step_time.team import Team, TeamError

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", ["1", "2"], "numbers of workers")
flags.DEFINE_list("models", ["mlp", "cnn", "gpt"], f"any of {', '.join(MODELS)}")
flags.DEFINE_list(
    "backends",
    [name for name, backend in BACKENDS.items() if not backend.of_losses],
    f"any of {', '.join(BACKENDS)}; skips backends that do not support the number of workers; by "
    "default, all backends with the usual loss and metrics",
)
flags.DEFINE_enum("optimizer", "sgd", list(OPTIMIZERS), "optimizer with Keras's default arguments")
flags.DEFINE_integer("starts", 3, "sets of processes", lower_bound=1)
flags.DEFINE_integer("rounds", 6, "rounds with each set", lower_bound=2)
flags.DEFINE_integer("steps", None, "steps in a round; the default depends on the model")
flags.DEFINE_string(
    "rate",
    "",
    "maximum send rate of each worker in the notation of tc: 1gbit; each worker then runs in a "
    "separate network namespace; if empty, all workers run on this host",
)
flags.DEFINE_string("torch_python", sys.executable, "a Python that has torch, for ddp")
flags.DEFINE_string("jax_python", sys.executable, "a Python that has jax and keras, for jax")
flags.DEFINE_string("json", None, "file to write the rows to")


def are_counts(counts: list[str]) -> bool:
    """Whether all texts are positive integers."""
    return all(count.isdigit() and int(count) for count in counts)


flags.register_validator("workers", are_counts, "each is a number from 1")
for name, known in (("models", MODELS), ("backends", BACKENDS)):
    flags.register_validator(
        name, lambda names, known=known: set(names) <= set(known), f"any of {', '.join(known)}"
    )


def main(_: list[str]) -> None:
    """Measures all backends, prints a table for each model, and writes the rows."""
    rows = []
    for workers in map(int, FLAGS.workers):
        backends = possible(FLAGS.backends, workers)
        limits = {b: limit(b, workers) for b in backends}
        peers = {b: peer(b, workers) for b in backends}
        for model in FLAGS.models:
            with make_hosts(workers if FLAGS.rate else 0, FLAGS.rate) as hosts:
                times, missing = measure(model, workers, backends, hosts)
            group = make_rows(model, workers, times, missing, limits, peers)
            print(format_table(group), end="\n\n", flush=True)
            rows += group
    if FLAGS.json:
        with open(FLAGS.json, "w") as file:
            json.dump(rows, file, indent=1)


def measure(
    model: str, workers: int, backends: list[str], hosts: Hosts = HERE
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measures several backends with several sets of processes.

    Returns:
        For each backend that did not fail, the seconds per step in each round. For each backend
        that failed, the reason.
    """
    steps = FLAGS.steps or MODELS[model].steps
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    missing: dict[str, str] = {}
    for start in range(FLAGS.starts):
        began = time.monotonic()
        teams: dict[str, Team] = {}
        try:
            order = rotated(backends, start)
            for backend in [b for b in order if b not in missing]:
                with noting(backend, missing):
                    pythons = {"torch": FLAGS.torch_python, "jax": FLAGS.jax_python}
                    optimizer = FLAGS.optimizer
                    teams[backend] = Team(backend, model, workers, optimizer, pythons, hosts=hosts)
                    teams[backend].steps(steps)  # Compiles and warms up.
            for turn in range(FLAGS.rounds):
                for backend in order[:: -1 if turn % 2 else 1]:
                    with noting(backend, missing):
                        if backend not in missing:
                            times[backend].append(teams[backend].steps(steps) / steps)
        finally:
            for team in teams.values():
                team.stop()
        spent = time.monotonic() - began
        count = "1 worker" if workers == 1 else f"{workers} workers"
        print(f"{model}, {count}, set {start + 1}: {spent:.0f} s", file=sys.stderr)
    return {b: times[b] for b in backends if b not in missing}, missing


def rotated(backends: list[str], start: int) -> list[str]:
    """Rotates the list of backends, so that each set of processes begins with another backend."""
    first = start % len(backends)
    return backends[first:] + backends[:first]


@contextlib.contextmanager
def noting(backend: str, missing: dict[str, str]) -> Iterator[None]:
    """Catches the failure of a backend, and adds the reason to `missing`."""
    try:
        yield
    except (MissingError, TeamError) as error:
        missing[backend] = str(error)


if __name__ == "__main__":
    app.run(main)
