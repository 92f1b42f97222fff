"""Runs notebooks cell by cell: in one process, and on two workers with a working folder each.

Strategies of TensorFlow become `tfdist.MultiWorkerMirroredStrategy`. A cell that runs in one
process must run on both workers, with the same logs of `fit` and `evaluate`, and must print the
same numbers. If a cell is refused and the error names a line, the notebook runs again with that
line around the cell that creates the model. If numbers differ, it runs again in one process with
initial weights that differ by rounding: how much does that alone change? For example with a copy
of https://github.com/tensorflow/docs:

    python -m tests.guides.notebooks docs/site/en/tutorials/distribute/keras.ipynb
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.guides import notebook_runner
from tests.guides.outcomes import REMEDY, Outcome, difference, refused, to_scope, verdict

ROOT = Path(__file__).parents[2]
WORKERS = 2
ROWS = 2048
# In one process, too, since sums by several threads are rounded otherwise.
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1")


def main() -> int:
    """Returns 1 if a cell differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.guides.notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("notebooks", type=Path, nargs="+", help="*.ipynb")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run (600)")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"pictures of digits ({ROWS})")
    options = parser.parse_args()
    different = 0
    for notebook in options.notebooks:
        lines, found = compare(notebook, options.timeout, options.rows)
        print("\n".join(lines), flush=True)
        different += found
    return 1 if different else 0


def compare(notebook: Path, timeout: float, rows: int = ROWS) -> tuple[list[str], int]:
    """Runs a notebook in one process and on two workers.

    Args:
        notebook: its path.
        timeout: seconds for one run.
        rows: of the training pictures in Keras's data sets of digits.

    Returns:
        A line for each cell and worker, and the number of cells that differ.
    """
    [alone] = launch(notebook, "alone", timeout, rows)
    workers = first = launch(notebook, "distributed", timeout, rows)
    scoped = to_scope(alone, first[0])
    if scoped:
        workers = launch(notebook, "distributed", timeout, rows, scoped)
    pairs = [pair for worker in workers for pair in zip(alone, worker, strict=True)]
    rounded = alone
    if any(difference(*pair) for pair in pairs):
        [rounded] = launch(notebook, "rounded", timeout, rows)
    lines, different = [], 0
    for rank, (before, after) in enumerate(zip(first, workers, strict=True)):
        for number, (expected, original, cell) in enumerate(zip(alone, before, after, strict=True)):
            said = verdict(expected, cell, rounded[number])
            different += said.startswith("differs")
            if refusal := refused(expected, original):
                said = f"refused: {refusal}\n    with `{REMEDY}`: {said}"
            lines.append(f"{notebook.stem}, cell {number}, worker {rank}: {said}")
    if scoped:
        lines.append(f"{notebook.stem}: `{REMEDY}` around the cells {scoped}")
    return lines, different


def launch(
    notebook: Path, way: str, timeout: float, rows: int, scoped: Sequence[int] = ()
) -> list[list[Outcome]]:
    """Runs a notebook in processes of its own, and returns the outcomes of each process.

    Args:
        notebook: its path.
        way: "alone", "rounded" or "distributed".
        timeout: in seconds.
        rows: of the training pictures in Keras's data sets of digits.
        scoped: the cells that run inside the strategy's scope.
    """
    workers = WORKERS if way == "distributed" else 1
    launcher = ["-m", "tfdist", "run", "-n", str(workers)] if workers > 1 else []
    environment: dict[str, Any] = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **_THREADS,
        "TFDIST_COLLECTIVE_TIMEOUT": str(timeout / 2),
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with tempfile.TemporaryDirectory(prefix="notebook-") as name:
        folder = Path(name)
        arguments = [str(notebook.absolute()), way, name, str(rows), json.dumps([*scoped])]
        command = [sys.executable, *launcher, notebook_runner.__file__, *arguments]
        with (folder / "output").open("wb") as output:
            subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=timeout)
        files = [folder / f"cells.{rank}" for rank in range(workers)]
        assert all(file.exists() for file in files), (folder / "output").read_text()[-3000:]
        return [json.loads(file.read_text()) for file in files]


if __name__ == "__main__":
    sys.exit(main())
