"""Measures how long a training step takes under tfdist and under its peers, in turns.

    python benchmarks/step_time.py --workers=1,2 --models=mlp,cnn --json=step_time.json

The processes of all backends are started and sleep; then, round after round, each backend takes
some steps while the others sleep. So a disturbance of the machine hits all alike, and what counts
is the ratio to the peer in the same round. All is done with several sets of processes, since two
processes that run the same program differ by some percent.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from absl import app, flags
from stepping.figures import format_table, make_rows
from stepping.models import MODELS
from stepping.team import Team, TeamError

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", ["1", "2"], "numbers of workers")
flags.DEFINE_list("models", ["mlp", "cnn"], f"any of {', '.join(MODELS)}")
flags.DEFINE_list(
    "backends",
    ["tfdist", "keras", "stock", "unconnected"],
    "tfdist: its fit; keras: plain fit, for one worker; for several, stock: a loop under "
    "TensorFlow's MultiWorkerMirroredStrategy, and unconnected: plain fit in each worker",
)
flags.DEFINE_integer("starts", 3, "sets of processes", lower_bound=1)
flags.DEFINE_integer("rounds", 10, "rounds with each set", lower_bound=2)
flags.DEFINE_integer("steps", None, "steps in a round; by default the model's own number")
flags.DEFINE_string("json", None, "file to write the rows to")

ALONE = ("tfdist", "keras")
SEVERAL = ("tfdist", "stock", "unconnected")


def main(_) -> None:
    """Measures, prints a table for each model, and writes the rows."""
    rows = []
    for workers in map(int, FLAGS.workers):
        possible = ALONE if workers == 1 else SEVERAL
        backends = [b for b in FLAGS.backends if b in possible]
        for model in FLAGS.models:
            times, missing = measure(model, workers, backends)
            group = make_rows(model, workers, times, missing, peer=possible[1])
            print(format_table(group), end="\n\n", flush=True)
            rows += group
    if FLAGS.json:
        with open(FLAGS.json, "w") as file:
            json.dump(rows, file, indent=1)


def measure(
    model: str, workers: int, backends: list[str]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Runs some backends in turns.

    Returns:
        For each backend its seconds per step in each round; and for each that failed, why.
    """
    steps = FLAGS.steps or MODELS[model].steps
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    missing: dict[str, str] = {}
    for _ in range(FLAGS.starts):
        teams: dict[str, Team] = {}
        try:
            for backend in [b for b in backends if b not in missing]:
                teams[backend] = Team(backend, model, workers)
                with noting(backend, missing):
                    teams[backend].steps(steps)  # Compiles and warms up.
            for turn in range(FLAGS.rounds):
                for backend in backends[:: -1 if turn % 2 else 1]:
                    with noting(backend, missing):
                        if backend not in missing:
                            times[backend].append(teams[backend].steps(steps) / steps)
        finally:
            for team in teams.values():
                team.stop()
    return {b: times[b] for b in backends if b not in missing}, missing


@contextlib.contextmanager
def noting(backend: str, missing: dict[str, str]) -> Iterator[None]:
    """Notes why a backend fails."""
    try:
        yield
    except TeamError as error:
        missing[backend] = str(error)


if __name__ == "__main__":
    app.run(main)
