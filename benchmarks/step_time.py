"""Measures how long a training step takes under tfdist and under its peers, in turns.

    python benchmarks/step_time.py --workers=1,2 --models=mlp,cnn --json=step_time.json

The processes of all backends are started once and sleep; then, round after round, each backend
takes some steps while the others sleep. So a disturbance of the machine hits all alike, and what
counts is the ratio to the peer in the same round.
"""

from __future__ import annotations

import json

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
flags.DEFINE_integer("rounds", 10, "rounds", lower_bound=2)
flags.DEFINE_integer("steps", None, "steps in a round; by default the model's own number")
flags.DEFINE_string("json", None, "file to write the rows to")

ALONE = ("tfdist", "keras")
SEVERAL = ("tfdist", "stock", "unconnected")


def main(_) -> None:
    """Measures, prints a table, and writes the rows."""
    rows = []
    for workers in map(int, FLAGS.workers):
        possible = ALONE if workers == 1 else SEVERAL
        backends = [b for b in FLAGS.backends if b in possible]
        for model in FLAGS.models:
            steps = FLAGS.steps or MODELS[model].steps
            rounds, missing = measure(model, workers, backends, FLAGS.rounds, steps)
            peer = "keras" if workers == 1 else "stock"
            group = make_rows(model, workers, rounds, missing, peer)
            print(format_table(group), end="\n\n", flush=True)
            rows += group
    if FLAGS.json:
        with open(FLAGS.json, "w") as file:
            json.dump(rows, file, indent=1)


def measure(
    model: str, workers: int, backends: list[str], rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Runs some backends in turns.

    Returns:
        For each backend its seconds per step in each round; and for each that failed, why.
    """
    teams: dict[str, Team] = {}
    times: dict[str, list[float]] = {}
    missing: dict[str, str] = {}

    def attempt(backend: str, count: int) -> float | None:
        try:
            return teams[backend].steps(count) / count
        except TeamError as error:
            teams.pop(backend).stop()
            times.pop(backend, None)
            missing[backend] = str(error)
            return None

    try:
        for backend in backends:
            teams[backend] = Team(backend, model, workers)
            attempt(backend, steps)  # Compiles and warms up.
        for turn in range(rounds):
            for backend in list(teams)[:: -1 if turn % 2 else 1]:
                seconds = attempt(backend, steps)
                if seconds is not None:
                    times.setdefault(backend, []).append(seconds)
    finally:
        for team in teams.values():
            team.stop()
    return times, missing


if __name__ == "__main__":
    app.run(main)
