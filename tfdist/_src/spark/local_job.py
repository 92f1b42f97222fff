"""`local_mode=True`: the launcher starts the workers on the driver's machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tfdist._src.launch.job.gpus import VISIBLE
from tfdist._src.spark.program import Program

_TAIL_LINES = 30


def run_locally(program: Program, count: int, *, use_gpu: bool, max_restarts: int) -> Any:
    """Runs the workers, shows their output, and returns what the function has returned on rank 0.

    Raises:
        RuntimeError: a worker has failed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-") as name:
        folder = Path(name)
        launcher = [sys.executable, "-m", "tfdist", "run", "-n", str(count), "--output", "all"]
        launcher += ["--max-restarts", str(max_restarts)]
        gpus = {} if use_gpu else {VISIBLE: ""}
        path = os.pathsep.join(filter(None, sys.path))
        with subprocess.Popen(
            [*launcher, *program.command(folder)],
            env={**os.environ, "PYTHONPATH": path, **gpus},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            lines: list[str] = []
            try:
                for line in process.stdout:  # A notebook shows what is printed here only.
                    print(line, end="", flush=True)
                    lines = [*lines[1 - _TAIL_LINES :], line]
            except BaseException:
                process.terminate()  # The launcher ends its workers.
                raise
        if process.returncode:
            raise RuntimeError(
                f"the training failed with exit code {process.returncode}. It printed last:\n"
                + "".join(lines)
            )
        return program.result(program.saved_result(folder))
